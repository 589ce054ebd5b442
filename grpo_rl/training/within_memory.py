"""The micro-batches of optimizer steps, which begin again with smaller ones where memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict

from grpo_rl.data.batching import MicroBatching, groups_to_score, micro_batches_of
from grpo_rl.data.group import Group
from grpo_rl.engines.base import OutOfMemoryError, is_out_of_memory
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.training.micro_batches import scored_micro_batches

REMEDY = (
    "lower sampling.max_new_tokens or env.repeats, set train_model.gradient_checkpointing=true, or give the engine "
    "less (inference_model.gpu_memory_utilization)"
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
        self.batching = batching
        self._policy, self._discard = policy, discard
        self._why = ""

    def micro_batches(
        self, groups: Sequence[Group], began_again: Callable[[str], None]
    ) -> Iterator[AbstractContextManager[TensorDict]]:
        """The optimizer step's micro-batches, scored, each as a block that computes its loss and goes back from it.

        Inside the block the gradient goes back to the tokens' ``log_prob`` and ``entropy``; it goes through the model
        at the end of the block, so that no variable of the caller holds on to the memory that is lacking.

        Args:
            began_again: is told, in a sentence, that what came of the step until now does not count.

        Raises:
            OutOfMemoryError: a group alone does not fit, or processes would have to begin again within a pass.
        """
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
            peers = self._policy.peers
            if not (lacking := [one for one in (peers.gather(found) if peers else [found]) if one]):
                return
            del scored  # what it holds of the pass that broke off
            self._discard()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
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
            self._why = " ".join(str(error).split())[:300] or type(error).__name__

    def _failed(self, groups: Sequence[Group], at: int) -> _RanOut:
        """The micro-batch that did not fit."""
        peers, batching = self._policy.peers, self.batching
        if getattr(peers, "in_step", False):
            raise OutOfMemoryError(
                f"memory ran out ({self._why}), and with train_model.parallel=fsdp ranks wait for each other within a "
                f"pass, so the step can't begin again; set train.micro_batch_tokens={max(1, batching.max_tokens // 2)}"
            )
        to_score = groups_to_score(groups, batching.skip_zero_advantage, batching.mask_truncated)
        micro = micro_batches_of(peers, to_score, batching.max_tokens, batching.count)[0][at]
        return _RanOut([group.group_id for group in micro], sum(group.num_tokens for group in micro), self._why)

    def _shrink(self, lacking: Sequence[_RanOut]) -> str:
        """Halves the size; says so."""
        for micro in lacking:
            if len(micro.group_ids) == 1:
                raise OutOfMemoryError(
                    f"group {micro.group_ids[0]} with its {micro.tokens} tokens does not fit into memory alone "
                    f"({micro.why}); {REMEDY}"
                )
        smallest = min(lacking, key=lambda micro: micro.tokens)
        size = max(1, min(smallest.tokens, self.batching.max_tokens) // 2)
        self.batching = replace(self.batching, max_tokens=size, count=None)
        return (
            f"Memory ran out with a micro-batch of {len(smallest.group_ids)} groups and {smallest.tokens} tokens "
            f"({smallest.why}); the optimizer step begins again, and the run goes on, with micro-batches of {size} "
            f"tokens. The gradient is the same; train.micro_batch_tokens={size} saves the attempt"
        )
