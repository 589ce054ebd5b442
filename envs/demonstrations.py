"""Demonstrations: the rows of a task as prompts with the response that SFT imitates, each a group of one response."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_rl.data.group import Group
from grpo_rl.envs.chat import decode_responses, encode_rows, shown_messages, templated, turn_end
from grpo_rl.envs.prompts import Prompt, PromptSource
from grpo_rl.envs.tables import EXTRA_FIELDS, place_of
from grpo_rl.envs.task import Messages, Task

_THOUGHT = "<think>"
"""The beginning of a thought, which some templates write for the policy."""


class Demonstrations:
    """The rows of a task with the ids of prompt and response, in shuffled epochs, each row once an epoch.

    A prompt's ids are those that GRPO samples from. The response's are those of its text, and the end of turn that
    generation stops at: what a policy that imitates it would have sampled, so that GRPO goes on with the same ids.
    Where the prompt ends with the beginning of a thought, a demonstration's own is left out.

    Args:
        task: has a `Task.demonstration` of each row.
        ends: ids that end a response in generation (`grpo_rl.policies.generation.end_ids`).
        max_response_tokens: the longest response, its end included.
        long_prompt: what to do with rows of which either is longer: ``error``, or ``skip``, which counts them.

    Raises:
        ValueError: there are no rows, a row has no demonstration, an empty one, or one with an end of turn in its text,
            one is too long and ``long_prompt`` is ``error``, or the model has no end of sequence.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        max_prompt_tokens: int,
        max_response_tokens: int,
        long_prompt: str = "error",
        seed: int = 0,
    ) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.max_prompt_tokens, self._max_response_tokens = max_prompt_tokens, max_response_tokens
        self._long_prompt = long_prompt
        if not ends:
            raise ValueError("the model has no end of sequence; give it one: eos_token_id in generation_config.json")
        self.end, self._ends = _end_of_turn(tokenizer, ends), set(ends)
        self._opened = _opened_thought(tokenizer)
        self._prompts = PromptSource(task, tokenizer, max_prompt_tokens, long_prompt, seed)
        self.responses([0])  # a task that has none at all is refused before anything else
        self.written_otherwise: list[int] = []
        """Rows whose prompt and response the chat template writes with other ids, as of the whole conversation."""
        self._check()

    def __len__(self) -> int:
        """The number of rows that are trained on in an epoch."""
        return len(self.task.rows) - self.skipped

    @property
    def skipped(self) -> int:
        """Rows found too long and left out."""
        return len(self._prompts.too_long)

    def take(self, count: int) -> list[Group]:
        """The next ``count`` rows as groups."""
        prompts = self._prompts.take(count)
        return [_group(*pair) for pair in zip(prompts, self.responses([p.row for p in prompts]), strict=True)]

    def groups(self, rows: Sequence[dict]) -> list[Group]:
        """Held-out rows as groups, in their order; for the errors see the class."""
        if not rows:
            return []
        groups = []
        places = [f"{place_of(rows, i)}, held out" for i in range(len(rows))]
        prompts = encode_rows(self.tokenizer, self.task, rows, places)
        for i, (ids, response) in enumerate(zip(prompts, self._encoded(rows, places), strict=True)):
            remedy = f"or set evaluate.rows={i if i > 1 else 0}, as env.long_prompt leaves none of these out"
            if len(ids) > self.max_prompt_tokens:
                where = f"the prompt of {places[i]} has {len(ids)} tokens, {self.max_prompt_tokens} fit"
                raise ValueError(f"{where}; raise inference_model.max_model_len, {remedy}")
            if len(response) > self._max_response_tokens:
                raise ValueError(self._too_long(places[i], len(response), remedy))
            groups.append(_group(Prompt(i, i, "", torch.tensor(ids, dtype=torch.long)), response))
        return groups

    def responses(self, rows: Sequence[int]) -> list[list[int]]:
        """Ids of the response of each row, by its index."""
        return self._encoded([self.task.rows[row] for row in rows], [place_of(self.task.rows, row) for row in rows])

    def state(self) -> dict[str, int]:
        """The position in the data, as JSON-able numbers."""
        return self._prompts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position in the data; see `PromptSource.restore`."""
        self._prompts.restore(dict(state))

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of a response, without its end."""
        return decode_responses(self.tokenizer, [ids])[0]

    def query(self, row: int) -> str:
        """The question of a row, for logs."""
        return self.task.prompt(self.task.rows[row])[-1]["content"]

    def _encoded(self, rows: Sequence[dict], places: Sequence[str]) -> list[list[int]]:
        texts = []
        for place, row in zip(places, rows, strict=True):
            try:
                text = self._text(row)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            if text is None:
                which = (
                    "rows of gsm8k, math, code, prompt_response and tasks with a method `demonstration` can have one"
                )
                raise ValueError(f"{place}: {type(self.task).__name__} has no demonstration of it to imitate; {which}")
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"the demonstration of {place} is {text!r:.80}; give it a text, or remove the row")
            texts.append(_without(self._opened, text))
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        for place, ids in zip(places, encoded, strict=True):
            if ends := self._ends.intersection(ids):
                where = f"the demonstration of {place} has {self.tokenizer.decode([min(ends)])!r} in its text"
                raise ValueError(f"{where}, at which generation ends; remove such tokens (the end is added here)")
        return [[*ids, self.end] for ids in encoded]

    def _text(self, row: dict) -> str | None:
        demonstration = self.task.demonstration(row)
        if not isinstance(demonstration, Mapping):
            return demonstration
        return _written_turn(
            self.tokenizer, self.task.prompt(row), demonstration, self.task.tools_of(row), self._opened
        )

    def _check(self) -> None:
        """Encodes every row: finds what can't be trained on, and what the template would write otherwise."""
        for batch in self._prompts.checked():
            fitting = []
            for (row, prompt), response in zip(batch, self.responses([row for row, _ in batch]), strict=True):
                if len(response) <= self._max_response_tokens:
                    fitting.append((row, [*prompt, *response]))
                elif self._long_prompt == "error":
                    remedy = "or leave such rows out with env.long_prompt=skip"
                    raise ValueError(self._too_long(place_of(self.task.rows, row), len(response), remedy))
                else:
                    self._prompts.too_long.add(row)
            self.written_otherwise += self._differing(fitting)
        if not len(self):
            remedy = "raise sampling.max_new_tokens or inference_model.max_model_len"
            raise ValueError(f"all {len(self.task.rows)} rows are too long; {remedy}")

    def _differing(self, encoded: Sequence[tuple[int, list[int]]]) -> list[int]:
        if not self.tokenizer.chat_template or not encoded:
            return []
        rows = [self.task.rows[row] for row, _ in encoded]
        texts = [self.task.demonstration(row) or "" for row in rows]
        replies = [[text if isinstance(text, dict) else {"role": "assistant", "content": text}] for text in texts]
        written = encode_rows(self.tokenizer, self.task, rows, replies=replies)
        return [row for (row, ids), ours in zip(encoded, written, strict=True) if ours[: len(ids)] != ids]

    def _too_long(self, where: str, tokens: int, remedy: str) -> str:
        most = f"sampling.max_new_tokens={self._max_response_tokens}"
        return f"the demonstration of {where} has {tokens} tokens with its end, more than {most}; raise it, {remedy}"


def _without(opened: str, text: str) -> str:
    """The text without the beginning of a thought that the prompt ends with."""
    if text.startswith(opened):
        return text.removeprefix(opened)
    thought = opened.strip()
    return text.lstrip().removeprefix(thought) if text.lstrip().startswith(thought) else text


def _opened_thought(tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning of a thought that the generation prompt ends with, and what follows it; else nothing."""
    if not tokenizer.chat_template:
        return ""
    question = [{"role": "user", "content": "question"}]
    text = templated(tokenizer, question, add_generation_prompt=True, tokenize=False)
    _, thought, behind = text.rpartition(_THOUGHT)
    return thought + behind if not behind.strip() else ""


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> int:
    """The id that the chat template ends the assistant's turn with, if generation stops there; else its first end."""
    if not tokenizer.chat_template:
        return next((id for id in ends if id == tokenizer.eos_token_id), ends[0])
    behind = tokenizer(turn_end(tokenizer), add_special_tokens=False)["input_ids"]
    return next((id for id in behind if id in ends), ends[0])


def _group(prompt: Prompt, response: Sequence[int]) -> Group:
    """A group of one response, of advantage 1: SFT raises the log-probability of the demonstration."""
    tokens = len(response)
    return Group(
        group_id=prompt.group_id,
        row=prompt.row,
        prompt_ids=prompt.ids,
        response_ids=torch.tensor(response, dtype=torch.long),
        log_probs=torch.zeros(tokens),  # in the data the response is certain
        versions=torch.zeros(tokens, dtype=torch.long),
        trainable=torch.ones(tokens, dtype=torch.bool),
        offsets=torch.tensor([0, tokens]),
        rewards=torch.zeros(1),
        advantages=torch.ones(1),
    )


def _written_turn(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, message: Mapping[str, Any], tools: Sequence[Any], thought: str
) -> str:
    """The text that the chat template writes for a message of the policy's behind a prompt, without the turn's end.

    ``thought`` is the beginning of one that the generation prompt ends with, which the message's own may replace.
    """
    (before, whole), given = shown_messages(tokenizer, [prompt, [*prompt, dict(message)]], tools)
    if not tokenizer.chat_template:
        return whole[-1]["content"]
    opened = templated(tokenizer, before, add_generation_prompt=True, tokenize=False, **given)
    text = templated(tokenizer, whole, add_generation_prompt=False, tokenize=False, **given)
    opened = opened if text.startswith(opened) else opened.removesuffix(thought)
    if not text.startswith(opened):
        raise ValueError("the tokenizer's chat template writes the prompt otherwise before a message with calls")
    said = text[len(opened) :].removesuffix(turn_end(tokenizer))
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    thoughts = [message[name].strip() for name in EXTRA_FIELDS[1:] if isinstance(message.get(name), str)]
    if missing := [part for part in [*names, *thoughts, message["content"].strip()] if part not in said]:
        raise ValueError(f"the tokenizer's chat template leaves out {missing[0]!r:.80} of the message to imitate")
    # Qwen3's template writes an empty thought where there is none, which no text of the data has.
    return said if thoughts else re.sub(r"^<think>\s*</think>\s*", "", said)
