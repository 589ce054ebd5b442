"""Episodes: tasks as environments that have ``reset`` and ``step``, in the form of Gym, with texts."""

import contextlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from grpo_rl.envs.task import Messages, Reward, Task, asking, opening

State = TypeVar("State")
Key = tuple[str, ...]
Value = TypeVar("Value")
MAX_REMEMBERED = 4096
"""Rewards that wait to be paid, and prompts of rows: the oldest are forgotten, and made again where they are needed."""


@dataclass
class _Open(Generic[State]):
    state: State
    reward: float = 0.0


class _Waiting(Generic[Value]):
    """Values by their conversation, of which several are equal; each is taken once."""

    def __init__(self) -> None:
        self._values: OrderedDict[Key, list[Value]] = OrderedDict()
        self._count, self._lock = 0, threading.Lock()

    def put(self, key: Key, value: Value, at_most: int) -> list[Value]:
        """Keeps a value; the oldest ones, which are not kept any more."""
        dropped = []
        with self._lock:
            self._values.setdefault(key, []).append(value)
            self._count += 1
            while self._count > at_most:
                oldest = next(iter(self._values))
                dropped.append(self._popped(oldest, 0))
        return dropped

    def take(self, key: Key) -> Value | None:
        with self._lock:
            return self._popped(key, -1) if key in self._values else None

    def _popped(self, key: Key, index: int) -> Value:
        value = self._values[key].pop(index)
        self._count -= 1
        if not self._values[key]:
            del self._values[key]
        return value


@dataclass
class _Kept(Generic[State]):
    """Episodes that go on, the rewards of those that have ended, and the rows' prompts."""

    going_on: _Waiting[_Open[State]] = field(default_factory=_Waiting)
    ended: _Waiting[Reward] = field(default_factory=_Waiting)
    first: OrderedDict[str, str | Messages] = field(default_factory=OrderedDict)

    def __reduce__(self) -> tuple:
        # In another process there are none, and a conversation is played again.
        return (_Kept, ())


class Episodes(Task, Generic[State]):
    """A task of an environment that is stepped: the policy's message is an action, and the observation the reply.

    A response earns the sum of its steps' rewards, as the part ``episode``.

    >>> class Guess(Episodes[int]):
    ...     def reset(self, row):
    ...         return row["number"], "Guess a number from 1 to 9."
    ...
    ...     def step(self, number, text):
    ...         right = text.strip() == str(number)
    ...         return ("Right." if right else "Wrong."), float(right), right
    >>> guess, row = Guess([]), {"number": 7}
    >>> messages = [*guess.prompt(row), {"role": "assistant", "content": "4"}]
    >>> guess.reply(row, messages)
    [{'role': 'user', 'content': 'Wrong.'}]
    >>> messages += [{"role": "user", "content": "Wrong."}, {"role": "assistant", "content": "7"}]
    >>> guess.reply(row, messages), guess.score_dialog(row, messages)
    (None, Reward(parts={'episode': 1.0}, measures={}))

    The responses to a row are compared, so that :meth:`reset` has to begin the same episode each time, and :meth:`step`
    to answer the same text the same way: what is random in them follows from a seed in the row. A conversation whose
    episode is not there any more, as in another process, is played again.
    """

    reward_parts = ("episode",)
    reply_role = "user"
    max_open = 4096
    """Episodes that wait for a turn: conversations that were dropped leave theirs, and the oldest are closed."""

    def __init__(self, rows: Sequence[dict], system_prompt: str | None = None) -> None:
        self.rows, self._before = rows, opening(system_prompt)
        self._kept: _Kept[State] = _Kept()

    @abstractmethod
    def reset(self, row: dict) -> tuple[State, str | Messages]:
        """Begins an episode: its state, whatever that is, and the prompt, a first observation or chat messages."""

    @abstractmethod
    def step(self, state: State, text: str) -> tuple[str, float, bool]:
        """Takes the policy's message; returns observation, reward of this step, and whether the episode has ended.

        Several episodes are stepped at the same time, each in a thread.
        """

    def cut_off(self, state: State) -> float:
        """The reward of an episode's end where a limit cuts it off; it is paid on top of what its steps earned."""
        return 0.0

    def measures(self, state: State) -> dict[str, float]:
        """The measures of an episode that has ended, which are logged next to its reward."""
        return {}

    def close(self, state: State) -> None:
        """Frees what an episode holds; called once, after its end."""
        return None

    def prompt(self, row: dict) -> Messages:
        """System prompt, and the first observation."""
        return asking(self._before, self._first(row))

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """The observation after the policy's last message; None where the episode ended."""
        key = self._key(row, messages)
        episode, observation = self._step(row, key)
        if observation is None:
            self._kept.ended.put(key, self._ended(episode), MAX_REMEMBERED)
            return None
        for dropped in self._kept.going_on.put((*key, observation), episode, self.max_open):
            self._close(dropped)
        return [{"role": self.reply_role, "content": observation}]

    def score(self, row: dict, response: str) -> Reward:
        """The reward of an episode of one step."""
        return self.score_dialog(row, [*self.prompt(row), {"role": "assistant", "content": response}])

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The sum of the rewards of an episode, which is closed if it has not ended."""
        key = self._key(row, messages)
        reward = self._kept.ended.take(key)
        if reward is not None:
            return reward
        if messages[-1]["role"] == "assistant":  # the last turn was not replied to
            episode, observation = self._step(row, key)
        else:
            episode, observation = self._taken(row, key), ""
        if observation is not None:
            with self._closed_on_error(episode):
                episode.reward += float(self.cut_off(episode.state))
        return self._ended(episode)

    def _key(self, row: dict, messages: Messages) -> Key:
        """The conversation after its prompt; equal ones are in equal states, as episodes of a row are."""
        return (repr(row), *(message["content"] for message in messages[len(self.prompt(row)) :]))

    def _first(self, row: dict) -> str | Messages:
        name = repr(row)
        observation = self._kept.first.get(name)
        if observation is None:
            state, observation = self.reset(row)
            self.close(state)
            self._kept.first[name] = observation
            while len(self._kept.first) > MAX_REMEMBERED:
                with contextlib.suppress(KeyError):  # another thread has forgotten it
                    self._kept.first.popitem(last=False)
        return observation

    def _step(self, row: dict, key: Key) -> tuple[_Open[State], str | None]:
        """The episode after the step with the last text, and the observation; None where the episode ended with it."""
        episode = self._taken(row, key[:-1])
        with self._closed_on_error(episode):
            observation, reward, ended = self.step(episode.state, key[-1])
            episode.reward += float(reward)
        return episode, None if ended else observation

    @contextlib.contextmanager
    def _closed_on_error(self, episode: _Open[State]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close(episode)
            raise

    def _close(self, episode: _Open[State]) -> None:
        with contextlib.suppress(OSError):  # its connection may be closed by the other side
            self.close(episode.state)

    def _taken(self, row: dict, key: Key) -> _Open[State]:
        """The episode in this state: one that waits, or a new one in which the conversation is played again."""
        if waiting := self._kept.going_on.take(key):
            return waiting
        state, observation = self.reset(row)
        episode, texts = _Open(state), key[1:]
        seen = [self._first(row), *texts[1::2]]
        with self._closed_on_error(episode):
            for text, before in zip([*texts[::2], None], seen, strict=True):
                if observation != before:
                    raise RuntimeError(
                        f"{type(self).__name__} plays another episode from the same row: {observation!r:.80} instead "
                        f"of {before!r:.80}; what is random in reset and step has to follow from a seed in the row"
                    )
                if text is not None:
                    observation, reward, _ = self.step(state, text)
                    episode.reward += float(reward)
        return episode

    def _ended(self, episode: _Open[State]) -> Reward:
        with self._closed_on_error(episode):
            reward = Reward({"episode": episode.reward}, self.measures(episode.state))
        self._close(episode)
        return reward
