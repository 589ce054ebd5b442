"""Invariants of what a run stores of its steps: metrics, completions, tokens, and who sampled when."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from grpo_rl.data.group import Group
from grpo_rl.monitor.step_parts import COMPLETIONS_FOLDER, SAMPLING_FOLDER, TOKENS_FOLDER
from simulation.stand_ins import has_zero_variance
from simulation.violation import check_equal
from simulation.world import World

Response = tuple[int, int, int, float, list[tuple[int, float]]]
"""Group, place in it, row, reward, and the version and log-probability of each token."""


class Stored:
    """Checks a run's files, over all its lives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._responses: dict[int, list[Response]] = {}
        """The responses of each collected group, in the life that collected it last."""
        self._read: dict[Path, tuple[object, bytes]] = {}
        """Files that held what they have to: that, and their bytes."""

    def collected(self, group: Group) -> None:
        """Takes note of a group that a step trains on, whose responses have to be those that its row gives."""
        what, row, size = f"of group {group.group_id}", group.row, group.size
        rewards = [1.0] * size if has_zero_variance(self._world.seed, row) else [float(g == 0) for g in range(size)]
        check_equal(row, self._world.rows[group.group_id], f"the row {what}")
        check_equal(group.rewards.tolist(), rewards, f"the rewards {what}")
        check_equal(set(group.response_ids.tolist()), {row}, f"the tokens {what}")
        tokens, ends = list(zip(group.versions.tolist(), group.log_probs.tolist(), strict=True)), group.offsets.tolist()
        responses = [tokens[start:end] for start, end in zip(ends, ends[1:], strict=False)]
        for response in responses:
            versions = [version for version, _ in response]
            check_equal(versions, sorted(versions), f"the versions of the tokens {what}")
        self._responses[group.group_id] = [
            (group.group_id, g, row, rewards[g], response) for g, response in enumerate(responses)
        ]

    def check(self, run: Path, step: int, trained: Sequence[tuple[int, int]]) -> None:
        """Checks that all files tell of exactly these steps and groups, and of nothing after the step."""
        expected = list(range(1, step + 1))
        self._check_metrics(run, expected)
        for folder in (TOKENS_FOLDER, COMPLETIONS_FOLDER):
            check_equal(steps_of((run / folder).glob("[!.]*")), expected, f"the steps of {folder}")
        later = set(steps_of((run / SAMPLING_FOLDER).glob("[!.]*"))) - set(expected)
        check_equal(later, set(), f"the steps of {SAMPLING_FOLDER} that there are not")
        for at in expected:
            self._check_step(run, at, Counter(group_id for when, group_id in trained if when == at))

    def _check_metrics(self, run: Path, expected: Sequence[int]) -> None:
        rows = metrics_of(run)
        check_equal([row["step"] for row in rows], expected, "the steps in metrics.jsonl")
        for row in rows:
            dropped = sum(count for name, count in row.items() if name.startswith("groups/dropped_"))
            counted = row["groups/trained"] + row["groups/open"] + dropped
            check_equal(row["groups/started"], counted, f"the groups started by step {row['step']}")
        for name in ("groups/resampled", "engines/replaced"):
            counts = [0.0, *(row[name] for row in rows)]
            check_equal(counts, sorted(counts), f"{name} by steps, of which none is below the one before")

    def _check_step(self, run: Path, step: int, visits: Mapping[int, int]) -> None:
        """Checks a step's files: its groups, each of which was in so many optimizer steps."""
        responses = [response for group_id in visits for response in self._responses[group_id]]
        self._holds(
            run / f"{TOKENS_FOLDER}/part-{step:08d}.parquet",
            ("group_id", "response", "row", "position", "token_id", "policy_version", "sampler_log_prob"),
            [
                (group_id, g, row, position, row, version, log_prob)
                for group_id, g, row, _, tokens in responses
                for position, (version, log_prob) in enumerate(tokens)
                for _ in range(visits[group_id])
            ],
        )
        self._holds(
            run / f"{COMPLETIONS_FOLDER}/part-{step:08d}.parquet",
            ("group_id", "row", "prompt", "completion", "answer", "reward", "tokens", "policy_version"),
            [
                (group_id, row, str(row), " ".join([str(row)] * count), str(row), reward, count, tokens[0][0])
                for group_id, _, row, reward, tokens in responses
                for count in [len(tokens)]
            ],
        )

    def _holds(self, path: Path, columns: Sequence[str], expected: Sequence[tuple]) -> None:
        """Checks the rows of a file, in any order; reads them again only where something has changed."""
        content = path.read_bytes()
        if self._read.get(path) != (expected, content):
            check_equal(columns_of(path, columns), sorted(expected), f"the rows of {path.parent.name}/{path.name}")
            self._read[path] = expected, content


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics."""
    metrics = run / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_bytes().splitlines()] if metrics.exists() else []


def sampled_in(run: Path, step: int) -> Counter[int]:
    """How often each group was sampled, as is stored with a step."""
    part = run / f"{SAMPLING_FOLDER}/part-{step:08d}.parquet"
    return Counter(group_id for (group_id,) in columns_of(part, ["group_id"])) if part.exists() else Counter()


def columns_of(path: Path, names: Sequence[str]) -> list[tuple]:
    """Columns of a Parquet file, sorted by rows."""
    with pq.ParquetFile(path) as file:  # quicker than `read_table`
        table = file.read(list(names))
    return sorted(zip(*(table[name].to_pylist() for name in names), strict=True))


def steps_of(paths: Iterable[Path]) -> list[int]:
    """The steps that files are named by, in order."""
    return sorted(map(number_of, paths))


def number_of(path: Path) -> int:
    """The first number in a file's name; -1 where there is none."""
    match = re.search(r"\d+", path.name)
    return int(match[0]) if match else -1
