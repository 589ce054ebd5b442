"""Episodes: tasks as environments that have ``reset`` and ``step``, in the form of Gym, with texts."""

from __future__ import annotations

import contextlib
import json
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from grpo_rl.envs.task import Messages, Reward, Task, asking, opening

State = TypeVar("State")
Key = tuple[str, ...]
MOST_OPEN = 4096
"""Episodes that wait for a turn: conversations that were dropped leave theirs, and the oldest are closed."""


@dataclass
class _Open(Generic[State]):
    """An episode that goes on."""

    state: State
    reward: float = 0.0


@dataclass
class _Kept(Generic[State]):
    """Episodes by their conversation: those that go on, and the rewards of those that have ended."""

    going_on: OrderedDict[Key, list[_Open[State]]] = field(default_factory=OrderedDict)
    ended: OrderedDict[Key, Reward] = field(default_factory=OrderedDict)
    first: dict[str, str | Messages] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple:
        # In another process there are none, and a conversation is played again.
        return (_Kept, ())


class Episodes(Task, Generic[State]):
    """A task of an environment that is stepped: what the policy says is an action, and the observation its reply.

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

    The responses to a row are compared, so that :meth:`reset` has to begin the same episode each time: what is random
    in it follows from a seed in the row. A conversation whose episode is not there any more, as in another process, is
    played again.

    Args:
        rows: what :meth:`reset` takes.
        system_prompt: the first message; None leaves it out.
    """

    reward_parts = ("episode",)
    reply_role = "user"

    def __init__(self, rows: Sequence[dict], system_prompt: str | None = None) -> None:
        self.rows, self._before = rows, opening(system_prompt)
        self._kept: _Kept[State] = _Kept()

    @abstractmethod
    def reset(self, row: dict) -> tuple[State, str | Messages]:
        """Begins an episode: its state, whatever that is, and the prompt, a first observation or chat messages."""

    @abstractmethod
    def step(self, state: State, text: str) -> tuple[str, float, bool]:
        """Takes what the policy said: the observation, the reward of this step, and whether the episode has ended.

        Several episodes are stepped at the same time, each in a thread.
        """

    def cut_off(self, state: State) -> float:
        """The reward of an episode's end where a limit cuts it off; what its steps earned is paid beside."""
        return 0.0

    def measures(self, state: State) -> dict[str, float]:
        """What is logged of an episode that has ended, beside its reward."""
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
        observation = self._stepped(row, key)
        return None if observation is None else [{"role": self.reply_role, "content": observation}]

    def score(self, row: dict, response: str) -> Reward:
        """The reward of an episode of one step."""
        return self.score_dialog(row, [*self.prompt(row), {"role": "assistant", "content": response}])

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """The sum of the rewards of an episode, which is closed if it has not ended."""
        key = self._key(row, messages)
        if messages[-1]["role"] == "assistant" and key not in self._kept.ended:  # the last turn was not replied to
            observation = self._stepped(row, key)
            key = key if observation is None else (*key, observation)
        if key not in self._kept.ended:
            episode = self._taken(row, key)
            episode.reward += float(self.cut_off(episode.state))
            self._end(key, episode)
        return self._kept.ended[key]

    def _key(self, row: dict, messages: Messages) -> Key:
        """The conversation after its prompt; equal ones are in equal states, as episodes of a row are."""
        return (repr(row), *(message["content"] for message in messages[len(self.prompt(row)) :]))

    def _first(self, row: dict) -> str | Messages:
        name = repr(row)
        if name not in self._kept.first:
            state, observation = self.reset(row)
            self.close(state)
            self._kept.first[name] = observation
        return self._kept.first[name]

    def _stepped(self, row: dict, key: Key) -> str | None:
        """The observation of the step with the last text; None where the episode ended with it."""
        episode = self._taken(row, key[:-1])
        try:
            observation, reward, ended = self.step(episode.state, key[-1])
        except BaseException:
            self.close(episode.state)
            raise
        episode.reward += float(reward)
        if ended:
            self._end(key, episode)
            return None
        self._keep((*key, observation), episode)
        return observation

    def _taken(self, row: dict, key: Key) -> _Open[State]:
        """The episode in this state: one that waits, or a new one in which the conversation is played again."""
        with self._kept.lock:
            if waiting := self._kept.going_on.get(key):
                episode = waiting.pop()
                if not waiting:
                    del self._kept.going_on[key]
                return episode
        state, observation = self.reset(row)
        episode, said = _Open(state), key[1:]
        seen = [self._first(row), *said[1::2]]
        for text, before in zip([*said[::2], None], seen, strict=True):
            if observation != before:
                self.close(state)
                raise RuntimeError(
                    f"{type(self).__name__} begins another episode from the same row: {observation!r:.80} instead of "
                    f"{before!r:.80}; what is random in reset has to follow from a seed in the row"
                )
            if text is not None:
                observation, reward, _ = self.step(state, text)
                episode.reward += float(reward)
        return episode

    def _keep(self, key: Key, episode: _Open[State]) -> None:
        dropped = []
        with self._kept.lock:
            self._kept.going_on.setdefault(key, []).append(episode)
            while len(self._kept.going_on) > MOST_OPEN:
                dropped += self._kept.going_on.popitem(last=False)[1]
        for old in dropped:
            self.close(old.state)

    def _end(self, key: Key, episode: _Open[State]) -> None:
        reward = Reward({"episode": episode.reward}, self.measures(episode.state))
        with self._kept.lock:
            self._kept.ended[key] = reward
            while len(self._kept.ended) > MOST_OPEN:
                self._kept.ended.popitem(last=False)
        with contextlib.suppress(OSError):  # its connection may be closed by the other side
            self.close(episode.state)


def text_of(observation: Any) -> str:
    """An observation as text: itself, the only text in it, or JSON.

    >>> text_of({"echoed": "hi"}), text_of({"x": 1, "y": [2]})
    ('hi', '{"x": 1, "y": [2]}')
    """
    if isinstance(observation, dict) and len(observation) == 1:
        (only,) = observation.values()
        observation = only if isinstance(only, str) else observation
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
