"""Session: the calls of one agent, recorded as the tokens that the policy read and sampled.

Ids never go through text twice. A call whose messages go on from an earlier response is given that call's prompt and
what was sampled, as they are; only the messages behind are written by the chat template. A call that fits no earlier
one, as its history was rewritten, is written from its beginning, and becomes a sequence of its own.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo_rl.agents.requests import (
    MakeParser,
    Message,
    RequestError,
    ToolParser,
    digests,
    for_template,
    response_message,
)
from grpo_rl.data.group import Trajectory
from grpo_rl.engines.base import Samples, Sampling
from grpo_rl.engines.loop_thread import side_by_side
from grpo_rl.envs.chat import encode_prompts, encode_reply, harmless
from grpo_rl.envs.tools.schemas import tool_schemas

Sample = Callable[[Sequence[int], Sampling], Awaitable[Samples]]
"""Samples one response to a prompt."""


@dataclass(frozen=True)
class Limits:
    """Limits of one session: calls of the endpoint, and tokens sampled in all of them together."""

    calls: int = 100
    tokens: int = 100_000


@dataclass(frozen=True, eq=False)
class Response:
    """One response of the policy, with all that it read.

    Args:
        parent: the response that its prompt goes on from; None: the prompt was written from its beginning.
        new_ids: the end of the prompt, behind the parent's tokens.
        message: as it was returned to the agent.
        messages: the conversation up to and with it.
    """

    parent: Response | None
    prompt_ids: list[int]
    new_ids: list[int]
    samples: Samples
    message: Message
    messages: list[Message]

    @property
    def ids(self) -> list[int]:
        """The ids that were sampled."""
        return self.samples.response_ids.tolist()

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how the response ended."""
        if bool(self.samples.truncated[0]):
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    @property
    def chain(self) -> list[Response]:
        """The responses that lead to this one, which is the last."""
        chain: list[Response] = []
        response: Response | None = self
        while response:
            chain.append(response)
            response = response.parent
        return chain[::-1]


class Session:
    """The record of one agent's calls.

    Args:
        tokenizer: of the policy; its chat template writes messages and tools.
        sample: samples one response; several of one call are sampled side by side.
        max_model_len: most tokens of a prompt and its response.
        make_parser: makes what finds calls of tools in responses; None: none are looked for.
        limits: beyond which calls are refused.
        seed: mixed into the seeds of calls, so that sessions of one row differ where their agents give the same seed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sample: Sample,
        max_model_len: int,
        make_parser: MakeParser | None = None,
        limits: Limits | None = None,
        seed: int = 0,
    ) -> None:
        self._tokenizer, self._sample, self._max_model_len = tokenizer, sample, max_model_len
        self._make_parser, self._limits, self._seed = make_parser, limits or Limits(), seed
        self.responses: list[Response] = []
        """All responses that the agent was given, in the order in which they came."""
        self.counts: Counter[str] = Counter()
        """Counts of ``calls``, refused ones too; of calls that ``extended`` an earlier response, or had
        ``rewritten`` the history of all; of responses that are ``branches``, next to another to the same messages or
        behind the same response; of sampled ``tokens``."""
        self.problems: dict[str, str] = {}
        """The kinds of trouble that made the record worse than it could be, with the first example of each."""
        self.ended = False
        """No further call is taken, and responses that are under way are not recorded."""
        self.reward: float | None = None
        """The last reward that its agent sent or returned; None: none."""
        self._by_history: dict[bytes, Response] = {}
        self._parsers: dict[bytes, ToolParser] = {}
        self._asked: set[bytes] = set()
        self._parents: set[int] = set()
        self._reserved, self._given_back = 0, asyncio.Event()

    async def ask(
        self, messages: Sequence[Any], tools: Sequence[Any] = (), n: int = 1, sampling: Sampling | None = None
    ) -> list[Response]:
        """The policy's responses to these messages, recorded.

        Args:
            tools: descriptions of functions, in OpenAI's format.
            sampling: of each response; its ``max_new_tokens`` is shortened to what context and session have left.

        A call under way holds as many tokens as it may sample. One that these leave too few waits until it is known how
        many were sampled.

        Raises:
            RequestError: the session has ended, or a limit is reached.
            ValueError: the chat template refuses the messages, or they are none.
        """
        self.check_open()
        self.counts["calls"] += 1  # first, so that a session whose calls are all refused reaches its limit, too
        # In a thread: a long text takes its time, in which other sessions go on.
        conversation, history, parent, new_ids, parser = await asyncio.to_thread(self._read, messages, tools)
        prompt = [*parent.prompt_ids, *parent.ids, *new_ids] if parent else new_ids
        sampling = await self._within(sampling or Sampling(), len(prompt), n)
        self._reserved += n * sampling.max_new_tokens
        try:
            sampled = await side_by_side([self._sample(prompt, self._seeded(sampling, i)) for i in range(n)])
        finally:
            self._reserved -= n * sampling.max_new_tokens
            self._given_back.set()  # waiting calls go on once this call's tokens are counted: nothing is awaited before
        if self.ended:
            raise RequestError("the session ended while this call was sampled", None, "session_ended", 403)
        self._count(parent, history[-1], n)
        responses = []
        for samples in sampled:
            ids, number = samples.response_ids.tolist(), len(self.responses)
            message, problem = response_message(self._tokenizer, ids, sampling.stop, parser, number)
            if problem:
                self.problems.setdefault("parser", problem)
            whole = [*conversation, for_template(message)]
            response = Response(parent, prompt, list(new_ids), samples, message, whole)
            self._by_history[digests(whole, tools)[-1]] = response
            self.responses.append(response)
            self.counts["tokens"] += len(ids)
            responses.append(response)
        return responses

    def sequences(self) -> list[Trajectory]:
        """The sequences to train on: one for each response that no call goes on from.

        Where sequences share responses, the first holds them as trainable tokens, so that each sampled token is
        trained on once: the first that was not cut off, if there is one, as ``loss.mask_truncated`` leaves out others.
        """
        inner = {id(response.parent) for response in self.responses}
        lasts = [response for response in self.responses if id(response) not in inner]
        holders: dict[int, Response] = {}
        for last in sorted(lasts, key=lambda last: bool(last.samples.truncated[0])):
            for response in last.chain:
                holders.setdefault(id(response), last)
        found = []
        for last in lasts:
            chain = last.chain
            recorded = Trajectory(prompt_ids=chain[0].prompt_ids, truncated=bool(last.samples.truncated[0]))
            for response in chain:
                samples, versions = response.samples, response.samples.versions
                if response.parent is not None:
                    first_version = int(versions[0]) if len(versions) else samples.version
                    recorded.read(torch.tensor(response.new_ids, dtype=torch.long), first_version)
                trainable = holders[id(response)] is last
                recorded.sampled(samples.response_ids, samples.log_probs, versions, samples.kept, trainable)
                if samples.routes is not None and samples.prompt_routes is not None:
                    recorded.routes = torch.cat([samples.prompt_routes, samples.routes])
            found.append(recorded)
        return found

    def _read(
        self, messages: Sequence[Any], tools: Sequence[Any]
    ) -> tuple[list[Message], list[bytes], Response | None, list[int], ToolParser | None]:
        """The messages in one form, their digests, the response that they go on from, the ids behind it, the parser."""
        conversation = [for_template(message) for message in messages]
        if not conversation:
            raise ValueError("messages is empty; give at least one")
        history = digests(conversation, tools)
        parent, new_ids = self._continued(conversation, history)
        if parent is None:
            new_ids = encode_prompts(self._tokenizer, [harmless(self._tokenizer, conversation)], tools)[0]
        return conversation, history, parent, new_ids, self._parser(tools, history[0])

    def _continued(self, messages: Sequence[Message], history: Sequence[bytes]) -> tuple[Response | None, list[int]]:
        """The latest response that the messages go on from, and the ids of the messages behind it."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1]["role"] == "assistant" and (response := self._by_history.get(history[count])):
                last = response.ids[-1] if response.ids else None
                try:
                    calls = response.message.get("tool_calls", ())
                    return response, encode_reply(self._tokenizer, list(messages[count:]), last, calls)
                except ValueError as error:  # such a template may still write the conversation from its beginning
                    text = f"an agent's calls can't extend earlier ones, and are written anew: {error}"
                    self.problems.setdefault("template", text)
                    return None, []
        return None, []

    def _parser(self, tools: Sequence[Any], digest: bytes) -> ToolParser | None:
        if not tools or self._make_parser is None:
            return None
        if digest not in self._parsers:
            self._parsers[digest] = self._make_parser(self._tokenizer, tool_schemas(tools))
        return self._parsers[digest]

    def check_open(self) -> None:
        """Raises a RequestError if the session takes no further call."""
        self._check_not_ended()
        if self.counts["calls"] >= self._limits.calls:
            text = f"the session has made all of its {self._limits.calls} calls"
            raise RequestError(text, None, "session_limit", 403)

    def _check_not_ended(self) -> None:
        if self.ended:
            raise RequestError("this session has ended", None, "session_ended", 403)

    async def _within(self, sampling: Sampling, prompt: int, n: int) -> Sampling:
        """The settings, shortened to the tokens that are left, once no other call holds any of those requested."""
        self._check_not_ended()
        if not 0 < prompt < self._max_model_len:
            text = f"the messages have {prompt} tokens, and the context is {self._max_model_len} with the response"
            raise RequestError(text, None, "context_length_exceeded")
        wanted = min(sampling.max_new_tokens, self._max_model_len - prompt)
        while True:
            unused = self._limits.tokens - self.counts["tokens"]
            if unused < n:
                text = f"the session has sampled all of its {self._limits.tokens} tokens"
                raise RequestError(text, None, "session_limit", 403)
            left = (unused - self._reserved) // n
            if left >= wanted or not self._reserved:
                break
            self._given_back.clear()
            await self._given_back.wait()
            self._check_not_ended()
        most = min(wanted, left)
        return replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))

    def _seeded(self, sampling: Sampling, i: int) -> Sampling:
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=zlib.crc32(f"{self._seed}/{sampling.seed}/{i}".encode()))

    def _count(self, parent: Response | None, asked: bytes, n: int) -> None:
        again = asked in self._asked if parent is None else id(parent) in self._parents
        self.counts["extended"] += parent is not None
        self.counts["rewritten"] += parent is None and not again and bool(self._asked)
        self.counts["branches"] += n - 1 + again
        self._parents.add(id(parent))
        self._asked.add(asked)
