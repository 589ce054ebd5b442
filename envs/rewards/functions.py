"""Reward functions of one's own: named ``package.module:function``, called with a batch, sync or async."""

import asyncio
import inspect
import math
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from grpo_rl.by_name import object_by_name, one_line, raised_at
from grpo_rl.envs.task import Unjudgeable


class RewardFunctionError(RuntimeError):
    """A reward function failed; the message names it."""


class RewardFunction:
    """A function from a batch to one number for each response, checked before it is first called.

    Its arguments are keyword lists, of which it gets those that its signature names, or all where it takes
    ``**kwargs``. This is the convention of TRL's GRPO trainer:
    https://huggingface.co/docs/trl/main/en/grpo_trainer#using-a-custom-reward-function

    Args:
        function: ``package.module:function``, or the function itself.
        columns: names of the lists that there will be.

    Raises:
        ValueError: there is no such module or function, it can't be called, or it asks for a column that is not there.

    >>> reward = RewardFunction("grpo_rl.envs.rewards.examples:reward_len", ["prompt", "completion"])
    >>> reward.name, reward({"prompt": ["Hi"], "completion": ["Hello."]}, 1)
    ('reward_len', [-14.0])
    """

    def __init__(self, function: str | Callable[..., Any], columns: Collection[str]) -> None:
        self.function = object_by_name(function, "env.reward") if isinstance(function, str) else function
        self.is_named = isinstance(function, str)
        own = getattr(self.function, "__name__", type(self.function).__name__)
        # Partial objects and what a factory makes are called alike.
        # `grpo_rl.train` keeps the functions of a script in `own`.
        self.name: str = function.rpartition(":")[2].removeprefix("own.") if isinstance(function, str) else own
        self.where = function.removeprefix("grpo_rl.api:own.") if isinstance(function, str) else own
        if not callable(self.function) or inspect.isclass(self.function):
            raise ValueError(f"env.reward={self.where} is {self.function!r}; it must be a function, or an instance")
        self.takes = self._taken(columns)

    def __call__(self, batch: Mapping[str, list[Any]], count: int) -> list[float | Exception | None]:
        """The number of each of the ``count`` responses, or why there is none.

        None, where the function returned it: the response is not one that it judges.

        Raises:
            RewardFunctionError: the function raised, or returned something else than ``count`` values.
        """
        try:
            # Lists of its own: a function may well sort them.
            result = self.function(**{name: list(batch[name]) for name in self.takes})
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(_awaited(result), _loop(os.getpid())).result()
        except Unjudgeable:
            raise
        except Exception as error:
            at = "" if raised_at(error) else self._at
            raise RewardFunctionError(f"{self.where} raised {one_line(error)}{at}") from error
        values = result.tolist() if hasattr(result, "tolist") else result  # arrays and tensors
        if not isinstance(values, (list, tuple)):
            raise RewardFunctionError(f"{self.where} returned {values!r:.200}; it must return a list{self._at}")
        if len(values) != count:
            returned = f"returned a list of {len(values)} for {count} responses"
            raise RewardFunctionError(f"{self.where} {returned}; it must return a number for each{self._at}")
        return [self._number(value) for value in values]

    def _number(self, value: Any) -> float | Exception | None:
        if value is None:
            return None
        value = value.item() if hasattr(value, "item") else value
        try:
            if isinstance(value, (int, float)) and math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
        wanted = f"it must be a finite number, or None{self._at}"
        return RewardFunctionError(f"{self.where} returned {value!r:.200} for a response; {wanted}")

    @property
    def _at(self) -> str:
        function = inspect.unwrap(getattr(self.function, "func", self.function))  # of a partial object
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""

    def _taken(self, columns: Collection[str]) -> list[str]:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except ValueError:
            return list(columns)  # written in C, without a signature
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [
            p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if missing := [name for name in required if name not in columns or name not in names]:
            there = f"what it can get by name is {', '.join(sorted(columns))}, the columns of all rows"
            raise ValueError(f"env.reward={self.where} asks for {', '.join(missing)}, and {there}; rename one of both")
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return [name for name in columns if takes_all or name in names]


class NamedFunctions:
    """Reward functions that are called with one batch, as they go to a process of their own: by name."""

    def __init__(self, names: Sequence[str], columns: Sequence[str]) -> None:
        self._arguments = tuple(names), tuple(columns)
        self._functions = [RewardFunction(name, columns) for name in names]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __call__(self, batch: Mapping[str, list[Any]], count: int) -> list[list[float | Exception | None]]:
        """Calls each function and returns the results."""
        return [function(batch, count) for function in self._functions]


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_loops_lock = threading.Lock()


def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of all async rewards of a process, in a thread of its own.

    One loop for all calls, as clients that a function keeps (of an HTTP service, say) belong to the loop they were
    first used in. One for each process, as a fork does not take the thread along.
    """
    with _loops_lock:
        loop = _loops.get(process)
        if loop is None:
            loop = _loops[process] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=f"async rewards of {process}", daemon=True).start()
        return loop


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
