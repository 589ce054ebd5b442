"""Stand-ins for the costly parts of a run: a task without texts, a model of two numbers, an optimizer that notes what
it is given, and logs without a terminal.
"""

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from grpo_rl.data import keys
from grpo_rl.data.group import Group
from grpo_rl.envs.base import Failure, Prompt, Reward
from grpo_rl.envs.prompts import PromptSource
from grpo_rl.monitor.completions import CompletionsLog, completion_rows
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.token_log import TokenLog
from grpo_rl.run.hooks import Hook
from grpo_rl.run.logs import SamplingTimes, Tokens
from grpo_rl.training.optimizer import StepResult
from simulation.world import World

STEPPED = StepResult(1.0, 1.0, skipped=False)

ROWS = 1000
"""Rows of the data: more than a seed's run has groups, so that a row stands for one group."""
SCORE_TIMEOUT_S = 60.0
"""Seconds after which a scorer that hangs is given up."""


def _tokenizer(texts: Sequence[str]) -> dict[str, list[list[int]]]:
    return {"input_ids": [[int(text)] for text in texts]}


_tokenizer.chat_template = None  # pyrefly: ignore[missing-attribute]


class Environment:
    """Gives the prompts of a real prompt source, whose rewards are drawn by the row."""

    batch_size = None
    """Steps any rows."""

    def __init__(self, world: World) -> None:
        self._world, self.num_envs, self.repeats = world, world.setup.num_envs, world.setup.group_size
        rows = [{"number": number} for number in range(ROWS)]
        prompt = lambda row: [{"role": "user", "content": str(row["number"])}]  # noqa: E731
        self.task = SimpleNamespace(rows=rows, prompt=prompt, tools_of=lambda row: ())
        self._source = PromptSource(self.task, _tokenizer, None, "error", world.seed)
        self.issued = 0
        """The number of groups whose prompts were given out so far; their ids are the numbers below it."""
        self._hangs: deque[bool] = deque()

    def next_prompts(self, count: int) -> list[Prompt]:
        prompts = self._source.take(count)
        self.issued += len(prompts)
        for prompt in prompts:
            self._world.give_out(prompt.group_id, prompt.row)
        return prompts

    def reset(self, prompts: Sequence[Prompt], repeats: int) -> TensorDictBase:
        rows = []
        for prompt in prompts:
            ids = {keys.GROUP_ID: torch.tensor([prompt.group_id]), keys.ROW: torch.tensor([prompt.row])}
            row = TensorDict({keys.TOKENS_PROMPT: prompt.ids, **ids})
            rows += [row.copy() for _ in range(repeats)]
        return lazy_stack(rows)

    def _step(self, batch: TensorDictBase) -> TensorDictBase:
        """The ends of a group's conversations: the rewards, or that the scorer gave none."""
        rows, yes, no = list(batch.unbind(0)), torch.tensor([True]), torch.tensor([False])
        row, over = int(rows[0][keys.ROW]), {"done": yes, "terminated": yes, "truncated": no}
        if self._hangs.popleft() or self._world.happens("crash of a scorer", f"row {row}"):
            self._world.unscored.add(row)
            ends = [{"reward": torch.tensor([torch.nan]), keys.FAILED: yes} for _ in rows]
        else:
            rewards = [float(g == 0 or has_zero_variance(self._world.seed, row)) for g in range(len(rows))]
            ends = [{"reward": torch.tensor([reward]), (*keys.REWARD_PARTS, "right"): reward} for reward in rewards]
        return lazy_stack([TensorDict({**end, **over}) for end in ends])

    def score_s(self) -> float:
        """Seconds that the next group's scoring takes; a scorer that hangs is given up after its deadline."""
        self._hangs.append(self._world.happens("scorer hangs"))
        return SCORE_TIMEOUT_S if self._hangs[-1] else self._world.seconds(0.1)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def gold(self, row: int) -> int:
        return row

    def note(self, row: int, results: Sequence[Reward | Failure]) -> None:
        self._source.note(row, results)

    def by_task(self, rows: Sequence[Any]) -> dict[str, list[int]]:
        """Empty: there is one task."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self._source.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.restore(state)
        self.issued = state["next_group_id"]


def has_zero_variance(seed: int, row: int) -> bool:
    """True if a row gives a zero-variance group.

    >>> 150 < sum(has_zero_variance(0, row) for row in range(1000)) < 250
    True
    """
    return random.Random(f"{seed}/{row}").random() < 0.2


class Model(torch.nn.Module):
    """41 weights in two tensors, which two buckets carry; each is the number of optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.more = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(40))


class AtOnce:
    """Stands for the thread that writes checkpoints: a seed's events have one order, which a thread would change."""

    def start(self, work: Callable[[], object]) -> None:
        work()

    def wait(self) -> None: ...
    def close(self) -> None: ...


class Optimizer:
    """Notes in which step each group was trained on, and moves the model accordingly."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.trained: list[tuple[int, int]] = []
        """Step and group, for each optimizer step and group in it."""
        self.updates = 0

    def train(self, step: int, groups: Sequence[Group]) -> None:
        """Takes an optimizer step."""
        self.trained += [(step, group.group_id) for group in groups]
        self.updates += 1
        self._move()

    def clear_gradients(self) -> None: ...

    @torch.no_grad()
    def _move(self) -> None:
        for weights in self._model.parameters():
            weights.fill_(self.updates)

    def state_dict(self) -> dict[str, Any]:
        return {"trained": torch.tensor(self.trained, dtype=torch.long).reshape(-1, 2), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.trained = [(step, group_id) for step, group_id in state["trained"].tolist()]
        self.updates = state["updates"]
        self._move()


class Schedules:
    """Changes nothing."""

    coefs = {"kl_coef": 0.0}

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Stored(Hook):
    """Writes the numbers and responses of a step."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._completions = MetricsLog(folder), CompletionsLog(folder)

    def on_log(self, run: Any, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        env = run.parts.env
        self._metrics.log(run.step, metrics)
        self._completions.log(run.step, completion_rows(groups, env.decode, env.gold))


class Logs:
    """All that a real run stores of its steps, and nothing for people; see :class:`grpo_rl.run.logs.RunLogs`."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], note: Callable[[str], None], now: Callable[[], float]
    ) -> None:
        # No text is recorded, so nothing reads a tokenizer; and nothing is scored by the loss.
        tokens = TokenLog(folder, config, 0, lambda ids: [], "a loss")
        self.hooks = [Stored(folder), SamplingTimes(folder), Tokens(tokens)]
        self.note, self.started = note, now()
        self.progress = SimpleNamespace(phase=lambda name: None, goes_on=lambda: None)


class Diagnosis:
    """Finds nothing; see :class:`grpo_rl.run.diagnosis.RunDiagnosis`."""

    mismatch = SimpleNamespace(begin=lambda: None, weights_moved=lambda: None)

    def observe(self, *_: object) -> None: ...


def config_of(world: World) -> str:
    """The run's config, as far as a checkpoint and the log of tokens read it."""
    settings = vars(world.setup) | {"seed": world.seed}
    return json.dumps({"faults": settings, "policy": {"kl_coef": 0.0}, "loss": {"mask_truncated": False}})
