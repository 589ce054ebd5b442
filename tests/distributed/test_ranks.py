"""Several processes train as one does: losses, gradients and weights, sharded or replicated; and checkpoints move.

`python tests/distributed/test_ranks.py FOLDER 4` is that training by 4 processes that talk over gloo.
"""

import contextlib
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_rl.cli import main
from grpo_rl.data.batching import MicroBatching, micro_batches_of
from grpo_rl.data.group import Group
from grpo_rl.distributed.ranks import Ranks, gathered
from grpo_rl.evaluation.models import export_checkpoint
from grpo_rl.losses.grpo import LOSSES, GRPOLoss
from grpo_rl.policies.loading import whole
from grpo_rl.policies.lora import LoRA
from grpo_rl.policies.policy import ReferencePolicy, TrainPolicy
from grpo_rl.run.export import export
from grpo_rl.storage import checkpoint_file
from grpo_rl.testing import random_group, save_tiny_model
from grpo_rl.training import checkpoint
from grpo_rl.training.micro_batches import scored_micro_batches
from grpo_rl.training.optimizer import PolicyOptimizer

STEPS, SAVED_AT = 5, 3
RESUMED = [("fsdp", "whole model"), ("fsdp", "adapters"), ("ddp", "whole model")]
ADAPTERS = LoRA(rank=4, targets=["q_proj", "down_proj"])
VARIANTS: dict[str, dict[str, Any]] = {
    "whole model": {},
    "adapters": {"lora": ADAPTERS},
    "recomputed": {"gradient_checkpointing": True},
}
CASES = [*(("fsdp", variant) for variant in VARIANTS), ("ddp", "whole model"), ("ddp", "adapters")]
OF_SIZE = {2: CASES[:1], 4: CASES}
"""The cases that so many processes train from the beginning."""


class Numbers(NamedTuple):
    """The part of ranks that planning asks for."""

    rank: int
    size: int
    in_step: bool


def step_groups(step: int) -> list[Group]:
    """Groups of an optimizer step, several responses to each prompt; the third step has one group, the fourth three."""
    lengths = [[3, 5], [4, 0, 6], [2, 2, 2, 2], [9], [1, 7], [5, 5], [6, 1, 3]][: {2: 1, 3: 3}.get(step, 7)]
    groups = []
    for i, responses in enumerate(lengths):
        seed = 10 * step + i
        group = random_group(prompt=6, lengths=responses, vocab=250, group_id=seed, seed=seed)
        noise = torch.randn(2, len(group.response_ids), generator=torch.Generator().manual_seed(seed))
        advantages = torch.randn(group.size, generator=torch.Generator().manual_seed(seed + 1))
        # Near what a model of 257 tokens says that knows nothing, so that some ratios are clipped and others are not.
        group = replace(group, log_probs=-5.5 + 0.3 * noise[0], trainable=noise[1] > -1)
        groups.append(group.with_advantages(advantages))
    return groups


def make(folder: Path, ranks: Ranks | None, **settings: Any) -> tuple[TrainPolicy, ReferencePolicy, PolicyOptimizer]:
    dtype = settings.pop("dtype", torch.float32)
    policy = TrainPolicy.load(folder / "model", dtype, temperature=0.9, peers=ranks, **settings)
    if "lora" in settings:
        reference = ReferencePolicy(policy.model, 0.9)
        reference.peers = ranks
    else:
        reference = ReferencePolicy.load(folder / "model", dtype, temperature=0.9, peers=ranks)
    optimizer = PolicyOptimizer(policy.model, lr=1e-4, warmup_steps=2, clip_grad_norm=0.5, ranks=ranks)
    return policy, reference, optimizer


def gradients(optimizer: PolicyOptimizer, ranks: Ranks | None) -> torch.Tensor:
    """The step's whole gradient, before the optimizer sees it."""
    masters = optimizer._masters
    local = [whole(p.grad) if p.grad is not None else torch.zeros_like(p) for p in masters]
    flat = torch.cat([gradient.flatten() for gradient in local])
    if ranks and not ranks.in_step:
        return torch.stack(ranks.gather(flat)).sum(0)
    return flat


def trained(policy: TrainPolicy) -> list[torch.nn.Parameter]:
    return [parameter for parameter in policy.model.parameters() if parameter.requires_grad]


def steps(
    parts: tuple[TrainPolicy, ReferencePolicy, PolicyOptimizer], ranks: Ranks | None, first: int = 0
) -> Iterator[dict[str, Any]]:
    """The results of each step of a training with a reference, old log-probs and several micro-batches a step."""
    policy, reference, optimizer = parts
    loss = GRPOLoss(kl_coef=0.1, entropy_coef=0.01, correction="truncate")
    for step in range(first, STEPS):
        groups = policy.add_log_probs(reference.add_log_probs(step_groups(step), 30), 30)
        sums: dict[str, float] = {}
        for tokens in scored_micro_batches(policy, groups, MicroBatching(25)):
            losses = loss(tokens)
            losses["loss"].backward()
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        total = Counter[str]()
        for of_rank in ranks.gather(sums) if ranks else [sums]:
            total.update(of_rank)
        gradient = gradients(optimizer, ranks)
        result = optimizer.step()
        yield {
            "old_log_probs": torch.cat([group.old_log_probs for group in groups]),
            "sums": dict(total),
            "gradient": gradient,
            "norm": result.grad_norm,
            "weights": torch.cat([whole(p.detach()).flatten() for p in optimizer._masters]),
        }


# The processes.


def joined(store: Path, rank: int, size: int) -> dict[str, Ranks]:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(str(store), size))
    return {mode: Ranks(mode) for mode in ("fsdp", "ddp")}


def train_and_save(folder: Path, rank: int, size: int) -> None:
    of_mode = joined(folder / f"store-{size}", rank, size)
    found: dict[Any, Any] = {}
    for mode, variant in OF_SIZE[size]:
        ranks = of_mode[mode]
        parts = make(folder, ranks, **VARIANTS[variant])
        found[mode, variant] = []
        for i, record in enumerate(steps(parts, ranks)):
            found[mode, variant].append(record)
            if i + 1 == SAVED_AT and variant != "recomputed":
                to = folder / f"{mode}-{variant}-{size}"
                state = {"step": SAVED_AT, "optimizer": parts[2].state_dict(), "config": config_of(folder)}
                checkpoint.save(to, SAVED_AT, state, ranks=ranks)
        if (mode, variant) == ("fsdp", "whole model"):
            policy, _, optimizer = parts
            state = [x for of in optimizer.state_dict()["optimizer"]["state"].values() for x in of.values() if x.dim()]
            assert all(isinstance(x, DTensor) for x in [*policy.model.parameters(), *state])
            largest = max([*policy.model.parameters(), *state], key=lambda x: x.numel())
            found["largest share"] = largest.to_local().numel() / largest.numel()
            tokenizer = AutoTokenizer.from_pretrained(folder / "model")
            export(policy.model, tokenizer, folder / f"exported-{size}", ranks=ranks)
            found["gathered"] = gathered(policy.model.named_parameters(), rank)
    fsdp = of_mode["fsdp"]
    parts = make(folder, fsdp, dtype=torch.bfloat16)
    found["bf16"] = list(steps(parts, fsdp))
    found["nan"] = [nan_on_one_rank(folder, ranks) for ranks in of_mode.values()]
    if size == 2:
        found |= all_resumed(folder, 1, of_mode)
        found["torn"] = fsdp.gather(restored_beside_a_torn_one(folder, fsdp))
        found["full disk"] = fsdp.gather(full_disk_of_one_rank(folder, parts, fsdp))
    if rank == 0:
        torch.save(found, folder / f"of-{size}")
    of_mode["fsdp"].close()


def resume_checkpoints_of_four(folder: Path, rank: int, size: int) -> None:
    of_mode = joined(folder / "store-resumed", rank, size)
    found = all_resumed(folder, 4, of_mode)
    if rank == 0:
        torch.save(torch.load(folder / "of-4", weights_only=False) | found, folder / "of-4")
    of_mode["fsdp"].close()


def config_of(folder: Path) -> str:
    """The part of a run's config that an export reads."""
    model = {"name": str(folder / "model"), "chat_template": "{{ messages }}"}
    return json.dumps({"model": model, "train_model": {"dtype": "float32"}})


def nan_on_one_rank(folder: Path, ranks: Ranks) -> list[tuple[list[tuple[bool, str | None]], bool]]:
    """A step with a NaN in the last rank's gradient or loss: whether each rank left it out, what it says, and if its
    weights stayed."""
    policy, _, optimizer = make(folder, ranks)
    before = [p.detach().clone() for p in trained(policy)]
    last, said = ranks.rank == ranks.size - 1, []
    for in_gradient in (True, False):
        for tokens in scored_micro_batches(policy, step_groups(0), MicroBatching(1000)):
            GRPOLoss()(tokens)["loss_objective"].backward()
        if last and in_gradient:
            gradient = trained(policy)[3].grad
            assert gradient is not None
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = float("nan")
        result = optimizer.step(loss_is_finite=in_gradient or not last)
        said.append((result.skipped, result.trouble))
    same = all(torch.equal(whole(a), whole(b.detach())) for a, b in zip(before, trained(policy), strict=True))
    return ranks.gather((said, same))


def resumed(folder: Path, written_by: int, case: tuple[str, str], ranks: Ranks | None) -> list[dict[str, Any]]:
    mode, variant = case
    parts = make(folder, ranks, **VARIANTS[variant])
    (path,) = checkpoint.checkpoints(folder / f"{mode}-{variant}-{written_by}")
    parts[2].load_state_dict(checkpoint.load(path, ranks)["optimizer"])
    return list(steps(parts, ranks, first=SAVED_AT))


def all_resumed(folder: Path, written_by: int, of_mode: dict[str, Ranks]) -> dict[Any, list[dict[str, Any]]]:
    return {("resumed", *case): resumed(folder, written_by, case, of_mode[case[0]]) for case in RESUMED}


def restored_beside_a_torn_one(folder: Path, ranks: Ranks) -> tuple[str, float, str]:
    """One part of the newest of two checkpoints is damaged: which one a rank gets, its first number there, and
    the error when it names the newest."""
    torn = folder / "torn"
    if ranks.rank == 0:
        for step in (2, SAVED_AT):
            shutil.copytree(folder / "fsdp-whole model-2", torn, dirs_exist_ok=True)
            if step < SAVED_AT:
                newest = torn / f"checkpoint_{SAVED_AT:06d}.pt"
                checkpoint_file.write(torn / f"checkpoint_{step:06d}.pt", checkpoint_file.read(newest) | {"step": step})
                newest.unlink()
                (torn / f"checkpoint_{SAVED_AT:06d}.shards").rename(torn / f"checkpoint_{step:06d}.shards")
        part = next((torn / f"checkpoint_{SAVED_AT:06d}.shards").glob("*_rank_1.pt"))
        part.write_bytes(part.read_bytes()[:-1])
    ranks.wait()
    path, state = checkpoint.restore(torn, ranks=ranks)
    first = whole(next(iter(state["optimizer"]["masters"].values()))).flatten()[0].item()
    try:
        checkpoint.load(torn / f"checkpoint_{SAVED_AT:06d}.pt", ranks)
    except ValueError as error:
        return path.name, first, str(error)
    raise AssertionError("a torn checkpoint was loaded")


def full_disk_of_one_rank(folder: Path, parts: tuple, ranks: Ranks) -> tuple[str, list[str]]:
    """The last rank's disk is full: the error of each rank, and what is left in the folder."""
    write = checkpoint_file.write

    def full(path: Path, state: Mapping) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    checkpoint_file.write = full if ranks.rank == ranks.size - 1 else write
    try:
        checkpoint.save(folder / "full", 1, {"optimizer": parts[2].state_dict()}, ranks=ranks)
    except OSError as error:
        ranks.wait()
        return str(error), [path.name for path in (folder / "full").iterdir()]
    finally:
        checkpoint_file.write = write
    raise AssertionError("a checkpoint without all of its parts was written")


def fork_ranks(work: Callable[[Path, int, int], None], folder: Path, size: int) -> None:
    """One import for all of them; nothing of torch has run yet."""
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            code = 1
            try:
                work(folder, rank, size)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    for _ in children:
        _, status = os.wait()
        if status:  # the others wait for it
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, 9)
            raise SystemExit("a rank failed")


# What they did, beside what one process does.


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict[str, list]]:
    """The folder of it all, and each training by one process."""
    folder = tmp_path_factory.mktemp("parallel")
    save_tiny_model(folder / "model")
    GenerationConfig(do_sample=True, top_k=7).save_pretrained(folder / "model")
    found = {}
    for variant, settings in VARIANTS.items():
        parts = make(folder, None, **settings)
        found[variant] = []
        for i, record in enumerate(steps(parts, None)):
            found[variant].append(record)
            if i + 1 == SAVED_AT:
                for mode in ("fsdp", "ddp"):
                    checkpoint.save(folder / f"{mode}-{variant}-1", SAVED_AT, {"optimizer": parts[2].state_dict()})
    found["bf16"] = list(steps(make(folder, None, dtype=torch.bfloat16), None))
    return folder, found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def together(request, alone) -> tuple[int, dict]:
    """The number of processes, and their results."""
    folder, size, environment = alone[0], request.param, {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(folder), str(size)], check=True, timeout=700, env=environment)
    return size, torch.load(folder / f"of-{size}", weights_only=False)


def assert_same(records, expected, tolerance=1e-6, case=""):
    for got, want in zip(records, expected, strict=True):
        for name in ("old_log_probs", "gradient", "weights"):
            explained = f"{case}{name}: {{}}".format
            torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance, msg=explained)
        assert got["sums"].keys() == want["sums"].keys()
        for name, value in want["sums"].items():
            # Sums of exponentials of differences of log-probabilities magnify their last digit.
            exact = tolerance if name in ("loss", *LOSSES) else 10 * tolerance
            assert got["sums"][name] == pytest.approx(value, rel=exact, abs=exact), name
        assert got["norm"] == pytest.approx(want["norm"], rel=tolerance)


@pytest.mark.slow
def test_several_processes_train_as_one_does(alone, together):
    size, found = together
    for mode, variant in OF_SIZE[size]:
        expected = alone[1][variant]
        assert all(record["gradient"].abs().max() > 1e-3 for record in expected)
        assert expected[0]["norm"] > 0.5, "nothing was clipped"
        assert_same(found[mode, variant], expected, case=f"{mode}, {variant}: ")


@pytest.mark.parametrize("case", RESUMED)
def test_two_processes_go_on_with_a_checkpoint_of_four_or_of_one(alone, together, case):
    assert_same(together[1]["resumed", *case], alone[1][case[1]][SAVED_AT:])


@pytest.mark.nightly
@pytest.mark.parametrize("together", [4], indirect=True)
@pytest.mark.parametrize("case", [("fsdp", "whole model"), ("ddp", "adapters")])
def test_one_process_goes_on_with_a_checkpoint_of_four(alone, together, case):
    assert_same(resumed(alone[0], 4, case, None), alone[1][case[1]][SAVED_AT:])


def assert_exported(folder: Path, weights: torch.Tensor) -> None:
    """A folder for transformers with these weights, which is sampled from as the model before."""
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(flat, weights, rtol=0, atol=1e-6)
    assert model.generation_config.do_sample and model.generation_config.top_k == 7


def test_sharded_weights_and_a_sharded_checkpoint_become_one_model_folder(alone, together, tmp_path, capsys):
    folder, found = alone
    last = found["whole model"][-1]["weights"]
    assert_exported(folder / f"exported-{together[0]}", last)
    flat = torch.cat([weight.flatten() for weight in together[1]["gathered"].values()])
    torch.testing.assert_close(flat, last, rtol=0, atol=1e-6)
    (path,) = checkpoint.checkpoints(folder / f"fsdp-whole model-{together[0]}")
    assert main(["export", str(path), str(tmp_path / "model")]) == 0
    assert str(tmp_path / "model") in capsys.readouterr().out
    assert_exported(tmp_path / "model", found["whole model"][SAVED_AT - 1]["weights"])
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == "{{ messages }}"
    with pytest.raises(ValueError, match="is there already and not empty"):
        export_checkpoint(path, tmp_path)
    if together[0] == 4:
        with pytest.raises(ValueError, match="is of adapters"):
            export_checkpoint(*checkpoint.checkpoints(folder / "fsdp-adapters-4"), tmp_path / "other")


def test_a_rank_holds_its_share_of_weights_and_optimizer_state(together):
    size, found = together
    # 257 rows of the embedding, the largest tensor, cut into parts of equal size but for the last.
    assert found["largest share"] == pytest.approx(-(-257 // size) / 257)


def test_bf16_weights_have_fp32_masters_when_they_are_sharded(alone, together):
    """The same rounding as in one process: gradients differ by that of bf16, masters by far less than its spacing."""
    for got, want in zip(together[1]["bf16"], alone[1]["bf16"], strict=True):
        assert got["norm"] == pytest.approx(want["norm"], rel=0.02)
        cosine = torch.nn.functional.cosine_similarity(got["gradient"].float(), want["gradient"].float(), dim=0)
        assert cosine > 0.999
    assert together[1]["bf16"][-1]["weights"].dtype == torch.float32


@pytest.mark.parametrize("together", [2], indirect=True)
def test_a_torn_checkpoint_and_a_full_disk_of_one_rank_are_the_same_to_all(alone, together):
    weights = alone[1]["whole model"][SAVED_AT - 1]["weights"]
    assert len(together[1]["torn"]) == 2
    for name, first, error in together[1]["torn"]:
        assert name == "checkpoint_000002.pt" and first == pytest.approx(weights[0].item())
        assert "_rank_1.pt is damaged" in error and error.endswith("torn/checkpoint_000002.pt")
    (first, left), second = together[1]["full disk"]
    assert second == (first, left) and "No space left on device" in first and "_rank_1.pt" in first
    assert left == []


def test_a_step_with_a_nan_on_one_rank_is_left_out_on_all_of_them(together):
    for ranks in together[1]["nan"]:
        first, _ = ranks[0]
        assert all(said == first and same for said, same in ranks)
        (skipped, trouble), (skipped_too, trouble_too) = first
        assert skipped and "the gradient is not finite, first seen in model.layers.0.self_attn.v_proj" in trouble
        # The second of a row is counted and not told again.
        assert skipped_too and trouble_too is None


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("groups", [1, 3, 7])
def test_every_group_is_of_one_rank_and_ranks_in_step_have_as_many_micro_batches(groups, count, in_step):
    batch = step_groups(0)[:groups]
    shares = [micro_batches_of(Numbers(rank, 4, in_step), batch, 25, count) for rank in range(4)]
    own = [group.group_id for micros, real in shares for micro in micros[:real] for group in micro]
    assert sorted(own) == sorted(group.group_id for group in batch)
    lengths = {len(micros) for micros, _ in shares}
    assert len(lengths) == 1 if in_step else all(len(micros) == real for micros, real in shares)
    if count:
        assert max(lengths) <= count


def test_ranks_have_loads_of_about_the_same_size():
    batch = [random_group(prompt=8, lengths=[1 + i % 5, 3], group_id=i) for i in range(40)]
    loads = []
    for rank in range(4):
        micros, real = micro_batches_of(Numbers(rank, 4, True), batch, 60)
        loads.append(sum(group.num_tokens for micro in micros[:real] for group in micro))
    assert max(loads) < 1.05 * min(loads)


if __name__ == "__main__":
    importlib.import_module("peft")  # once, not in each process
    importlib.import_module("transformers.models.llama.modeling_llama")
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    fork_ranks(train_and_save, folder, size)
    if size == 4:
        fork_ranks(resume_checkpoints_of_four, folder, 2)
