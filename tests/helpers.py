"""Helpers of tests of several folders: forked groups, responses, fp64 models, ranks in threads, what a kill leaves."""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from grpo_rl.data.group import Group
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, StepParts
from grpo_rl.testing import random_group


def forked_groups(vocab: int = 32) -> list[Group]:
    """Three groups under one system message, with forks: 151 tokens, 71 of which differ enough to be computed.

    Two prompts begin with the same question; one of them goes on with another group's response and a tool's reply.
    Responses have a long beginning in common, end where others go on, or are equal.

    >>> [group.num_tokens for group in forked_groups()]
    [72, 34, 45]
    """
    generator = torch.Generator().manual_seed(0)

    def piece(first: int, length: int) -> list[int]:
        """Random tokens, but for the first, in which all pieces differ."""
        return [first, *torch.randint(vocab, (length - 1,), generator=generator).tolist()]

    system, question, start, end, equal = (piece(i, n) for i, n in enumerate((12, 5, 14, 3, 9)))
    prompts = [system + question, system + piece(5, 3), system + question + start + end + piece(6, 4)]
    responses = [
        [start + end, start + piece(7, 6), start, piece(8, 4)],
        [equal, equal, piece(9, 1)],
        [piece(10, 5), piece(11, 2)],
    ]
    groups = []
    for i, (prompt, texts) in enumerate(zip(prompts, responses, strict=True)):
        group = random_group(len(prompt), [len(text) for text in texts], vocab, group_id=i)
        ids = torch.tensor(list(itertools.chain(*texts)))
        groups.append(replace(group, prompt_ids=torch.tensor(prompt), response_ids=ids))
    return groups


def responses_by_step(run_dir: str | Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of ``completions.parquet`` of each step that has some, in order."""
    parts = StepParts(Path(run_dir) / COMPLETIONS_FOLDER)
    return {step: parts.read(step).to_pylist() for step in parts.steps()}


def left_if_killed(pid: int) -> set[str]:
    """Names of the files in /dev/shm that the process has mapped, which would stay there if it were killed. (Linux)

    Files without a name disappear with the last process that holds them.

    >>> import os; from multiprocessing import get_context
    >>> before = left_if_killed(os.getpid())
    >>> lock, nameless = get_context("spawn").Lock(), get_context("fork").Lock()
    >>> [name.split(".")[0] for name in left_if_killed(os.getpid()) - before]
    ['sem']
    """
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    mapped = {line[4] for line in lines if len(line) == 6 and line[5].startswith("/dev/shm/")}
    return {entry.name for entry in os.scandir("/dev/shm") if str(entry.inode()) in mapped}


class KeepFp64(TorchFunctionMode):
    """Turns casts to fp32 into casts to fp64: transformers' norms, RoPE and eager softmax cast inside, in any model.

    >>> with KeepFp64():
    ...     torch.zeros(1, dtype=torch.float64).to(torch.float32).dtype, torch.zeros(1).float().dtype
    (torch.float64, torch.float64)
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def keep(x: object) -> object:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(keep, args), **{name: keep(x) for name, x in (kwargs or {}).items()})


def to_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64 throughout, for comparisons at 1e-9: its norms and RoPE no longer round to fp32.

    Other modules are unchanged, so that a cast in the code under test still shows.
    """

    def unrounded(forward):
        def call(*args, **kwargs):
            with KeepFp64():
                return forward(*args, **kwargs)

        return call

    for module in model.double().modules():
        if type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            module.forward = unrounded(module.forward)
    return model


class ThreadRank:
    """One of two ranks, each in a thread, as far as they agree."""

    size, in_step = 2, False

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._board, self._barrier = rank, board, barrier

    def gather(self, mine: Any) -> list[Any]:
        self._board[self.rank] = mine
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def broadcast(self, mine: Any) -> Any:
        return self.gather(mine)[0]

    def close(self) -> None: ...


def of_two_ranks(work: Callable[[ThreadRank], Any]) -> list[Any]:
    """The results of both ranks' work."""
    board, barrier = [None, None], threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: work(ThreadRank(rank, board, barrier)), range(2)))
