"""LLMEnv: the TorchRL environment around a task."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from grpo_rl.by_name import one_line
from grpo_rl.data import keys
from grpo_rl.envs.chat import Dialog, check_reply, decode_responses, encode_reply, encode_rows
from grpo_rl.envs.curriculum import Curriculum, read_bounds
from grpo_rl.envs.guards.guard import Failure, ScoreError, ScoreGuard
from grpo_rl.envs.prompts import Prompt, PromptSource
from grpo_rl.envs.rewards.combined import token_counter, with_rewards
from grpo_rl.envs.rows import DONE, Row, dialog_of, led_to, row_specs, stacked
from grpo_rl.envs.task import RESERVED_PARTS, SCORES, Messages, Reward, Task, Unjudgeable, plays_turns
from grpo_rl.envs.tools.functions import FunctionTask
from grpo_rl.envs.tools.mcp import Server, close_servers, with_mcp
from grpo_rl.envs.tools.schemas import checked_calls, tool_schemas

__all__ = [
    "Failure", "LLMEnv", "Messages", "Prompt", "Reward", "ScoreError", "ScoreGuard", "Task", "Unjudgeable",
]  # fmt: skip


class LLMEnv(EnvBase):
    """A batch of ``num_envs`` prompts with ``repeats`` responses each; the responses to one prompt are adjacent.

    ``reset`` takes the next rows of the epoch's seeded shuffle; ``step`` scores the responses and ends the episode.
    If the task replies, the next step's prompt is the whole conversation, and a row's episode ends with it.

    The environment keeps nothing of a conversation: each row holds it (`grpo_rl.data.keys`). So ``step``
    takes any rows, those of one group together if the task scores groups, also from several threads at once. Replies of
    the rows of one step are computed at the same time, each under the deadline of scorers; a row whose reply or scorer
    fails is over, with :data:`~grpo_rl.data.keys.FAILED` set and NaN as its reward.

    ``state_dict()`` holds the data position as JSON-able numbers: a restored environment gives the same next prompts.

    Args:
        tokenizer: of the policy. Without a chat template, a prompt is its messages' contents.
        repeats: the group size G of ``reset`` and ``step``; a collector has its own.
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
        curriculum: which rows are drawn, by their pass rates, see `grpo_rl.envs.curriculum.Bounds`; empty: all.

    Raises:
        ValueError: there are no rows or no rewards; nothing runs a tool, or reads calls to it.
    """

    members: Mapping[str, LLMEnv] = {}
    """The environments of a mixture's tasks by name; none where this is an environment of one task."""

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
        if getattr(type(task), "call", None) is FunctionTask.call and not all(map(callable, task.tools)):
            raise ValueError(f"{type(task).__name__} has a JSON schema as a tool, which nothing runs; override call")
        self._servers: list[Server] = []
        # Also of an environment that is forgotten without `close`, or that can't be built. The thread that collects the
        # garbage must not be held up; at the program's end the servers end themselves, and are waited for.
        weakref.finalize(self, close_servers, self._servers, wait=False).atexit = False  # pyrefly: ignore[missing-attribute]
        task = with_mcp(task, mcp, score_timeout_s, self._servers)
        task = with_rewards(task, rewards, token_counter(tokenizer))
        if clash := [part for part in task.reward_parts if part in RESERVED_PARTS or part.startswith(SCORES)]:
            raise ValueError(f"{type(task).__name__} has reward parts {sorted(clash)}, which are metrics; rename them")
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
        self._reading = threading.Lock()
        specs = row_specs(num_envs * repeats, len(tokenizer), task.reward_parts)
        for name, spec in zip(("observation_spec", "action_spec", "reward_spec", "done_spec"), specs, strict=True):
            setattr(self, name, spec)

    @cached_property
    def held_out_guard(self) -> ScoreGuard:
        """The guard of agents' sessions about held-out rows: their failures are none of training."""
        return self.guard.apart()

    def next_prompts(self, count: int | None = None) -> list[Prompt]:
        """The next ``count`` prompts, or ``num_envs``, each tokenised once: what :meth:`reset` begins with.

        Raises:
            ValueError: a prompt is too long and ``long_prompt`` is ``error``, or every prompt is too long.
        """
        return self._prompts.take(count or self.num_envs)

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

    def by_task(self, rows: Sequence[dict]) -> dict[str, list[int]]:
        """The indices of those of ``rows`` that are of each task of a mixture; empty where there is one task."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Counts of the task and the curriculum over the whole run."""
        return self.task.counts() | (self._prompts.curriculum.metrics() if self._prompts.curriculum else {})

    def note(self, row: int, results: Sequence[Reward | Failure]) -> None:
        """Passes the rewards of a training group to the curriculum, if there is one."""
        self._prompts.note(row, results)

    def turns_of(self, row: dict) -> int:
        """The most turns of the policy in a conversation about a row."""
        return self.max_turns

    @property
    def skipped(self) -> int:
        """Rows found too long and left out; each counts once, however many epochs pass."""
        return len(self._prompts.too_long)

    def encode(self, row: dict) -> list[int]:
        """Ids of a row's prompt, whether the row is the environment's own or held out."""
        return encode_rows(self.tokenizer, self.task, [row])[0]

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text that is judged, see :func:`~grpo_rl.envs.chat.decode_responses`."""
        return decode_responses(self.tokenizer, [ids])[0]

    def decode_prompt(self, ids: Tensor | Sequence[int]) -> str:
        """The text of a prompt, for people and logs: without special tokens."""
        return self.tokenizer.batch_decode([ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]

    def read_turn(self, text: str, row: dict) -> tuple[str, list[dict[str, Any]]]:
        """The text of a turn of the policy, and its calls as OpenAI's ``tool_calls``, where the row's task has tools.

        A turn at which the parser fails is text without calls; the first failure is logged.
        """
        if self._tool_parser is not None and plays_turns(self.task):
            try:
                with self._reading:  # a parser may hold the state of a turn
                    said, calls = self._tool_parser.parse(text)
                if calls:
                    return said or "", checked_calls(calls)
            except Exception as error:  # untrusted text in the user's code: what it can't read is text
                failed = f"The parser of env.tool_parser failed, on {text:.80}: {one_line(error)}"
                self.guard.tell_once("parser", failed)
        return text, []

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
        """Goes to a data position, as ``load_state_dict()`` asks for; a ValueError where it is one in other data."""
        self._prompts.restore(state)
        self.guard.restore(state)
        self.task.restore(state.get("counts", {}))

    # ---- TorchRL ----

    def fake_tensordict(self) -> TensorDictBase:
        """Zeros in the form of one step of a rollout; their rows are stacked as those of ``reset`` and ``step``."""
        return lazy_stack(list(super().fake_tensordict().unbind(0)))

    def _assert_tensordict_shape(self, tensordict: TensorDictBase) -> None:
        """Takes any rows, where TorchRL's asks for the whole batch."""

    @classmethod
    def _complete_done(cls, done_spec: Composite, data: TensorDictBase) -> TensorDictBase:
        return data  # complete already, whatever the number of rows

    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        return next_tensordict_out  # likewise

    @override
    def _reset(self, tensordict: TensorDictBase | None = None, **which: Any) -> TensorDictBase:
        if tensordict is not None and (mask := tensordict.get("_reset", None)) is not None and not mask.all():
            raise ValueError("a part of the batch can't be reset alone: a group's responses begin at the same time")
        return stacked(self.reset_rows(**which))

    def reset_rows(
        self,
        *,
        prompts: int | Sequence[Prompt] | None = None,
        repeats: int | None = None,
        rows: Sequence[dict] | None = None,
    ) -> list[Row]:
        """The beginning of conversations, as dicts: ``reset`` without the stacking of rows.

        Args:
            prompts: the number of next prompts, ``num_envs`` if None; or prompts that were taken before.
            repeats: rows of each; those of the environment if None.
            rows: held-out rows in the place of next prompts; these are numbered by themselves.
        """
        if rows is None:
            taken = self.next_prompts(prompts) if prompts is None or isinstance(prompts, int) else prompts
            begun = [(prompt, self.task.rows[prompt.row], f"row {prompt.row}") for prompt in taken]
        else:
            begun = [
                (Prompt(i, i, "", torch.tensor(self.encode(row))), row, f"held-out row {i}")
                for i, row in enumerate(rows)
            ]
        beginnings: list[Row] = []
        for prompt, row, where in begun:
            beginning = {
                keys.QUERY: prompt.query,
                keys.HISTORY: Dialog(self.task.prompt(row), row, where, self.turns_of(row)),
                keys.TOKENS_PROMPT: prompt.ids,
                keys.GROUP_ID: prompt.group_id,
                keys.ROW: prompt.row,
                **dict.fromkeys((keys.FAILED, *DONE), False),
            }
            # Shallow copies: the rows of a group share their tensors, and each gets a place for its own response.
            beginnings += [beginning.copy() for _ in range(repeats or self.repeats)]
        return beginnings

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return stacked(self.step_rows(list(tensordict.unbind(0))))

    def step_rows(self, rows: Sequence[Row]) -> list[Row]:
        """The result of each row's step, as dicts: ``step`` without the stacking of rows and TorchRL's checks."""
        # A conversation that is over waits for the others; it had its reward.
        open_rows = [i for i, row in enumerate(rows) if not dialog_of(row).over]
        texts = decode_responses(self.tokenizer, [rows[i][keys.TOKENS_RESPONSE] for i in open_rows])
        dialogs: dict[int, Dialog] = {}
        for i, text in zip(open_rows, texts, strict=True):
            before = dialog_of(rows[i])
            dialogs[i] = before.said(*self.read_turn(text, before.row))
        cut = {i for i, row in enumerate(rows) if bool(row.get(keys.TRUNCATED if i in dialogs else "truncated", False))}
        # A turn that was cut has no end: a reply would go into the middle of a sentence.
        asked = [i for i in open_rows if i not in cut and dialogs[i].turns < dialogs[i].max_turns]
        prompts: dict[int, Tensor] = {}
        replies = self.guard.replies([partial(self._reply, rows[i], dialogs[i]) for i in asked]) if asked else []
        for i, reply in zip(asked, replies, strict=True):
            if isinstance(reply, Exception):
                dialogs[i] = dialogs[i].ended(self._failure(dialogs[i], reply))
            elif reply is not None and len(reply[1]) < float(rows[i].get(keys.MAX_TOKENS, math.inf)):
                dialogs[i], prompts[i] = dialogs[i].heard(reply[0]), reply[1]
            elif reply is not None:
                cut.add(i)  # the policy never reads the reply
        self._judge(rows, dialogs, [i for i in open_rows if i not in prompts])
        return led_to(rows, dialogs, cut, prompts, self.task.reward_parts)

    def _reply(self, row: Row, dialog: Dialog) -> tuple[Messages, Tensor] | None:
        """The task's reply, and the ids of the conversation with it; None where the conversation is over."""
        reply = dialog.reply_of(self.task)
        if reply is None:
            return None
        response = row[keys.TOKENS_RESPONSE]
        ids = encode_reply(self.tokenizer, reply, int(response[-1]) if len(response) else None, dialog.calls)
        # What was sampled is never tokenised again.
        return reply, torch.cat([row[keys.TOKENS_PROMPT], response, torch.tensor(ids, dtype=torch.long)])

    def _failure(self, dialog: Dialog, error: Exception) -> Failure:
        message = f"{type(self.task).__name__}.reply failed on {dialog.where}, turn {dialog.turns}: {one_line(error)}"
        return Failure("timeout" if isinstance(error, TimeoutError) else "error", message)

    def _judge(self, rows: Sequence[Row], dialogs: dict[int, Dialog], ended: Sequence[int]) -> None:
        groups: dict[int, list[int]] = {}
        for i in ended:
            groups.setdefault(int(rows[i][keys.GROUP_ID]), []).append(i)
        for members in groups.values():
            first = dialogs[members[0]]
            self.guard.record([dialogs[i].verdict for i in members if dialogs[i].verdict], first.row)
            whole = [i for i in members if not dialogs[i].verdict]
            if whole:
                results = self.guard.score_dialogs(first.row, [dialogs[i].messages for i in whole], first.where)
                dialogs |= {i: dialogs[i].ended(result) for i, result in zip(whole, results, strict=True)}

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.start_epoch(seed, 0)
