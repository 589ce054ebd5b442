"""The micro-batches of optimizer steps, which begin again with smaller ones where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from grpo_rl.data.batching import MicroBatching, groups_to_score, micro_batches_of
from grpo_rl.data.group import Group
from grpo_rl.engines.base import OutOfMemoryError, free_memory, is_out_of_memory, reason
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.policies.router_record import router_record
from grpo_rl.training.checkpoint import rng_state, set_rng_state
from grpo_rl.training.micro_batches import scored_micro_batches

REMEDY = (
    "set train_model.gradient_checkpointing=true or give the engine less (inference_model.gpu_memory_utilization); a "
    "new run may also have a lower sampling.max_new_tokens or env.repeats"
)


@dataclass(frozen=True)
class _RanOut:
    """A micro-batch that did not fit: the ids and the tokens of its groups, and what torch said."""

    group_ids: list[int]
    tokens: int
    why: str


class WithinMemory:
    """Splits optimizer steps into micro-batches, and begins a step again with smaller ones where memory runs out.

    The smaller size is kept for the steps that follow. A step's gradient is then that of the smaller split, to the
    bit: what had been added up is thrown away, and each token is weighted by the counts of the whole step. Other
    processes that train the same policy (``ddp``) begin again too; with ``fsdp``, where they wait for each other within
    a pass, the run ends.

    Args:
        batching: as configured; :attr:`batching` is what is used now.
        discard: throws away the gradients that the step has added up.
    """

    def __init__(self, policy: TrainPolicy, batching: MicroBatching, discard: Callable[[], None]) -> None:
        self.batching = self._configured = batching
        self._policy, self._discard = policy, discard
        self._why = ""

    @property
    def max_tokens(self) -> int:
        """The tokens that are scored at a time: as configured, or fewer once memory has run out."""
        return min(self._configured.max_tokens, self.batching.max_tokens)

    def state(self) -> dict[str, Any]:
        """The sizes as configured and as used now, for a checkpoint."""
        return {name: [of.max_tokens, of.count] for name, of in (("set", self._configured), ("used", self.batching))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with a checkpoint's sizes, unless others have been configured since."""
        if state["set"] == [self._configured.max_tokens, self._configured.count]:
            max_tokens, count = state["used"]
            self.batching = replace(self.batching, max_tokens=max_tokens, count=count)

    def micro_batches(
        self, groups: Sequence[Group], began_again: Callable[[str], None]
    ) -> Iterator[AbstractContextManager[TensorDict]]:
        """The optimizer step's micro-batches, scored, each as a block that computes its loss and goes back from it.

        Inside the block the gradient goes back to the tokens' ``log_prob`` and ``entropy``; it goes through the model
        at the end of the block, so that no variable of the caller holds on to the memory that is lacking.

        Args:
            began_again: called with a sentence that says that what came of the step until now does not count.

        Raises:
            OutOfMemoryError: a group alone does not fit, or processes would have to begin again within a pass.
        """
        record = router_record(getattr(self._policy, "model", None))
        routed, random = record.sums() if record else {}, rng_state()
        while True:
            self._why, at = "", -1
            scored = scored_micro_batches(self._policy, groups, self.batching)
            while not self._why:
                at += 1
                block = None
                with self._watched():
                    tokens = next(scored, None)
                    if tokens is None:
                        break
                    block = self._given(tokens)
                    del tokens
                if block:
                    yield block
                del block
            found = self._failed(groups, at) if self._why else None
            del scored  # what it holds of the pass that broke off
            if found:  # before the ranks tell each other, which takes memory, too
                self._discard()
                free_memory()
            peers = self._policy.peers
            if not (lacking := [one for one in (peers.gather(found) if peers else [found]) if one]):
                return
            self._discard()
            if record:
                record.put_back(routed)
            set_rng_state(random)  # dropout's masks are those of a step that began with the smaller ones
            began_again(self._shrink(lacking))

    @contextmanager
    def _given(self, tokens: TensorDict) -> Iterator[TensorDict]:
        outputs = {name: tokens[name] for name in ("log_prob", "entropy") if tokens[name].requires_grad}
        leaves = {name: output.detach().requires_grad_() for name, output in outputs.items()}
        with self._watched():
            yield tokens.update(leaves)
            reached = [name for name, leaf in leaves.items() if leaf.grad is not None]
            if reached:
                torch.autograd.backward([outputs[name] for name in reached], [leaves[name].grad for name in reached])

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes that memory ran out, and lets the code behind the block go on."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._why = reason(error)

    def _failed(self, groups: Sequence[Group], at: int) -> _RanOut:
        """The micro-batch that did not fit."""
        peers, batching = self._policy.peers, self.batching
        to_score = groups_to_score(groups, batching.skip_zero_advantage, batching.mask_truncated)
        micro = micro_batches_of(peers, to_score, batching.max_tokens, batching.count)[0][at]
        found = _RanOut([group.group_id for group in micro], sum(group.num_tokens for group in micro), self._why)
        if getattr(peers, "in_step", False):
            raise OutOfMemoryError(
                f"memory ran out ({self._why}), and with train_model.parallel=fsdp ranks wait for each other within a "
                f"pass, so the step can't begin again; set {self._setting(self._half(found))}"
            )
        return found

    def _half(self, micro: _RanOut) -> int:
        tokens = micro.tokens if self.batching.count else min(micro.tokens, self.batching.max_tokens)
        return max(1, tokens // 2)

    def _setting(self, size: int) -> str:
        """The settings of this size; a number of micro-batches would count instead of it."""
        given = self._configured.count is not None
        return f"train.micro_batch_tokens={size}{' and train.gradient_accumulation_steps=null' if given else ''}"

    def _shrink(self, lacking: Sequence[_RanOut]) -> str:
        """The sentence that tells of the new size, half of the smallest that did not fit."""
        for micro in lacking:
            if len(micro.group_ids) == 1:
                raise OutOfMemoryError(
                    f"group {micro.group_ids[0]} with its {micro.tokens} tokens does not fit into memory alone "
                    f"({micro.why}); {REMEDY}"
                )
        smallest = min(lacking, key=lambda micro: micro.tokens)
        size = self._half(smallest)
        self.batching = replace(self.batching, max_tokens=size, count=None)
        return (
            f"Memory ran out with a micro-batch of {len(smallest.group_ids)} groups and {smallest.tokens} tokens "
            f"({smallest.why}); the optimizer step begins again, and the run goes on, with micro-batches of {size} "
            f"tokens. The gradient is the same; {self._setting(size)} saves the attempt"
        )
