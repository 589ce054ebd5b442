"""OwnEnv: an environment of the user's own, by ``env.dataset=package.module:Class`` with a subclass of EnvBase.

It is made as ``Class(num_envs, repeats, tokenizer, seed=…, …)``; its further parameters are settings. By the keys of
`grpo_rl.data.keys`:

- ``reset`` gives ``num_envs`` x ``repeats`` rows with ``("tokens", "prompt")``, those of one prompt adjacent; ``query``
  and ``gold`` are for logs, if it has them.
- ``step`` reads ``("tokens", "response")`` and writes ``reward`` and ``done``; ``reward_parts`` and ``failed``, if it
  has them. Where a conversation goes on, it writes the next ``("tokens", "prompt")``, which begins with the ids of
  prompt and response.

One that is not locked to its batch (``batch_size=[]`` and ``self._batch_locked = False``) steps the rows of any one
group, as conversations and asynchronous runs need. An asynchronous run calls ``reset`` and ``step`` from two threads,
and a group that was in flight when it stopped begins with ``query`` and prompt alone. The environment's
``get_extra_state``, as JSON, is in checkpoints.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from grpo_rl.data import keys
from grpo_rl.envs.base import Failure, LLMEnv
from grpo_rl.envs.prompts import Prompt
from grpo_rl.envs.rows import DONE, Row, stacked
from grpo_rl.envs.task import Messages, Reward, Task, Unjudgeable

GOLD = "gold"
KEPT = 10_000
"""Groups whose query and gold answer are kept for the logs."""
WHOLE = "own"
"""The only part of the reward of an environment that names no parts."""


class Asked(dict):
    """The query and gold answer of each prompt that the environment gave, by the number of its group."""

    def __missing__(self, _: int) -> dict[str, Any]:
        return {keys.QUERY: "", GOLD: None}  # asked before a resume, or long ago

    def __len__(self) -> int:
        return max(1, super().__len__())  # a task without rows is refused


class OwnTask(Task):
    """Stands in for a task where an environment scores by itself: queries and gold answers for logs."""

    def __init__(self, reward_parts: Sequence[str]) -> None:
        self.rows: Any = Asked()
        self.reward_parts = tuple(reward_parts)

    @override
    def prompt(self, row: dict) -> Messages:
        return [{"role": "user", "content": row[keys.QUERY]}]

    @override
    def score(self, row: dict, response: str) -> Reward:
        raise Unjudgeable("the environment scores by itself")

    @override
    def gold(self, row: dict) -> str | None:
        return row[GOLD]


class OwnPrompts:
    """The prompts that an environment gives, a group at a time."""

    curriculum, too_long = None, ()

    def __init__(self, env: EnvBase, rows: int, repeats: int, asked: Asked) -> None:
        self._env, self._rows, self._repeats, self._asked = env, rows, repeats, asked
        self._ready: deque[Prompt] = deque()
        self._next = 0
        self.begun: WeakKeyDictionary[Prompt, list[TensorDictBase]] = WeakKeyDictionary()
        """The rows of each prompt, while it is in use: a group whose engine is lost begins again."""

    def take(self, count: int) -> list[Prompt]:
        """The next prompts."""
        while len(self._ready) < count:
            rows = list(self._env.reset(TensorDict(batch_size=[self._rows])).unbind(0))
            for at in range(0, len(rows), self._repeats):
                first = rows[at]
                query = str(first[keys.QUERY]) if keys.QUERY in first.keys() else ""
                self._asked[self._next] = {keys.QUERY: query, GOLD: first[GOLD] if GOLD in first.keys() else None}
                self._asked.pop(self._next - KEPT, None)
                self._ready.append(Prompt(self._next, self._next, query, first[keys.TOKENS_PROMPT]))
                self.begun[self._ready[-1]] = rows[at : at + self._repeats]
                self._next += 1
        return [self._ready.popleft() for _ in range(count)]

    def check(self) -> None:
        """Checks nothing: the environment has yet to make its prompts."""

    def note(self, row: int, results: Sequence[object]) -> None:
        """Does nothing: there is no curriculum."""

    def start_epoch(self, seed: int, _: int) -> None:
        """Seeds the environment."""
        self._env.set_seed(seed)

    def state(self) -> dict[str, Any]:
        """The number of the next group, and the environment's own state, if it has any."""
        has_state = type(self._env).get_extra_state is not torch.nn.Module.get_extra_state
        return {"next_group_id": self._next, "env": self._env.get_extra_state() if has_state else None}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state`."""
        self._next = state["next_group_id"]
        if state["env"] is not None:
            self._env.set_extra_state(state["env"])


class OwnEnv(LLMEnv):
    """The environment as a run knows it: groups have numbers, and rows can be begun and stepped a group at a time.

    Args:
        num_envs, repeats, tokenizer: those that ``env`` was made with.
        max_failed_fraction: share of all responses, beyond which rows with ``failed`` stop the run.
    """

    env: EnvBase

    def __init__(
        self,
        env: EnvBase,
        num_envs: int,
        repeats: int,
        tokenizer: PreTrainedTokenizerBase,
        max_failed_fraction: float = 0.1,
    ) -> None:
        parts = env.output_spec["full_reward_spec"].get(keys.REWARD_PARTS[0], None)
        task = OwnTask([WHOLE] if parts is None else list(parts.keys()))
        super().__init__(task, tokenizer, num_envs, repeats, max_failed_fraction=max_failed_fraction)
        self._names_parts = parts is not None
        self.__dict__["env"] = env  # no submodule: a model that it scores with is not in checkpoints
        self._prompts: Any = OwnPrompts(env, num_envs * repeats, repeats, self.task.rows)

    @override
    def reset_rows(self, *, prompts: Any = None, repeats: int | None = None, rows: Any = None) -> list[Row]:
        begun: list[Row] = []
        for prompt in self.next_prompts(prompts) if prompts is None or isinstance(prompts, int) else prompts:
            plain = TensorDict({keys.QUERY: NonTensorData(prompt.query), keys.TOKENS_PROMPT: prompt.ids})  # pyrefly: ignore[bad-assignment]
            # A checkpoint keeps the prompt alone of a group in flight.
            group = self._prompts.begun.get(prompt) or [plain] * (repeats or self.repeats)
            ids = {keys.GROUP_ID: torch.tensor([prompt.group_id]), keys.ROW: torch.tensor([prompt.row])}
            flags = {name: torch.tensor([False]) for name in (keys.FAILED, *DONE)}
            begun += [row.copy().update(ids | flags) for row in group]
        return begun

    @override
    def step_rows(self, rows: Sequence[Row]) -> list[Row]:
        batch = stacked(rows)
        if (self.env.batch_locked or self.env.batch_size) and batch.batch_size != self.env.batch_size:
            raise ValueError(
                f"{type(self.env).__name__} is locked to its batch of {math.prod(self.env.batch_size)} rows, and "
                f"{len(rows)} are to be stepped; give it batch_size=[], and set self._batch_locked = False"
            )
        after = list(self.env.step(batch)["next"].unbind(0))
        for led_to in () if self._names_parts else after:
            led_to[(*keys.REWARD_PARTS, WHOLE)] = led_to["reward"]
        ended = [led_to for led_to in after if bool(led_to["done"].all())]
        failure = Failure("unjudgeable", f"{type(self.env).__name__} has set {keys.FAILED}")
        self.guard.record([failure if bool(row.get(keys.FAILED, False)) else Reward({}) for row in ended])
        return after
