"""What is known of this machine without torch, and the dtype that follows from it."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

from grpo_rl.build.training import note_on_dtype
from grpo_rl.cli import main
from grpo_rl.settings import hardware
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.derived import dtype
from grpo_rl.settings.hardware import fastest_dtype, lacks_bfloat16
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import save_tiny_model

ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 fma avx f16c avx2 vaes\nbugs\t: spectre_v1\n"
ZEN_4 = ZEN_3.replace("avx2", "avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16")
NO_BF16_OF_ITS_OWN = ZEN_3.replace("avx2", "avx2 avx512f avx512dq avx512bw avx512vl")  # converted, and still fast
ARROW_LAKE = ZEN_3.replace("avx2", "avx2 avx_vnni avx_ne_convert")
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Gives this machine a CPU of that description, and no GPU."""

    def set_cpu(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)

    monkeypatch.setattr(hardware, "CPU_FILE", tmp_path / "cpuinfo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return set_cpu


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ZEN_3, "float32"),
        (ZEN_4, "bfloat16"),
        (NO_BF16_OF_ITS_OWN, "bfloat16"),
        (ARROW_LAKE, "bfloat16"),
        (GRAVITON, "bfloat16"),
        ("", "bfloat16"),
    ],
)
def test_the_dtype_is_float32_where_the_cpu_certainly_has_no_products_in_bfloat16(cpu, text, expected):
    cpu(text)
    assert fastest_dtype() == dtype(Settings.read(compose_config("grpo_gsm8k", []))) == expected


def test_what_can_not_be_read_means_bfloat16(cpu):
    assert fastest_dtype() == "bfloat16"  # there is no such file, as on a Mac


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the rule is for x86 and Linux")
def test_this_cpu_is_what_onednn_says():
    assert lacks_bfloat16() == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def test_a_dtype_that_is_set_stays_and_a_cluster_is_not_this_machine(cpu):
    cpu(ZEN_3)
    assert Settings.read(compose_config("grpo_gsm8k", ["train_model.dtype=bfloat16"])).train_model.dtype == "bfloat16"
    cluster = Settings.read(compose_config("grpo_gsm8k", ["ray.address=auto", "mode=async"]))
    assert cluster.train_model.dtype == "bfloat16"


def test_a_gpu_means_bfloat16(cpu, tmp_path, monkeypatch):
    cpu(ZEN_3)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(hardware, "GPU_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert fastest_dtype() == "bfloat16"


def test_a_plan_for_gpus_is_the_same_whatever_cpu_it_is_made_on(cpu, tmp_path, capsys):
    command = ["plan", f"model.name={save_tiny_model(tmp_path / 'model')}", "cluster=8xH100"]

    def planned() -> str:
        main(command)
        return capsys.readouterr().out

    cpu(ZEN_4)
    on_zen_4 = planned()
    cpu(ZEN_3)
    assert planned() == on_zen_4


def test_a_run_says_what_its_dtype_has_to_do_with_the_cpu(cpu):
    cpu(ZEN_3)
    assert note_on_dtype("float32", torch.device("cpu")) == (
        "Weights are float32: this CPU has no fast products in bfloat16"
    )
    slow = note_on_dtype("bfloat16", torch.device("cpu"))
    assert slow and slow.endswith("many times as long as with train_model.dtype=float32")
    assert note_on_dtype("bfloat16", torch.device("cuda")) is None
    cpu(ZEN_4)
    assert note_on_dtype("float32", torch.device("cpu")) is note_on_dtype("bfloat16", torch.device("cpu")) is None
