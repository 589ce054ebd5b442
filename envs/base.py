"""LLMEnv: the TorchRL environment around a task."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Bounded, Composite, NonTensor, StackedComposite, Unbounded
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase

from grpo_rl.by_name import one_line
from grpo_rl.data import keys
from grpo_rl.envs.chat import Dialog, check_reply, decode_responses, encode_reply, encode_rows
from grpo_rl.envs.curriculum import Curriculum, read_bounds
from grpo_rl.envs.guards.guard import Failure, ScoreError, ScoreGuard
from grpo_rl.envs.prompts import Prompt, PromptSource
from grpo_rl.envs.rewards.combined import token_counter, with_rewards
from grpo_rl.envs.task import RESERVED_PARTS, SCORES, Messages, Reward, Task, Unjudgeable, plays_turns
from grpo_rl.envs.tools.functions import check_functions
from grpo_rl.envs.tools.mcp import Server, close_servers, with_mcp
from grpo_rl.envs.tools.schemas import checked_calls, tool_schemas

__all__ = [
    "Failure", "LLMEnv", "Messages", "Prompt", "Reward", "ScoreError", "ScoreGuard", "Task", "Unjudgeable",
]  # fmt: skip

_OBSERVATION = (keys.QUERY, keys.TOKENS_PROMPT, keys.GROUP_ID, keys.ROW)


class LLMEnv(EnvBase):
    """A batch of ``num_envs`` prompts with ``repeats`` responses each; the responses to one prompt are adjacent.

    ``reset`` takes the next rows of the epoch's seeded shuffle; ``step`` scores the responses and ends the episode.

    If the task replies, the next step's prompt is the whole conversation, and the episode ends when all conversations
    are over. In ``step``, replies are computed one by one without a deadline; our collectors give each its own.

    A collector that needs no TensorDicts uses :meth:`next_prompts` and :meth:`score`, which both methods are built on.

    ``state_dict()`` holds the data position as JSON-able numbers: a restored environment gives the same next prompts.

    Args:
        task: gives prompts and rewards.
        tokenizer: of the policy. Without a chat template, a prompt is its messages' contents.
        num_envs: prompts in flight.
        repeats: responses to each, the group size G of ``reset`` and ``step``; a collector has its own.
        max_prompt_tokens: the longest prompt that leaves room for a response; None does not check.
        long_prompt: what to do with longer ones: ``error``, or ``skip``, which counts them in :attr:`skipped`.
        max_turns: responses of the policy in one conversation, where the task replies.
        score_timeout_s: deadline of a scorer, and of a reply; see `grpo_rl.envs.guards.guard`.
        max_failed_fraction: share of all responses, beyond which failing scorers stop the run.
        isolated: score in processes of their own, or not, whatever the task asks for; None leaves it to the task.
        rewards: added to the task's own, see `grpo_rl.envs.rewards`.
        tool_parser: makes what reads the calls in responses, of the tokenizer and the JSON schemas of the task's tools:
            something with ``parse(text) -> (content, tool_calls)``, such as
            `grpo_rl.engines.vllm.tool_parsers.tool_parser` with the name of a format.
        mcp: servers whose tools the policy can call as well, see `grpo_rl.envs.tools.mcp`; :meth:`close` ends them.
        seed: of the shuffles.
        curriculum: which rows are drawn, by their pass rates, see `grpo_rl.envs.curriculum.Bounds`; empty: all.

    Raises:
        ValueError: there are no rows or no rewards; nothing runs a tool, or reads calls to it.
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
        tool_parser: Callable[[PreTrainedTokenizerBase, list[dict[str, Any]]], Any] | None = None,
        mcp: Sequence[str | Mapping[str, Any]] = (),
        seed: int = 0,
        curriculum: Mapping[str, Any] | None = None,
    ) -> None:
        if isolated is not None:
            task.isolated = isolated
        if "accuracy" in task.reward_parts and task.correct_part not in (None, "accuracy"):
            raise ValueError(f"{type(task).__name__}: the part accuracy is not what tells what is right; rename it")
        check_functions(task)
        self._servers: list[Server] = []
        # Also of an environment that is forgotten without `close`, or that can't be built. The thread that collects the
        # garbage must not be held up; at the program's end the servers end themselves, and are waited for.
        weakref.finalize(self, close_servers, self._servers, wait=False).atexit = False  # pyrefly: ignore[missing-attribute]
        task = with_mcp(task, mcp, score_timeout_s, self._servers)
        task = with_rewards(task, rewards, token_counter(tokenizer))
        if clash := [part for part in task.reward_parts if part in RESERVED_PARTS or part.startswith(SCORES)]:
            raise ValueError(
                f"{type(task).__name__} names reward parts {sorted(clash)}, which are metrics; rename them"
            )
        if not task.reward_parts:
            raise ValueError("env.reward is empty; set it to package.module:function, or add rewards with env.rewards")
        if task.tools and tool_parser is None:
            raise ValueError(f"{type(task).__name__} has tools, and nothing reads calls to them; give tool_parser")
        schemas = tool_schemas(task.tools)
        self._tool_parser = tool_parser(tokenizer, schemas) if schemas and tool_parser else None
        bounds = read_bounds(curriculum or {})
        kept = Curriculum(bounds, task) if bounds else None
        prompts = PromptSource(task, tokenizer, max_prompt_tokens, long_prompt, seed, kept)
        super().__init__(batch_size=[num_envs * repeats])
        self.task, self.tokenizer, self._prompts = task, tokenizer, prompts
        self.num_envs, self.repeats, self.max_prompt_tokens = num_envs, repeats, max_prompt_tokens
        self.max_turns = max_turns if plays_turns(task) else 1
        self.guard = ScoreGuard(task, score_timeout_s, max_failed_fraction)
        self._make_specs()

    @cached_property
    def held_out_guard(self) -> ScoreGuard:
        """The guard of agents' sessions about held-out rows: their failures are none of training."""
        return self.guard.apart()

    # ---- plain methods: what reset and step are built on ----

    def next_prompts(self, count: int | None = None) -> list[Prompt]:
        """The next ``count`` prompts, or ``num_envs``, each tokenised once.

        Raises:
            ValueError: a prompt is too long and ``long_prompt`` is ``error``, or every prompt is too long.
        """
        return self._prompts.take(count or self.num_envs)

    def score(self, row: int, responses: Sequence[Tensor | Sequence[int]]) -> list[Reward | Failure]:
        """The reward of each response to one row, or why it has none.

        Args:
            row: index of the dataset row.
            responses: ids of each.

        Raises:
            ScoreError: too many responses failed (`grpo_rl.envs.guards.guard`).
        """
        data, texts = self.task.rows[row], self._decode_all(responses)
        if not plays_turns(self.task):
            return self.guard.score(data, texts, f"row {row}")
        prompt = self.task.prompt(data)
        dialogs = [[*prompt, {"role": "assistant", "content": text}] for text in texts]
        return self.guard.score_dialogs(data, dialogs, f"row {row}")

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends the servers of ``mcp``; calls that come later are refused."""
        close_servers(self._servers)
        super().close(raise_if_closed=raise_if_closed)

    def __del__(self) -> None:
        """Does nothing, where TorchRL's would close, and wait: the finalizer ends the servers."""

    def check_prompts(self) -> None:
        """Tokenises every row, so that a prompt that is too long is found before a model is loaded.

        Raises:
            ValueError: one is, and ``long_prompt`` is ``error``; or all are; or the chat template can't write a reply.
        """
        if self.max_turns > 1:
            check_reply(self.tokenizer, self.task.reply_role, tool_schemas(self.task.tools))
        self._prompts.check()

    def start_epoch(self, seed: int, epoch: int) -> None:
        """Shuffles the rows anew; group ids go on, as they are unique in the run."""
        self._prompts.start_epoch(seed, epoch)

    @property
    def members(self) -> Mapping[str, LLMEnv]:
        """The environments of a mixture's tasks by name; none where this is an environment of one task."""
        return {}

    def by_task(self, rows: Sequence[dict]) -> dict[str, list[int]]:
        """The indices of those of ``rows`` that are of each task of a mixture; empty where there is one task."""
        found: dict[str, list[int]] = {name: [] for name in self.members}
        for i, row in enumerate(rows if found else ()):
            found[str(self.task.name_of(row))].append(i)
        return found

    def metrics(self) -> dict[str, float]:
        """Counts that the environment has beside the rewards, over the whole run."""
        return self.task.counts() | (self._prompts.curriculum.metrics() if self._prompts.curriculum else {})

    def note(self, row: int, results: Sequence[Reward | Failure]) -> None:
        """Takes notice of the rewards of a group of training, which a curriculum counts."""
        self._prompts.note(row, results)

    @property
    def skipped(self) -> int:
        """Rows found too long and left out; each counts once, however many epochs pass."""
        return len(self._prompts.too_long)

    def encode(self, row: dict) -> list[int]:
        """Ids of a row's prompt, whether the row is the environment's own or held out."""
        return encode_rows(self.tokenizer, self.task, [row])[0]

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text that is judged, see :func:`~grpo_rl.envs.chat.decode_responses`."""
        return self._decode_all([ids])[0]

    def decode_prompt(self, ids: Tensor | Sequence[int]) -> str:
        """The text of a prompt, for people and logs: without special tokens."""
        return self.tokenizer.batch_decode([ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]

    def read_turn(self, ids: Tensor | Sequence[int], row: dict | None = None) -> tuple[str, list[dict[str, Any]]]:
        """The text of a turn of the policy, and its calls as OpenAI's ``tool_calls``, where the task has tools.

        Args:
            row: that the conversation is about; a mixture has its task read the turn.

        A turn at which the parser fails is text without calls; the first failure is logged.
        """
        turn = self.decode(ids)
        if self._tool_parser is not None:
            try:
                text, calls = self._tool_parser.parse(turn)
                if calls:
                    return text or "", checked_calls(calls)
            except Exception as error:  # untrusted text in the user's code: what it can't read is text
                self.guard.tell_once(
                    "parser", f"The parser of env.tool_parser failed, on {turn:.80}: {one_line(error)}"
                )
        return turn, []

    def encode_reply(self, reply: Messages, last: int, calls: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids that go behind a sampled response: the end of its turn, the reply, the beginning of the next turn.

        Args:
            last: the response's last id.
            calls: ``tool_calls`` of the response.
        """
        return encode_reply(self.tokenizer, reply, last, calls)

    def query(self, row: int) -> str:
        """The question of a row, for people and logs."""
        return self.task.prompt(self.task.rows[row])[-1]["content"]

    def gold(self, row: int) -> str | None:
        """The gold answer of a row, for people and logs."""
        return self.task.gold(self.task.rows[row])

    def get_extra_state(self) -> dict[str, Any]:
        """The data position and the counts of failures, which torch puts into ``state_dict()``."""
        counts = self.task.counts()
        return {**self._prompts.state(), **self.guard.counts, **({"counts": counts} if counts else {})}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Goes to a data position, as ``load_state_dict()`` asks for.

        Raises:
            ValueError: it is a position in other data.
        """
        self._prompts.restore(state)
        self.guard.restore(state)
        self.task.restore(state.get("counts", {}))

    def _decode_all(self, responses: Sequence[Tensor | Sequence[int]]) -> list[str]:
        return decode_responses(self.tokenizer, responses)

    # ---- TorchRL ----

    def _make_specs(self) -> None:
        batch: Any = self.batch_size
        prompt = Unbounded((-1,), dtype=torch.long)
        response = Bounded(0, len(self.tokenizer) - 1, (-1,), dtype=torch.long)
        self.observation_spec = self._ragged(  # pyrefly: ignore[bad-assignment]
            {
                keys.QUERY: NonTensor(shape=(), example_data="a question"),
                keys.TOKENS_PROMPT[0]: Composite({keys.TOKENS_PROMPT[1]: prompt}),
                keys.GROUP_ID: Unbounded((1,), dtype=torch.long),
                keys.ROW: Unbounded((1,), dtype=torch.long),
            }
        )
        self.action_spec = self._ragged({keys.TOKENS_RESPONSE[0]: Composite({keys.TOKENS_RESPONSE[1]: response})})  # pyrefly: ignore[bad-assignment]
        parts = Composite({name: Unbounded((*batch, 1)) for name in self.task.reward_parts}, shape=batch)
        self.reward_spec = Composite(  # pyrefly: ignore[bad-assignment]
            {keys.REWARD[-1]: Unbounded((*batch, 1)), keys.REWARD_PARTS[0]: parts}, shape=batch
        )

    def _ragged(self, row: dict) -> StackedComposite:
        """The spec of a lazily stacked batch, whose rows differ in length: one dense spec would ask to stack them."""
        return StackedComposite(*[Composite(row)] * self.batch_size[0], dim=0)

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros in the form of one step of a rollout; their rows are stacked as those of ``reset`` and ``step``."""
        return lazy_stack(list(super().fake_tensordict().unbind(0)))

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        if tensordict is not None and (mask := tensordict.get("_reset", None)) is not None and not mask.all():
            raise ValueError("a part of the batch can't be reset alone: a group's responses begin at the same time")
        rows = []
        self._dialogs: list[Dialog] = []
        for prompt in self.next_prompts():
            messages = self.task.prompt(self.task.rows[prompt.row])
            self._dialogs += [Dialog(list(messages)) for _ in range(self.repeats)]
            row = TensorDict(
                {
                    keys.QUERY: NonTensorData(prompt.query),  # pyrefly: ignore[bad-assignment]
                    keys.TOKENS_PROMPT: prompt.ids,
                    keys.GROUP_ID: torch.tensor([prompt.group_id]),
                    keys.ROW: torch.tensor([prompt.row]),
                }
            )
            # Shallow copies: the rows of a group share their tensors, and each gets a place for its own response.
            rows += [row.copy() for _ in range(self.repeats)]
        return lazy_stack(rows)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        responses = list(tensordict.unbind(0))
        judged: list[Reward | Messages] = []
        for start in range(0, len(responses), self.repeats):
            judged += self._judge(start, responses[start : start + self.repeats])
        rows = []
        for response, result, dialog in zip(responses, judged, self._dialogs, strict=True):
            row = response.select(*_OBSERVATION)
            reward = result if isinstance(result, Reward) else self._no_reward
            if not isinstance(result, Reward):
                last = int(response[keys.TOKENS_RESPONSE][-1])
                reply = torch.tensor(self.encode_reply(result, last, dialog.calls), dtype=torch.long)
                row[keys.TOKENS_PROMPT] = torch.cat([row[keys.TOKENS_PROMPT], response[keys.TOKENS_RESPONSE], reply])
            row[keys.REWARD[-1]] = torch.tensor([reward.total])
            for name in self.task.reward_parts:
                row[keys.REWARD_PARTS + (name,)] = torch.tensor([reward.parts.get(name, 0.0)])
            row["done"], row["terminated"] = (torch.tensor([isinstance(result, Reward)]) for _ in range(2))
            rows.append(row)
        return lazy_stack(rows)

    def _judge(self, first: int, responses: Sequence[TensorDictBase]) -> list[Reward | Messages]:
        """The rewards of the responses to one prompt, or what the task replies where the conversation goes on."""
        index = int(responses[0][keys.ROW])
        row = self.task.rows[index]
        turns = [self.read_turn(response[keys.TOKENS_RESPONSE], row) for response in responses]
        # A conversation that is over waits for the others; it had its reward.
        judged: list[Reward | Messages] = [self._no_reward] * len(responses)
        ended = []
        for k, (dialog, turn) in enumerate(zip(self._dialogs[first : first + len(responses)], turns, strict=True)):
            if dialog.over:
                continue
            dialog.say(*turn)
            if (reply := dialog.reply(self.task, row, self.max_turns)) is not None:
                dialog.hear(reply)
                judged[k] = reply
            else:
                ended.append(k)
        messages = [self._dialogs[first + k].messages for k in ended]
        for k, result in zip(ended, self.guard.score_dialogs(row, messages, f"row {index}"), strict=True):
            if isinstance(result, Failure):
                # A batch of TorchRL's has no place for a response without a reward; the project's own collectors have.
                raise ScoreError(result.message)
            judged[k] = result
        return judged

    @property
    def _no_reward(self) -> Reward:
        return Reward(dict.fromkeys(self.task.reward_parts, 0.0))

    def _set_seed(self, seed: int | None) -> None:
        """Begins the first epoch of ``seed``; group ids go on, as they are unique in the run."""
        if seed is not None:
            self.start_epoch(seed, 0)
