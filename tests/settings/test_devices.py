"""The device plan, for machines of 0 to 64 GPUs, none of which has to be there."""

import pytest
import torch
from omegaconf import OmegaConf

from grpo_rl.settings import devices
from grpo_rl.settings.devices import allocate


def config(train=None, ref=None, inference=None, kl_coef=0.0, tp=None, share=0.5):
    """A config in which a number is a role's num_devices and a list its devices."""

    def section(asked):
        by_list = isinstance(asked, list)
        return {"num_devices": None if by_list else asked, "devices": asked if by_list else None}

    engine = section(inference) | {"tensor_parallel_size": tp, "gpu_memory_utilization": share}
    roles = {"train_model": section(train), "ref_model": section(ref), "inference_model": engine}
    return OmegaConf.create(roles | {"policy": {"kl_coef": kl_coef}})


def indices(group):
    return [device.index for device in group]


@pytest.mark.parametrize(
    ("cfg", "mode", "visible", "train", "ref", "inference", "replicas"),
    [
        (config(kl_coef=0.1), "sync", 1, [0], [0], [0], 1),
        (config(24, 8, 32, kl_coef=0.1, tp=8), "async", 64, range(24), range(24, 32), range(32, 64), 4),
        (config(train=2, inference=1, kl_coef=0.1), "sync", 3, [0, 1], [0, 1], [2], 1),  # a reference left null
        (config(train=2), "async", 8, [0, 1], [], range(2, 8), 6),  # inference left null takes all that are left
    ],
)
def test_gpus_are_divided_in_the_order_of_roles(cfg, mode, visible, train, ref, inference, replicas):
    plan = allocate(cfg, mode, visible=visible)
    assert (indices(plan.train), indices(plan.ref), indices(plan.inference)) == ([*train], [*ref], [*inference])
    assert plan.replicas == replicas and plan.colocated == ([*train] == [*inference])


def test_one_gpu_trains_and_samples_at_the_same_time_in_async_mode_and_the_plan_says_how_its_memory_is_divided():
    plan = allocate(config(kl_coef=0.1, share=0.6), mode="async", visible=1)
    assert plan.train == plan.ref == plan.inference == (torch.device("cuda", 0),)
    assert (plan.engine_share, plan.training_share, plan.replicas, plan.tensor_parallel_size) == (0.6, 0.35, 1, 1)
    assert str(plan) == (
        "train cuda:0, ref cuda:0, inference cuda:0 (1 x tensor_parallel_size 1); cuda:0 trains and samples at the "
        "same time: of its memory 60% are the engine's and 35% the trainer's"
    )


def test_gpus_of_a_cluster_are_counted_not_named_and_not_shared():
    with pytest.raises(ValueError, match="none is left to sample"):
        allocate(config(), mode="async", visible=1, counts_only=True)
    with pytest.raises(ValueError, match=r"^inference_model.devices=\[1, 2\], .*; set inference_model.num_devices=2"):
        allocate(config(inference=[1, 2]), mode="async", visible=16, counts_only=True)
    assert allocate(config(share=0.9), mode="async", visible=2).engine_share == 0


@pytest.mark.parametrize(
    ("cfg", "mode", "visible", "message"),
    [
        (config(2, 1, 6, kl_coef=0.1), "sync", 8, "train 2 \\+ ref 1 \\+ inference 6 = 9 GPUs, 8 visible"),
        (config(train=8), "async", 8, "train 8 = 8 GPUs, 8 visible: none is left to sample"),
        (config(share=0.9), "async", 1, "utilization=0.9 on cuda:0, .*; use at most 0.8"),
        (config([0, 1], inference=[0, 1]), "async", 4, r"GPU 0 is in both train_model.devices=\[0, 1\] and inference"),
        (config([0, 9]), "sync", 8, r"train_model.devices=\[0, 9\]: there is no GPU 9, 8 visible"),
        (config(ref=1), "sync", 8, "ref_model.num_devices=1, but with policy.kl_coef=0.0 no reference is loaded"),
        (config(inference=4, tp=3), "sync", 8, r"3 does not divide 4 \(inference devices\); use one of \[1, 2, 4\]"),
        (config(2), "sync", 0, "train_model.num_devices=2, but no GPU is visible"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_remedy(cfg, mode, visible, message):
    with pytest.raises(ValueError, match=message):
        allocate(cfg, mode=mode, visible=visible)


def test_a_list_and_a_number_that_contradict_each_other_are_refused():
    cfg = config([0, 1])
    for number in (None, 2):
        cfg.train_model.num_devices = number
        assert indices(allocate(cfg, visible=4).train) == [0, 1]
    cfg.train_model.num_devices = 3
    with pytest.raises(ValueError, match=r"train_model.devices=\[0, 1\] with train_model.num_devices=3"):
        allocate(cfg, visible=4)


def test_tensor_parallelism_has_to_divide_the_attention_heads():
    cfg = config(inference=6, tp=2)
    with pytest.raises(ValueError, match=r"2 does not divide 6 .* 9 \(attention heads\); use one of \[1, 3\]"):
        allocate(cfg, visible=8, num_attention_heads=9)
    cfg.inference_model.tensor_parallel_size = 3
    assert allocate(cfg, visible=8, num_attention_heads=9).replicas == 2


def test_without_a_gpu_all_roles_share_the_cpu():
    for mode in ("sync", "async"):
        plan = allocate(config(train=1, inference=1, kl_coef=0.1), mode=mode, visible=0)
        assert plan.train == plan.ref == plan.inference == (torch.device("cpu"),)


def test_without_a_gpu_async_mode_splits_the_cores_between_processes():
    plan = allocate(config(inference=3, kl_coef=0.1), mode="async", visible=0, cores=4)
    cpu = torch.device("cpu")
    assert plan == devices.Devices((cpu,), (cpu,), (cpu,) * 3, 1) and plan.replicas == 3
    assert len(allocate(config(), mode="async", visible=0, cores=4, world=2).train) == 2


def test_more_gpus_than_torch_can_number_are_still_told_apart():
    plan = allocate(config(train=640, inference=384, tp=4), mode="async", visible=1024, counts_only=True)
    assert (len(plan.train), len(plan.inference), plan.replicas, plan.colocated) == (640, 384, 96, False)
    assert str(plan.inference[-1]) == "cuda:1023" and plan.inference[-1].type == "cuda"
