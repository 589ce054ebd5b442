"""The main script with adapters, on CPU with a tiny model: what it leaves, how it resumes, what it refuses."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_rl.monitor.metrics import read_metrics
from tests.run.test_run import assert_resumes, masters, run

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """A run with adapters, held to their base, and with dropout."""
    adapters = ["train_model.lora.rank=4", "train_model.lora.targets=[q_proj,up_proj,down_proj]"]
    held = ["train_model.lora.dropout=0.1", "policy.kl_coef=0.1", "train.total_dialog_turns=48"]
    return [*tiny_run, *adapters, *held, "train.micro_batch_tokens=8192", "sampling.temperature=0.5"]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """(folder, how often a model was loaded) of a whole run."""
    loaded, from_pretrained = [], AutoModelForCausalLM.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(
            AutoModelForCausalLM, "from_pretrained", lambda *a, **kw: loaded.append(a) or from_pretrained(*a, **kw)
        )
        return run(tiny, tmp_path_factory.mktemp("whole") / "run"), len(loaded)


def test_the_base_is_loaded_for_policy_and_engine_and_no_third_time_for_the_reference(finished):
    folder, loaded = finished
    assert loaded == 2
    first, *_, last = read_metrics(folder)
    # The first collection's last optimizer steps have moved already, so not even its KL is quite zero.
    # At another temperature than the policy's the reference would be 0.34 nats away from it.
    assert 0 <= first["kl/ref"] < 0.02 < last["kl/ref"]


def test_checkpoints_hold_adapters_alone_and_the_run_leaves_a_whole_model_that_has_moved(finished, tiny):
    folder, _ = finished
    saved = masters(folder)
    assert len(saved) == 2 * 2 * 3 and all(".lora_" in name for name in saved)
    start = AutoModelForCausalLM.from_pretrained(tiny[0].split("=")[1])
    trained = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
    for name, parameter in start.named_parameters():
        is_target = any(target in name for target in ("q_proj", "up_proj", "down_proj"))
        assert torch.equal(parameter, trained[name]) != is_target, name


@pytest.mark.cases(1)
@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(finished, tiny, tmp_path, step):
    whole, _ = finished
    assert_resumes(whole, tiny, step, tmp_path / "cut")
