"""Prompts of any data set, judged by reward functions of one's own."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

from grpo_rl.envs import tables
from grpo_rl.envs.declared import SystemPrompt, means
from grpo_rl.envs.guards.isolation import IsolatedCalls
from grpo_rl.envs.rewards.functions import NamedFunctions, RewardFunction
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.tables import load_rows
from grpo_rl.envs.task import GroupTask, Messages, NothingApplies, Reward, asking, check_weights, opening, raised
from grpo_rl.envs.tools.schemas import tool_schemas

RewardName = str | Callable[..., Any]
_LAST_MESSAGE = "the assistant's last message"
"""The name that this message has in a row apart from its prompt."""


class PromptResponse(GroupTask):
    """Prompts of a data set; a response earns what one or more reward functions return.

    "Summarise in one sentence: Mixed precision training is becoming a practical technique to improve the speed of
    training." With the two rewards of the tutorials, a response of 22 characters that ends as a sentence earns -2 + 1:

    >>> rewards = ["grpo_rl.envs.rewards.examples:reward_len", "grpo_rl.envs.rewards.examples:sentence_ending"]
    >>> task = PromptResponse([{"prompt": "Summarise in one sentence: Mixed precision [...]"}], reward=rewards)
    >>> reward = task.score(task.rows[0], "Half the bits suffice.")
    >>> reward.total, reward.parts
    (-1.0, {'reward_len': -2.0, 'sentence_ending': 1.0})

    A reward function takes keyword lists, one item for each response, and returns a list of numbers. It gets what its
    signature names of:

    - ``prompt``: as the data has it, a text or chat messages; ``completion``: the policy's response, a text;
    - ``reference``: what the data has in ``completion_column``;
    - every other column that all rows have, under its name;
    - ``prompts`` and ``completions``, for functions written for TRL: where the prompt is chat messages, a completion
      is a list of one message there.

    Where a function returns None, its part is missing in that response's reward; where all do, the response has none.

    The chat template gets all other keys of the messages, such as ``tool_calls`` and ``reasoning_content``,
    and the JSON schemas in a row's ``tools``.

    A row's prompt is a text, a list of texts (joined by spaces), or chat messages with role and content; where there is
    no such column, the messages in ``messages``. Of messages, an assistant's last one is no part of the prompt: it is
    the demonstration. ``reward`` may be functions themselves, too.

    A function that is named is called in a process of its own, which keeps what the function keeps, and is killed where
    a call takes too long or freezes; then another one is started. A function itself, as from one's own script, is
    called here, and so is a named one where ``isolated`` is False.

    Raises:
        ValueError: a row's prompt is missing or empty or something else; a reward function can't be found or called,
            or asks for a column that is not there; or a weight is not finite.
    """

    parts_may_lack = True

    def __init__(
        self,
        rows: Sequence[dict],
        *,
        reward: Annotated[
            RewardName | Sequence[RewardName] | Mapping[RewardName, float] | None,
            means(
                "package.module:function, or a list of them, or weights by name; called in a process of its own "
                "(env.isolated)"
            ),
        ] = None,
        prompt_column: Annotated[str, means("column of the prompts: texts, or lists of chat messages")] = "prompt",
        completion_column: Annotated[
            str | None, means("column of the reference answer, for logs; mode=sft imitates it")
        ] = None,
        system_prompt: SystemPrompt = None,
    ) -> None:
        self._prompt_column, self._completion_column = prompt_column, completion_column
        self._before, self.rows = opening(system_prompt), rows
        for index, row in enumerate(rows):
            try:
                self._asked(row)
                self.tools_of(row)
            except ValueError as error:
                raise ValueError(f"{tables.place_of(rows, index)}: {error}") from error
        # A column that some rows lack would be a list with holes.
        columns = set(rows[0]).intersection(*rows) if len(rows) else set()
        if completion_column and len(rows) and completion_column not in columns:
            raise ValueError(f"env.completion_column={completion_column} is no column of all rows: {sorted(columns)}")
        columns |= {"prompt", "prompts", "completion", "completions", *(["reference"] if completion_column else [])}
        self._functions = [(RewardFunction(name, sorted(columns)), weight) for name, weight in _weighted(reward)]
        self._columns, self._deadline_s = sorted(columns), 60.0
        self.reward_parts = tuple(function.name for function, _ in self._functions)
        if len(set(self.reward_parts)) < len(self.reward_parts):
            names = ", ".join(self.reward_parts)
            raise ValueError(f"env.reward has two functions of one name: {names}; rename one, as by its __name__")

    def prompt(self, row: dict) -> Messages:
        """The row's messages, or its text as the user's, after the system prompt."""
        return asking(self._before, self._asked(row))

    def tools_of(self, row: dict) -> Sequence[Any]:
        """The task's tools, and those in the row's column ``tools``; calls of these are not run."""
        return [*self.tools, *_read_tools(row.get(tables.TOOLS))]

    def score_many(self, rows: Sequence[dict], responses: Sequence[str]) -> list[Reward | Exception]:
        """The rewards of a batch: each function is called once.

        Raises:
            RewardFunctionError: a function raised, or returned something else than a number for each response.
            TimeoutError: the named ones took too long in all.
            WorkerDied: their process ended.
        """
        if not rows:
            return []
        away = self._named()
        results = dict(zip(away, self._called_in_process(away, rows, responses), strict=True)) if away else {}
        here = [function for function, _ in self._functions if function.where not in results]
        batch = self._batch(here, rows, responses)
        results |= {function.where: function(batch, len(rows)) for function in here}
        results = [results[function.where] for function, _ in self._functions]
        return [self._reward([values[at] for values in results]) for at in range(len(rows))]

    def ready(self, deadline_s: float) -> None:
        """Starts the process of the named functions, which imports their modules."""
        self._deadline_s = deadline_s
        if away := self._named():
            _workers(away, tuple(self._columns), os.getpid()).start()

    def _named(self) -> tuple[str, ...]:
        """The functions that are called in a process of their own: none if the whole task is, or nothing is to be."""
        if self.isolated is not None:
            return ()
        return tuple(function.where for function, _ in self._functions if function.is_named)

    def _called_in_process(self, names: tuple[str, ...], rows: Sequence[dict], responses: Sequence[str]) -> Any:
        batch = self._batch([function for function, _ in self._functions if function.is_named], rows, responses)
        workers = _workers(names, tuple(self._columns), os.getpid())
        [result] = workers.map([(batch, len(rows))], self._deadline_s)
        if isinstance(result, TimeoutError):
            raise TimeoutError(f"{', '.join(names)} gave no result within {self._deadline_s:g} s, and was killed")
        return raised(result)

    def _batch(
        self, functions: Sequence[RewardFunction], rows: Sequence[dict], responses: Sequence[str]
    ) -> dict[str, list[Any]]:
        wanted = {name for function in functions for name in function.takes}
        return {name: self._values(name, rows, responses) for name in wanted}

    def gold(self, row: dict) -> str | None:
        """The data's own response; of several the first, of messages the assistant's last one."""
        value = row.get(self._completion_column) if self._completion_column else None
        if isinstance(value, list) and value:
            replies = [item for item in value if isinstance(item, Mapping) and item.get("role") == "assistant"]
            value = (replies or [None])[-1] if isinstance(value[0], Mapping) else value[0]
        if isinstance(value, Mapping):
            calls = value.get("tool_calls")
            content = value.get("content") or ""
            value = content if content or not calls else json.dumps(calls, ensure_ascii=False, default=str)
        return None if value is None else str(value)

    def demonstration(self, row: dict) -> str | dict[str, Any] | None:
        """The data's own response: of ``completion_column``, else the assistant's message that ends the conversation.

        Where that has more than its content, such as calls, it is the message itself.

        >>> chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        >>> task = PromptResponse([{"messages": chat}], prompt_column="messages")
        >>> task.prompt(task.rows[0]), task.demonstration(task.rows[0])
        ([{'role': 'user', 'content': '1 + 1?'}], '2')

        Raises:
            ValueError: ``completion_column`` has something else than a text, or one message of the assistant's, which
                the messages of the prompt may precede.
        """
        if self._completion_column:
            return self._completion(row)
        return self._parted(row).get(_LAST_MESSAGE)

    def _completion(self, row: dict) -> str | dict[str, Any] | None:
        value = row.get(self._completion_column)
        if value is None or isinstance(value, str):
            return value
        messages = value if isinstance(value, list) else [value]
        if all(isinstance(message, Mapping) for message in messages):
            turns = tables.read_messages(messages, str(self._completion_column))
            for prompt in (self.prompt(row), asking([], self._asked(row))):
                if turns[: len(prompt)] == prompt:
                    turns = turns[len(prompt) :]
                    break
            if [turn["role"] for turn in turns] == ["assistant"]:
                return tables.message_text(turns[0])
            found = f"messages of {', '.join(turn['role'] for turn in turns) or 'no one'} behind the prompt"
        elif len(messages) == 1 and isinstance(messages[0], str):
            return messages[0]
        else:
            found = f"{value!r:.80}"
        raise ValueError(
            f"{self._completion_column} is {found}; it must be a text, or one message of the assistant's. For the last "
            f"one of a conversation set env.prompt_column={self._completion_column}, without env.completion_column"
        )

    def _reward(self, values: Sequence[float | Exception | None]) -> Reward | Exception:
        parts = {}
        for (function, weight), value in zip(self._functions, values, strict=True):
            if isinstance(value, Exception):
                return value
            if value is not None:
                parts[function.name] = weight * value
        if self._functions and not parts:
            return NothingApplies(f"{', '.join(function.where for function, _ in self._functions)} returned None")
        return Reward(parts)

    def _values(self, name: str, rows: Sequence[dict], responses: Sequence[str]) -> list[Any]:
        if name in ("prompt", "prompts"):
            return [self._asked(row) for row in rows]
        if name == "completion":
            return list(responses)
        if name == "completions":
            return [
                text if isinstance(self._asked(row), str) else [{"role": "assistant", "content": text}]
                for row, text in zip(rows, responses, strict=True)
            ]
        if name == "reference" and self._completion_column:
            name = self._completion_column
        return [_column(row, name) for row in rows]

    def _parted(self, row: dict) -> dict:
        """The row with its prompt in the prompt column, and an assistant's last message apart from it."""
        value = row.get(self._prompt_column, ())
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return row  # a list of texts is a text
        return tables.asked_in_chat(row, "", self._prompt_column, _LAST_MESSAGE)

    def _asked(self, row: dict) -> str | Messages:
        value = _column(self._parted(row), self._prompt_column)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and value:
            if all(isinstance(item, str) for item in value):
                return " ".join(value)
            if all(map(tables.is_message, value)):
                return value
        wanted = "a text, a list of texts, or messages with role and content, and not empty"
        raise ValueError(f"{self._prompt_column} is {value!r:.80}; it must be {wanted}")


@lru_cache(maxsize=8)
def _workers(names: tuple[str, ...], columns: tuple[str, ...], process_id: int) -> IsolatedCalls:
    """One process, in which functions may keep what they load, as a model; and so without a limit to its memory."""
    return IsolatedCalls(NamedFunctions(names, columns), workers=1, memory_gib=None)


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"there is no column {name}{tables.column_hint(name, row)}")
    return row[name]


def _weighted(reward: Any) -> list[tuple[RewardName, float]]:
    if not reward:
        return []
    given = [reward] if isinstance(reward, str) or callable(reward) else reward
    pairs = list(given.items()) if isinstance(given, Mapping) else [(name, 1.0) for name in given]
    check_weights({getattr(name, "__name__", name): weight for name, weight in pairs})
    return pairs


PromptResponseEnv = TaskSpec(PromptResponse, load_rows, takes_reward=True)
"""A data set of prompts as a TorchRL environment."""


def _read_tools(value: Any) -> list[dict]:
    """The JSON schemas of a row's tools, which stand in the column as such or as JSON text; nulls are left out.

    >>> _read_tools('[{"name": "add", "parameters": {"x": null}}]'), _read_tools(None)
    ([{'name': 'add', 'parameters': {}}], [])
    """
    if not value:
        return []
    try:
        tools = tables.without_nulls(json.loads(value) if isinstance(value, str) else value)
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError("it must be a list of JSON schemas of functions")
        tool_schemas(tools)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{tables.TOOLS} is {value!r:.80}: {error}; 'env.columns={{other: {tables.TOOLS}}}' renames it"
        ) from error
    return tools
