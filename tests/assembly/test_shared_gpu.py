"""One GPU for training and sampling at the same time: what is refused, how weights travel, what each side may hold."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("ray")

from grpo_rl.assembly import asynchronous, site
from grpo_rl.assembly.site import GIB, check_shares, kept_bytes
from grpo_rl.assembly.sync import vllm_options
from grpo_rl.planner.memory import Shape, Training, kept_state
from grpo_rl.policies.loading import skeleton
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import Settings
from grpo_rl.weights.shared_memory import GPU_BYTES, GpuMemory

pytestmark = pytest.mark.slow


def settings_of(folder, *words):
    words = [f"model.name={folder}", "mode=async", "train_model.dtype=bfloat16", *words]
    return Settings.read(compose_config("grpo_gsm8k", words))


def plan_of(settings, visible=1):
    return allocate(settings, "async", visible=visible, cores=4)


ADAPTERS = ["train_model.lora.rank=4", "train_model.lora.push=adapter"]


@pytest.mark.parametrize(
    ("visible", "words", "transfer"),
    [
        (0, ["null"], "shared_memory"),
        (1, ["null"], "ipc"),
        (1, ["ipc"], "ipc"),
        (1, ["shared_memory"], "shared_memory"),
        (1, ["null", *ADAPTERS], "ipc"),
        (2, ["null"], "nccl"),
        (2, ["shared_memory"], "shared_memory"),
        (0, ["ipc"], "^no GPU is there, and .* reaches an engine on the trainer's own GPU only; .* shared_memory$"),
        (2, ["ipc"], "^engines have GPUs of their own, .* leave the setting out for nccl$"),
        (1, ["nccl"], "^inference_model.transfer=nccl sends between GPUs, .* leave the setting out for ipc$"),
        (0, ["nccl"], "^no GPU is there for inference_model.transfer=nccl, which"),
        (2, ["null", *ADAPTERS], "^train_model.lora.push=adapter with inference_model.transfer=None, which"),
    ],
)
def test_weights_travel_as_the_devices_allow_and_any_other_way_is_refused_with_one_that_does(
    tiny_model, visible, words, transfer
):
    settings = settings_of(tiny_model, f"inference_model.transfer={words[0]}", *words[1:])
    plan = plan_of(settings, visible)
    if not transfer.startswith("^"):
        assert site.check_transfer(settings, plan) == transfer
        return
    with pytest.raises(ValueError, match=transfer):
        site.check_transfer(settings, plan)


def test_weights_that_do_not_fit_into_their_share_are_refused_before_anything_starts(tiny_model):
    settings = settings_of(tiny_model, "inference_model.gpu_memory_utilization=0.6")
    plan, parameters = plan_of(settings), sum(p.numel() for p in skeleton(tiny_model).parameters())
    # bf16 weights 2; fp32 masters 4, gradients 4, moments 8 beside bf16 weights 2; the trainer has 0.95 - 0.6.
    check_shares(settings, tiny_model, plan, 1.01 * parameters * 18 / 0.35)
    message = f"what training keeps between steps are {18 * parameters / GIB:.1f} GiB, and of cuda:0, which trains and "
    with pytest.raises(ValueError, match="^" + re.escape(message) + ".*time, 35% are .*; lower .*utilization=0.6, or"):
        check_shares(settings, tiny_model, plan, 0.99 * parameters * 18 / 0.35)
    small = settings_of(tiny_model, "inference_model.gpu_memory_utilization=0.05", "train_model.lora.rank=1")
    with pytest.raises(ValueError, match="^the engine's weights are .*, 5% are .*; raise inference_model.gpu_memory_"):
        check_shares(small, tiny_model, plan_of(small), 0.99 * parameters * 2 / 0.05)


@pytest.mark.parametrize(
    ("words", "training", "reference"),
    [
        ([], Training(), 0),
        (["policy.kl_coef=0.1"], Training(), 2),
        (["optimizer.name=sgd"], Training(moments=0), 0),
        (["train.mixed_precision=false"], Training(masters=False), 0),
        (["train_model.dtype=float32"], Training(masters=False), 0),
    ],
)
def test_what_training_keeps_is_what_the_planner_counts(tiny_model, words, training, reference):
    settings = settings_of(tiny_model, *words)
    model = skeleton(tiny_model).to(getattr(torch, settings.train_model.dtype))
    shape = Shape.of(model)
    planned = sum(kept_state(shape, training, 1).values()) + reference * shape.parameters
    assert kept_bytes(settings, shape.parameters) == planned


def test_the_trainer_is_kept_within_its_share(tiny_model, monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    settings = settings_of(tiny_model, "inference_model.gpu_memory_utilization=0.4")
    site.divide_memory(settings, tiny_model, plan_of(settings))
    assert limits == [(0.55, torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("words", "visible", "expected"),
    [
        # 4 prompts x 8 responses, of the versions 0, 1 and 2 behind; on one of three engines 4 prompts of 12.
        ([], 1, 96),
        (["train_model.num_devices=1"], 4, 32),
        (["train.max_staleness=0", "evaluate.rows=50"], 1, 50),
        (["env.num_envs=512", "train.optim_batch_size=4096"], 1, 1024),
        (["inference_model.max_num_seqs=7"], 1, 7),
    ],
)
def test_an_engine_computes_as_many_responses_at_a_time_as_it_is_sent(tiny_model, words, visible, expected):
    settings = settings_of(tiny_model, *words)
    assert vllm_options(settings, tiny_model, plan_of(settings, visible))["max_num_seqs"] == expected


def test_an_engine_that_is_replaced_next_to_a_trainer_gets_the_cache_that_was_measured_before(tiny_model, monkeypatch):
    settings, made = settings_of(tiny_model), []

    class Engine:
        name, node = "engine 0", "here"

        async def cache_bytes(self):
            return 12345

        async def close(self): ...

    async def launch(name, make, *_):
        made.append(make.keywords)
        return Engine()

    monkeypatch.setattr(asynchronous, "launch", launch)
    monkeypatch.setattr(asynchronous, "FleetEngine", lambda fleet, loop, transport: (fleet, loop))
    plan = plan_of(settings)
    fleet, loop = cast(Any, asynchronous.make_engine(settings, tiny_model, site.Site(plan, None, 0, 1)))
    try:
        loop.run(asyncio.wait_for(fleet._launch(0), 10))
        assert [arguments.get("cache_bytes") for arguments in made] == [None, 12345]
        assert made[0]["transfer"] == "ipc"
    finally:
        loop.run(fleet.close())
        loop.close()


def test_weights_on_a_shared_gpu_go_through_its_memory(tiny_model, monkeypatch):
    settings, sizes = settings_of(tiny_model), []

    def memory(size, device):
        sizes.append((size, str(device)))
        return object.__new__(GpuMemory)

    monkeypatch.setattr("grpo_rl.weights.shared_memory.GpuMemory", memory)
    engine = SimpleNamespace(dtype=torch.bfloat16, takes_adapters=False, proves_bytes=False)
    asynchronous.make_transport(settings, tiny_model, plan_of(settings), [engine])
    assert sizes == [(GPU_BYTES, "cuda:0")]


def test_nccl_refuses_buffers_of_their_own_dtype_and_names_a_transfer_that_carries_them(tiny_model, monkeypatch):
    settings = settings_of(tiny_model)
    monkeypatch.setattr(asynchronous, "check_transfer", lambda *_: "nccl")
    monkeypatch.setattr(asynchronous, "saved_buffers", lambda _: {"gate.e_score_correction_bias": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"bias keeps its own; set inference_model\.transfer=shared_memory$"):
        asynchronous.make_transport(settings, tiny_model, plan_of(settings), [])
