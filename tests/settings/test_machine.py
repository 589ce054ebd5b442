"""Facts about this machine that need no torch, and the dtype that follows from them."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_runs import run_script, tiny_run

from grpo_rl.settings import devices
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.derived import dtype
from grpo_rl.settings.devices import default_dtype
from grpo_rl.settings.schema import Settings

ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 fma avx f16c avx2 vaes\nbugs\t: spectre_v1\n"
ZEN_4 = ZEN_3.replace("avx2", "avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16")
CASCADE_LAKE = ZEN_3.replace("avx2", "avx2 avx512f avx512dq avx512bw avx512vl")
SAPPHIRE_RAPIDS = CASCADE_LAKE.replace("avx512vl", "avx512vl amx_bf16")
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd sve bf16\n"


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Gives this machine a CPU of that description, and no GPU."""
    monkeypatch.setattr(devices, "CPU_FILE", tmp_path / "cpuinfo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return devices.CPU_FILE.write_text


@pytest.mark.slow
def test_the_dtype_is_float32_on_an_x86_cpu_without_instructions_for_bfloat16(cpu):
    for text in (ZEN_3, CASCADE_LAKE, ZEN_4, SAPPHIRE_RAPIDS, GRAVITON, ""):
        cpu(text)
        expected = "float32" if text in (ZEN_3, CASCADE_LAKE) else "bfloat16"
        assert default_dtype() == dtype(Settings.read(compose_config("grpo_gsm8k", []))) == expected


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch, asked before, goes on seeing a GPU that is hidden")
def test_a_run_on_a_cpu_without_bfloat16_trains_in_float32_and_elsewhere_goes_on_in_it(cpu, tmp_path, capsys):
    script, folder = Path(__file__).parents[2] / "sota" / "grpo.py", tmp_path / "run"
    own = ["train_model.dtype=null", "train.total_dialog_turns=16", "optimizer.schedule=constant"]
    words = [*tiny_run(tmp_path), *own]
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
