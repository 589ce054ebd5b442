"""LLMEnv: the TorchRL environment around a task.

Dimension letters: B = num_envs * repeats answers, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Bounded, Composite, NonTensor, StackedComposite, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from grpo_rl.data import keys
from grpo_rl.envs.chat import Dialog, encode_prompts, encode_reply
from grpo_rl.envs.guards.guard import Failure, ScoreError, ScoreGuard
from grpo_rl.envs.rewards.combined import token_counter, with_rewards
from grpo_rl.envs.task import RESERVED_PARTS, Messages, Reward, Task, Unjudgeable, plays_turns

__all__ = [
    "Failure", "LLMEnv", "Messages", "Prompt", "Reward", "ScoreError", "ScoreGuard", "Task", "Unjudgeable",
]  # fmt: skip

_CHECK_BATCH = 1024
_OBSERVATION = (keys.QUERY, keys.TOKENS_PROMPT, keys.GROUP_ID, keys.ROW)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One use of a dataset row: what is asked ``repeats`` times, under an id that is unique in the run."""

    group_id: int
    row: int
    query: str
    ids: Int[Tensor, " P"]


class LLMEnv(EnvBase):
    """A batch of ``num_envs`` prompts, each answered ``repeats`` times; the answers to one prompt are adjacent.

    ``reset`` takes the next rows of the epoch's seeded shuffle, ``step`` scores the answers and ends the episode; where
    the task replies, the prompt of the next step is the whole conversation, and the episode ends when all are over.
    A collector that needs no TensorDicts uses :meth:`next_prompts` and :meth:`score`, which both are built on; in
    ``step`` replies come one after the other and have no deadline, in ours each has its own.
    The data position is in ``state_dict()``, as JSON-able numbers: a restored environment asks the same next questions.

    Args:
        task: gives prompts and rewards.
        tokenizer: of the model that answers. Without a chat template, a prompt is its messages' contents.
        num_envs: prompts in flight.
        repeats: answers to each, the group size G.
        max_prompt_tokens: the longest prompt that leaves room for an answer; None does not check.
        long_prompt: what to do with longer ones: ``error``, or ``skip``, which counts them in :attr:`skipped`.
        max_turns: answers of the policy in one conversation, where the task replies.
        score_timeout_s: deadline of a scorer, and of a reply; see `grpo_rl.envs.guards.guard`.
        max_failed_fraction: of all answers, beyond which failing scorers stop the run.
        isolated: score in processes of their own, or not, whatever the task asks for; None leaves it to the task.
        rewards: added to the task's own, see `grpo_rl.envs.rewards`.
        seed: of the shuffles.

    Raises:
        ValueError: there are no rows, or a group of one, which has no advantage; a limit or choice makes no sense.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        num_envs: int,
        repeats: int,
        *,
        max_prompt_tokens: int | None = None,
        long_prompt: str = "error",
        max_turns: int = 4,
        score_timeout_s: float = 60.0,
        max_failed_fraction: float = 0.1,
        isolated: bool | None = None,
        rewards: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"env.num_envs={num_envs}; at least 1 prompt must be in flight")
        if repeats < 2:
            raise ValueError(
                f"env.repeats={repeats}; an answer is compared with the others of its group, so at least 2 are needed"
            )
        if not len(task.rows):
            raise ValueError(f"{type(task).__name__} has no rows; give a dataset with at least one")
        if long_prompt not in ("error", "skip"):
            raise ValueError(f"env.long_prompt={long_prompt}; choose error or skip")
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ValueError(
                f"{max_prompt_tokens} tokens are left for a prompt; raise inference_model.max_model_len "
                "or lower sampling.max_new_tokens"
            )
        if clash := RESERVED_PARTS & set(task.reward_parts):
            raise ValueError(
                f"{type(task).__name__} names reward parts {sorted(clash)}, which are metrics; rename them"
            )
        if max_turns < 1:
            raise ValueError(f"env.max_turns={max_turns}; the policy needs at least 1 turn")
        if isolated is not None:
            task.isolated = isolated
        task = with_rewards(task, rewards, token_counter(tokenizer))
        super().__init__(batch_size=[num_envs * repeats])
        self.task, self.tokenizer = task, tokenizer
        self.num_envs, self.repeats = num_envs, repeats
        self.max_prompt_tokens, self.long_prompt = max_prompt_tokens, long_prompt
        self.max_turns = max_turns if plays_turns(task) else 1
        self.guard = ScoreGuard(task, score_timeout_s, max_failed_fraction)
        self._too_long: set[int] = set()
        self._next_group_id = 0
        self._start_epoch(seed, 0)
        self._make_specs()

    # ---- plain methods: what reset and step are built on ----

    def next_prompts(self, count: int | None = None) -> list[Prompt]:
        """The next ``count`` prompts, or ``num_envs``, each tokenised once.

        Raises:
            ValueError: a prompt is too long and ``long_prompt`` is ``error``, or every prompt is too long.
        """
        prompts: list[Prompt] = []
        while missing := (count or self.num_envs) - len(prompts):
            rows = [row for row in self._next_rows(missing) if row not in self._too_long]
            for row, query, ids in self._encoded(rows):
                if self._fits(row, len(ids)):
                    prompts.append(Prompt(self._next_group_id, row, query, torch.tensor(ids, dtype=torch.long)))
                    self._next_group_id += 1
        return prompts

    def score(self, row: int, responses: Sequence[Tensor | Sequence[int]]) -> list[Reward | Failure]:
        """The reward of each answer to one row, or why it has none.

        Args:
            row: index of the dataset row.
            responses: ids of each answer.

        Raises:
            ScoreError: too many answers failed (`grpo_rl.envs.guards.guard`).
        """
        data, texts = self.task.rows[row], self._decode_all(responses)
        if not plays_turns(self.task):
            return self.guard.score(data, texts, f"row {row}")
        prompt = self.task.prompt(data)
        dialogs = [[*prompt, {"role": "assistant", "content": text}] for text in texts]
        return self.guard.score_dialogs(data, dialogs, f"row {row}")

    def check_prompts(self) -> None:
        """Tokenises every row, so that a prompt that is too long is found before a model is loaded.

        Raises:
            ValueError: one is, and ``long_prompt`` is ``error``; or all are; or the chat template can't write a reply.
        """
        if self.max_turns > 1:
            encode_reply(self.tokenizer, [{"role": self.task.reply_role, "content": "a reply"}])
        if self.max_prompt_tokens is None:
            return
        for start in range(0, len(self.task.rows), _CHECK_BATCH):
            for row, _, ids in self._encoded(range(start, min(start + _CHECK_BATCH, len(self.task.rows)))):
                self._fits(row, len(ids))

    @property
    def skipped(self) -> int:
        """Rows found too long and left out; each counts once, however many epochs pass."""
        return len(self._too_long)

    def encode(self, row: dict) -> list[int]:
        """Ids of a row's prompt, whether the row is the environment's own or held out."""
        return encode_prompts(self.tokenizer, [self.task.prompt(row)])[0]

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text that is judged: without special tokens, otherwise exactly what was sampled."""
        return self._decode_all([ids])[0]

    def encode_reply(self, reply: Messages, last: int) -> list[int]:
        """Ids that go behind a sampled answer: the end of its turn, the reply, the beginning of the next turn.

        Args:
            last: the answer's last id.
        """
        return encode_reply(self.tokenizer, reply, last)

    def query(self, row: int) -> str:
        """The question of a row, for people and logs."""
        return self.task.prompt(self.task.rows[row])[-1]["content"]

    def gold(self, row: int) -> str | None:
        """The right answer of a row, for people and logs."""
        return self.task.gold(self.task.rows[row])

    # ---- data position ----

    def get_extra_state(self) -> dict[str, int]:
        """The data position and the counts of failures, which torch puts into ``state_dict()``."""
        return {
            "rows": len(self.task.rows),
            "digest": self._digest,
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "next_group_id": self._next_group_id,
            **self.guard.counts,
        }

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Goes to a data position, out of ``load_state_dict()``.

        Raises:
            ValueError: it is a position in other data.
        """
        if (state["rows"], state["digest"]) != (len(self.task.rows), self._digest):
            raise ValueError(
                f"the data position is from other data: {state['rows']} rows then, {len(self.task.rows)} now, or the "
                "same number with other content; resume with the same data"
            )
        self._start_epoch(state["seed"], state["epoch"])
        self._cursor, self._next_group_id = state["cursor"], state["next_group_id"]
        self.guard.restore(state)

    def _start_epoch(self, seed: int, epoch: int) -> None:
        self._seed, self._epoch, self._cursor = seed, epoch, 0
        # Seeding with both numbers apart: with their sum, seed 0's second epoch would be seed 1's first.
        self._order = random.Random(f"{seed}/{epoch}").sample(range(len(self.task.rows)), len(self.task.rows))

    def _next_rows(self, count: int) -> list[int]:
        rows = []
        for _ in range(count):
            if self._cursor == len(self._order):
                self._start_epoch(self._seed, self._epoch + 1)
            rows.append(self._order[self._cursor])
            self._cursor += 1
        return rows

    @cached_property
    def _digest(self) -> int:
        """Of all rows in their order: a position means something in the same data only."""
        return zlib.crc32("\n".join(repr(row) for row in self.task.rows).encode())

    # ---- tokens ----

    def _encoded(self, rows: Sequence[int]) -> list[tuple[int, str, list[int]]]:
        """(row, question, ids) of each row, tokenised in one call."""
        if not rows:
            return []
        messages = [self.task.prompt(self.task.rows[row]) for row in rows]
        return [
            (row, message[-1]["content"], ids)
            for row, message, ids in zip(rows, messages, encode_prompts(self.tokenizer, messages), strict=True)
        ]

    def _decode_all(self, responses: Sequence[Tensor | Sequence[int]]) -> list[str]:
        # Tensors go in as they are: of a list, transformers would look at the type of every token.
        return self.tokenizer.batch_decode(
            list(responses), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _fits(self, row: int, tokens: int) -> bool:
        if self.max_prompt_tokens is None or tokens <= self.max_prompt_tokens:
            return True
        if self.long_prompt == "error":
            raise ValueError(
                f"the prompt of row {row} has {tokens} tokens, {self.max_prompt_tokens} fit; raise "
                "inference_model.max_model_len, lower sampling.max_new_tokens, or leave such rows out with "
                "env.long_prompt=skip"
            )
        self._too_long.add(row)
        if len(self._too_long) == len(self.task.rows):
            raise ValueError(
                f"all {len(self.task.rows)} prompts are longer than {self.max_prompt_tokens} tokens (row {row} has "
                f"{tokens}); raise inference_model.max_model_len or lower sampling.max_new_tokens"
            )
        return False

    # ---- TorchRL ----

    def _make_specs(self) -> None:
        batch = self.batch_size
        prompt = Unbounded((-1,), dtype=torch.long)
        answer = Bounded(0, len(self.tokenizer) - 1, (-1,), dtype=torch.long)
        self.observation_spec = self._ragged(
            {
                keys.QUERY: NonTensor(shape=(), example_data="a question"),
                keys.TOKENS_PROMPT[0]: Composite({keys.TOKENS_PROMPT[1]: prompt}),
                keys.GROUP_ID: Unbounded((1,), dtype=torch.long),
                keys.ROW: Unbounded((1,), dtype=torch.long),
            }
        )
        self.action_spec = self._ragged({keys.TOKENS_RESPONSE[0]: Composite({keys.TOKENS_RESPONSE[1]: answer})})
        parts = Composite({name: Unbounded((*batch, 1)) for name in self.task.reward_parts}, shape=batch)
        self.reward_spec = Composite(
            {keys.REWARD[-1]: Unbounded((*batch, 1)), keys.REWARD_PARTS[0]: parts}, shape=batch
        )

    def _ragged(self, row: dict) -> StackedComposite:
        """The spec of a lazily stacked batch, whose rows differ in length: one dense spec would ask to stack them."""
        return StackedComposite(*[Composite(row)] * self.batch_size[0], dim=0)

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros in the form of one step of a rollout, stacked as ``reset`` and ``step`` stack their rows."""
        return lazy_stack(list(super().fake_tensordict().unbind(0)))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        if tensordict is not None and (mask := tensordict.get("_reset", None)) is not None and not mask.all():
            raise ValueError("a part of the batch can't be reset alone: the answers of a group begin together")
        rows = []
        self._dialogs: list[Dialog] = []
        for prompt in self.next_prompts():
            messages = self.task.prompt(self.task.rows[prompt.row])
            self._dialogs += [Dialog(list(messages)) for _ in range(self.repeats)]
            row = TensorDict(
                {
                    keys.QUERY: NonTensorData(prompt.query),
                    keys.TOKENS_PROMPT: prompt.ids,
                    keys.GROUP_ID: torch.tensor([prompt.group_id]),
                    keys.ROW: torch.tensor([prompt.row]),
                }
            )
            # Shallow copies: the rows of a group share their tensors, and each gets a place for its own answer.
            rows += [row.copy() for _ in range(self.repeats)]
        return lazy_stack(rows)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        answers = list(tensordict.unbind(0))
        judged: list[Reward | Messages] = []
        for start in range(0, len(answers), self.repeats):
            judged += self._judge(start, answers[start : start + self.repeats])
        rows = []
        for answer, result in zip(answers, judged, strict=True):
            row = answer.select(*_OBSERVATION)
            reward = result if isinstance(result, Reward) else self._no_reward
            if not isinstance(result, Reward):
                last = int(answer[keys.TOKENS_RESPONSE][-1])
                reply = torch.tensor(self.encode_reply(result, last), dtype=torch.long)
                row[keys.TOKENS_PROMPT] = torch.cat([row[keys.TOKENS_PROMPT], answer[keys.TOKENS_RESPONSE], reply])
            row[keys.REWARD[-1]] = torch.tensor([reward.total])
            for name in self.task.reward_parts:
                row[keys.REWARD_PARTS + (name,)] = torch.tensor([reward.parts[name]])
            row["done"], row["terminated"] = (torch.tensor([isinstance(result, Reward)]) for _ in range(2))
            rows.append(row)
        return lazy_stack(rows)

    def _judge(self, first: int, answers: Sequence[TensorDictBase]) -> list[Reward | Messages]:
        """Rewards of the answers to one prompt, or what the task replies where the conversation goes on."""
        index = int(answers[0][keys.ROW])
        row, texts = self.task.rows[index], self._decode_all([answer[keys.TOKENS_RESPONSE] for answer in answers])
        # A conversation that is over waits for the others; it had its reward.
        judged: list[Reward | Messages] = [self._no_reward] * len(answers)
        ended = []
        for k, (dialog, text) in enumerate(zip(self._dialogs[first : first + len(answers)], texts, strict=True)):
            if dialog.over:
                continue
            dialog.say(text)
            if (reply := dialog.reply(self.task, row, self.max_turns)) is not None:
                dialog.hear(reply)
                judged[k] = reply
            else:
                ended.append(k)
        messages = [self._dialogs[first + k].messages for k in ended]
        for k, result in zip(ended, self.guard.score_dialogs(row, messages, f"row {index}"), strict=True):
            if isinstance(result, Failure):
                # A batch of TorchRL's has no place for an answer without a reward; the project's own collectors have.
                raise ScoreError(result.message)
            judged[k] = result
        return judged

    @property
    def _no_reward(self) -> Reward:
        return Reward(dict.fromkeys(self.task.reward_parts, 0.0))

    def _set_seed(self, seed: int | None) -> None:
        """Begins the first epoch of ``seed``; group ids go on, as they are unique in the run."""
        if seed is not None:
            self._start_epoch(seed, 0)
