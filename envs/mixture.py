"""MixtureEnv: several tasks in one environment, their prompts drawn by weight; a group stays within one task."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from typing_extensions import override

from grpo_rl.envs.base import Failure, LLMEnv, Messages, Prompt, Reward, ScoreError, ScoreGuard, Task
from grpo_rl.envs.guards.guard import LARGEST, Kind
from grpo_rl.envs.rewards.combined import share_budgets
from grpo_rl.envs.task import plays_turns

TASK, ROW = "task", "row"
"""The keys of a mixture's row: the name of the task that it is of, and that task's own row."""


class Rows(Sequence[dict]):
    """The rows of all tasks one after the other, each as ``{"task": name, "row": the task's own row}``."""

    def __init__(self, rows: Mapping[str, Sequence[dict]]) -> None:
        self._rows, self._names = rows, list(rows)
        self.ends = list(accumulate(len(of_task) for of_task in rows.values()))
        """The number of rows up to the end of each task's."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        name, row = self.place(index)
        return {TASK: name, ROW: self._rows[name][row]}

    def place(self, index: int) -> tuple[str, int]:
        """The task of a row, and the row's index among that task's own."""
        which = bisect.bisect_right(self.ends, index)
        return self._names[which], index - self.start(self._names[which])

    def start(self, name: str) -> int:
        """The index of a task's first row."""
        which = self._names.index(name)
        return self.ends[which] - len(self._rows[name])


def _scaled(reward: Reward, to_scale: Callable[[float], float]) -> Reward:
    """The reward at another scale, and those of its turns with it."""
    turns = {name: to_scale(value) for name, value in reward.measures.items() if name.startswith("turn_reward_")}
    return Reward({part: to_scale(value) for part, value in reward.parts.items()}, {**reward.measures, **turns})


class Mixture(Task):
    """Several tasks as one, whose rewards are scaled by ``scales``, 1 where none is given.

    A part of the reward has its task's name before its own: ``gsm8k/correctness``.
    """

    def __init__(self, tasks: Mapping[str, Task], scales: Mapping[str, float] = {}) -> None:
        self.tasks, self._scales = dict(tasks), dict(scales)
        self.rows = self.places = Rows({name: task.rows for name, task in tasks.items()})
        self.reward_parts = tuple(f"{name}/{part}" for name, task in tasks.items() for part in task.reward_parts)
        roles = {task.reply_role for task in tasks.values() if plays_turns(task)}
        self.reply_role = min(roles, default=Task.reply_role)

    def named(self, name: str, reward: Reward) -> Reward:
        """The reward that a task gave, at the task's scale, under the names that its parts have in the mixture."""
        scale = self._scales.get(name, 1.0)
        scaled = _scaled(reward, lambda value: value * scale)
        parts = {f"{name}/{part}": value for part, value in scaled.parts.items()}
        return Reward(parts, {f"{name}/{measure}": value for measure, value in scaled.measures.items()})

    def own(self, name: str, reward: Reward) -> Reward:
        """The inverse of :meth:`named`, up to rounding."""
        parts = {part.removeprefix(f"{name}/"): value for part, value in reward.parts.items()}
        measures = {measure.removeprefix(f"{name}/"): value for measure, value in reward.measures.items()}
        scale = self._scales.get(name, 1.0)
        return _scaled(Reward(parts, measures), lambda value: value / scale)

    def without_rows(self) -> Mixture:
        """A copy of the mixture and its tasks, without data."""
        return Mixture({name: task.without_rows() for name, task in self.tasks.items()}, self._scales)

    def ready(self, deadline_s: float) -> None:
        """Starts what the tasks' scorers need."""
        for task in self.tasks.values():
            task.ready(deadline_s)

    def place(self, device: Any) -> None:
        """Loads the tasks' models that score."""
        for task in self.tasks.values():
            task.place(device)

    def prompt(self, row: dict) -> Messages:
        """The prompt of the row's task."""
        return self.tasks[row[TASK]].prompt(row[ROW])

    @override
    def score(self, row: dict, response: str) -> Reward:
        return self.named(row[TASK], self.tasks[row[TASK]].score(row[ROW], response))

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The reward of the row's task for a conversation."""
        return self.named(row[TASK], self.tasks[row[TASK]].score_dialog(row[ROW], messages))

    def tools_of(self, row: dict) -> Sequence[Any]:
        """The tools of the row's task."""
        return self.tasks[row[TASK]].tools_of(row[ROW])

    def gold(self, row: dict) -> str | None:
        """The gold answer of the row's task."""
        return self.tasks[row[TASK]].gold(row[ROW])

    def is_right(self, reward: Reward) -> bool | None:
        """The verdict of the task whose parts the reward has."""
        name = next((name for name in self.tasks if any(part.startswith(f"{name}/") for part in reward.parts)), None)
        if name is None:
            return None
        return self.tasks[name].is_right(self.own(name, reward))

    @property
    def tells_right(self) -> bool:
        """True where a task tells which responses are right."""
        return any(task.tells_right for task in self.tasks.values())


class MixtureInTurns(Mixture):
    """A mixture in which at least one task replies; a conversation about another task's row is over after one turn."""

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The reply of the row's task."""
        return self.tasks[row[TASK]].reply(row[ROW], messages)


class MixturePrompts:
    """The prompts of a mixture: each draws its task at random by the tasks' shares, and is that task's next.

    Draw k depends on the seed and k alone, so that the number of draws and the tasks' own positions are the whole
    position in the data.
    """

    def __init__(self, envs: Mapping[str, LLMEnv], rows: Rows, weights: Mapping[str, float], seed: int) -> None:
        self._envs, self._rows, self._seed, self._drawn = envs, rows, seed, 0
        total = math.fsum(weights.values())
        self._names, self._shares = list(weights), [weight / total for weight in weights.values()]

    def take(self, count: int) -> list[Prompt]:
        """The next prompts, under group ids that are unique in the run."""
        prompts = []
        for _ in range(count):
            name = self.name_of_draw(self._drawn)
            (prompt,) = self._envs[name].next_prompts(1)
            prompts.append(replace(prompt, group_id=self._drawn, row=self._rows.start(name) + prompt.row))
            self._drawn += 1
        return prompts

    def name_of_draw(self, draw: int) -> str:
        """The task of a draw."""
        return random.Random(f"{self._seed}/mixture/{draw}").choices(self._names, self._shares)[0]

    def check(self) -> None:
        """Tokenises every row of every task; a ValueError about a prompt that is too long names the task."""
        for name, env in self._envs.items():
            try:
                env.check_prompts()
            except ValueError as error:
                raise ValueError(f"env.mixture.{name}: {error}") from error

    @property
    def too_long(self) -> Sequence[None]:
        """One entry for each row that was found too long and left out."""
        return [None] * sum(env.skipped for env in self._envs.values())

    def start_epoch(self, seed: int, epoch: int) -> None:
        """Draws by another seed from now on; draws are counted on, as group ids are unique in the run."""
        self._seed = seed
        for env in self._envs.values():
            env.start_epoch(seed, epoch)

    def state(self) -> dict[str, Any]:
        """The number of draws and the position in each task's data, failures included."""
        tasks = {name: env.get_extra_state() for name, env in self._envs.items()}
        return {"seed": self._seed, "drawn": self._drawn, "tasks": tasks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position; a ValueError where it is one of other tasks or other data."""
        if state["tasks"].keys() != self._envs.keys():
            raise ValueError(f"the data position is of the mixture {[*state['tasks']]}; resume with the same tasks")
        for name, env in self._envs.items():
            env.set_extra_state(state["tasks"][name])
        self._seed, self._drawn = state["seed"], state["drawn"]


class MixtureGuard(ScoreGuard):
    """Has each task's responses scored by that task's own guard, whose limits and counts are its own."""

    def __init__(self, mixture: Mixture, guards: Mapping[str, ScoreGuard], deadline_s: float) -> None:
        super().__init__(mixture, deadline_s)
        self._mixture, self.guards = mixture, guards

    @override
    def score(self, row: dict, responses: Sequence[str], where: str) -> list[Reward | Failure]:
        name = row[TASK]
        return self._named(name, self.guards[name].score(row[ROW], responses, f"{name}, {where}"))

    @override
    def score_dialogs(self, row: dict, dialogs: Sequence[Messages], where: str) -> list[Reward | Failure]:
        name = row[TASK]
        return self._named(name, self.guards[name].score_dialogs(row[ROW], dialogs, f"{name}, {where}"))

    def _named(self, name: str, results: Sequence[Reward | Failure]) -> list[Reward | Failure]:
        rewards = [self._mixture.named(name, got) if isinstance(got, Reward) else got for got in results]
        for reward in rewards:
            if isinstance(reward, Reward) and not max(map(abs, [*reward.parts.values(), reward.total])) <= LARGEST:
                raise ScoreError(f"{name}: a reward of {reward.total:g} at its scale is too large; lower the scale")
        return rewards

    @override
    def record(self, results: Sequence[Reward | Failure], row: dict | None = None) -> None:
        if row is not None:
            self.guards[row[TASK]].record(results)

    def failures(self) -> tuple[dict[Kind, int], dict[Kind, str]]:
        """The failures of all tasks together, and the first of each kind."""
        counts: dict[Kind, int] = {}
        examples: dict[Kind, str] = {}
        for guard in self.guards.values():
            failed, first = guard.failures()
            counts |= {kind: counts.get(kind, 0) + count for kind, count in failed.items()}
            examples = first | examples
        return counts, examples

    @property
    def counts(self) -> dict[str, int]:
        """Empty: the counts are in the tasks' states, and restored with these."""
        return {}


class MixtureEnv(LLMEnv):
    """Several environments as one: prompts are drawn by weight, and each is scored and replied to by its own task.

    A task's tools are shown in its own prompts alone, and calls to them are read by its own environment's parser.

    Args:
        envs: the tasks' environments by name, over one tokenizer; their rewards, guards and limits hold for their rows.
        weights: of the draws; they need not sum to 1.
        scales: factors of the tasks' rewards, 1 where none is given.

    Raises:
        ValueError: a scale is of no task; see also :class:`LLMEnv`.
    """

    def __init__(
        self,
        envs: Mapping[str, LLMEnv],
        weights: Mapping[str, float],
        num_envs: int,
        repeats: int,
        *,
        scales: Mapping[str, float] = {},
        seed: int = 0,
    ) -> None:
        if wrong := sorted(scales.keys() - envs.keys()):
            raise ValueError(f"the scale of {wrong[0]} is of no task of the mixture, which has {', '.join(envs)}")
        share_budgets(env.task for env in envs.values())
        turns = {name: env for name, env in envs.items() if plays_turns(env.task)}
        made = (MixtureInTurns if turns else Mixture)({name: env.task for name, env in envs.items()}, scales)
        first = next(iter(envs.values()))
        super().__init__(
            made,
            first.tokenizer,
            num_envs,
            repeats,
            max_prompt_tokens=first.max_prompt_tokens,
            max_turns=max((env.max_turns for env in turns.values()), default=1),
            seed=seed,
        )
        self.members, self._mixture = dict(envs), made
        self._prompts = cast(Any, MixturePrompts(self.members, made.places, weights, seed))  # as a source of one task's
        deadline_s = max(env.guard.deadline_s for env in envs.values())
        self.guard = MixtureGuard(made, {name: env.guard for name, env in envs.items()}, deadline_s)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the tasks' environments."""
        for env in self.members.values():
            env.close(raise_if_closed=raise_if_closed)
        super().close(raise_if_closed=raise_if_closed)

    @override
    def by_task(self, rows: Sequence[dict]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in self.members}
        for i, row in enumerate(rows):
            found[row[TASK]].append(i)
        return found

    @override
    def encode(self, row: dict) -> list[int]:
        return self.members[row[TASK]].encode(row[ROW])

    @override
    def turns_of(self, row: dict) -> int:
        return self.max_turns if plays_turns(self.members[row[TASK]].task) else 1

    @override
    def read_turn(self, text: str, row: dict) -> tuple[str, list[dict[str, Any]]]:
        return self.members[row[TASK]].read_turn(text, row[ROW])

    def check_prompts(self) -> None:
        """Tokenises every row of every task; see :meth:`LLMEnv.check_prompts`."""
        self._prompts.check()

    def metrics(self) -> dict[str, float]:
        """Counts of each task: those of its own, and its responses without a reward."""
        metrics: dict[str, float] = {}
        for name, env in self.members.items():
            metrics |= {key.replace("/", f"/{name}/", 1): value for key, value in env.metrics().items()}
            if failed := sum(env.guard.failures()[0].values()):
                metrics[f"failed/{name}"] = failed
        return metrics

    def note(self, row: int, results: Sequence[Reward | Failure]) -> None:
        """Has the row's task take notice of its rewards."""
        name, index = self._mixture.places.place(row)
        own = [self._mixture.own(name, got) if isinstance(got, Reward) else got for got in results]
        self.members[name].note(index, own)
