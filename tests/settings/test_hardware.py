"""Facts about this machine that need no torch, and the dtype that follows from them."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_rl.assembly.training import note_on_dtype
from grpo_rl.cli import main
from grpo_rl.settings import hardware
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.derived import dtype
from grpo_rl.settings.hardware import default_dtype, lacks_bfloat16
from grpo_rl.settings.schema import Settings
from grpo_rl.testing import run_script, save_tiny_model, tiny_run

ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 fma avx f16c avx2 vaes\nbugs\t: spectre_v1\n"
ZEN_4 = ZEN_3.replace("avx2", "avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16")
NO_BF16_OF_ITS_OWN = ZEN_3.replace("avx2", "avx2 avx512f avx512dq avx512bw avx512vl")  # converted, and still fast
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Gives this machine a CPU of that description, and no GPU."""

    def set_cpu(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)

    monkeypatch.setattr(hardware, "CPU_FILE", tmp_path / "cpuinfo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return set_cpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ZEN_3, "float32"),
        (ZEN_4, "bfloat16"),
        (NO_BF16_OF_ITS_OWN, "bfloat16"),
        (GRAVITON, "bfloat16"),
        ("", "bfloat16"),
    ],
)
def test_the_dtype_is_float32_on_an_x86_cpu_without_avx512(cpu, text, expected):
    cpu(text)
    assert default_dtype() == dtype(Settings.read(compose_config("grpo_gsm8k", []))) == expected


def test_what_can_not_be_read_means_bfloat16(cpu):
    assert default_dtype() == "bfloat16"  # there is no such file, as on a Mac


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the rule is for x86 and Linux")
def test_this_cpu_is_what_pytorch_says():
    assert lacks_bfloat16() == (not torch.cpu.get_capabilities()["avx512_bw"])
    assert lacks_bfloat16() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.slow
def test_a_dtype_that_is_set_stays_and_a_cluster_is_not_this_machine(cpu):
    cpu(ZEN_3)
    assert Settings.read(compose_config("grpo_gsm8k", ["train_model.dtype=bfloat16"])).train_model.dtype == "bfloat16"
    cluster = Settings.read(compose_config("grpo_gsm8k", ["ray.address=auto", "mode=async"]))
    assert cluster.train_model.dtype == "bfloat16"


def test_a_gpu_means_bfloat16(cpu, tmp_path, monkeypatch):
    cpu(ZEN_3)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(hardware, "GPU_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(hardware.importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert default_dtype() == "bfloat16"
    monkeypatch.setattr(hardware.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert default_dtype() == "float32"  # which torch can't use


@pytest.mark.slow
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
        "Weights are float32: nearly all x86 CPUs without AVX-512, as this one, are slow in bfloat16"
    )
    slow = note_on_dtype("bfloat16", torch.device("cpu"))
    assert slow and slow.endswith("train_model.dtype=float32 may be many times faster")
    assert note_on_dtype("bfloat16", torch.device("cuda")) is None
    cpu(ZEN_4)
    assert note_on_dtype("float32", torch.device("cpu")) is note_on_dtype("bfloat16", torch.device("cpu")) is None


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch, asked before, goes on seeing a GPU that is hidden")
def test_a_run_on_a_cpu_without_bfloat16_trains_in_float32_and_goes_on_elsewhere_in_the_dtype_it_began_with(
    cpu, tmp_path, capsys
):
    script, folder = Path(__file__).parents[2] / "sota" / "grpo.py", tmp_path / "run"
    words = [
        *tiny_run(tmp_path),
        "train_model.dtype=null",
        "train.total_dialog_turns=16",
        "optimizer.schedule=constant",
    ]
    cpu(ZEN_3)
    run_script(script, words, folder)
    assert "Weights are float32" in " ".join(capsys.readouterr().out.split())
    assert yaml.safe_load((folder / "config.yaml").read_text())["train_model"]["dtype"] == "float32"
    assert {weight.dtype for weight in load_file(folder / "model" / "model.safetensors").values()} == {torch.float32}
    cpu(ZEN_4)
    longer = [*words, "train.total_dialog_turns=32", f"resume={folder}"]
    with pytest.raises(SystemExit, match="set train_model.dtype=float32, as when the run began"):
        run_script(script, longer, tmp_path / "other")
    run_script(script, [*longer, "train_model.dtype=float32"], tmp_path / "third")
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()][-2:] == [1, 2]
