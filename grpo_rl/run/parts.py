"""CommonParts: what every run trains with, and the state of it that a checkpoint holds; Parts: those of GRPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_rl.collectors.base import Collector
from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.engines.base import Sampler
from grpo_rl.envs.base import LLMEnv
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.policy import Reference, TrainPolicy
from grpo_rl.training import checkpoint
from grpo_rl.training.micro_batches import WithinMemory
from grpo_rl.training.optimizer import PolicyOptimizer
from grpo_rl.training.schedules import Schedules
from grpo_rl.weights.push import WeightSync


@dataclass(kw_only=True)
class CommonParts:
    """The parts that every run trains with, and the state of them that a checkpoint holds.

    Args:
        env: the rows, and their texts: an `LLMEnv`, of SFT `Demonstrations`.
        engine: samples; of SFT none.
        loss: a `GRPOLoss` or `SFTLoss`.
        within_memory: how groups are split into micro-batches: the one owner of their size, which shrinks if memory
            runs out.
    """

    env: Any
    tokenizer: PreTrainedTokenizerBase
    policy: TrainPolicy
    optimizer: PolicyOptimizer
    engine: Any
    weights: WeightSync
    collector: Collector
    schedules: Schedules
    loss: Any
    within_memory: WithinMemory

    def begin(self, state: Mapping[str, Any] | None, seed: int) -> None:
        """Restores a checkpoint's state, or seeds a new run; :meth:`begin_collecting` follows the first push.

        Raises:
            ValueError: the checkpoint's adapters were trained on another base.
        """
        self._collected = None
        if state is None:
            # After the parts are built: building them draws random numbers, too.
            checkpoint.seed_rng(seed)
            return
        self.weights.check_base(state["base"])  # a checkpoint of adapters does not hold their base
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedules.restore(state["schedules"])
        self.within_memory.restore(state["within_memory"])
        if state.get("engine") and hasattr(self.engine, "restore"):
            self.engine.restore(state["engine"])
        if self.engine is not None:  # SFT pushes nothing, so that its version stays
            self.weights.restore(state["version"])
        checkpoint.set_rng_state(state["rng"])
        self._collected = state["collector"]

    def begin_collecting(self) -> None:
        """Restores the collector from the checkpoint."""
        if self._collected:
            self.collector.load_state_dict(self._collected)
            self._collected = None

    def state(self) -> dict[str, Any]:
        """The state of the parts that a checkpoint holds."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedules": self.schedules.state(),
            "within_memory": self.within_memory.state(),
            "engine": self.engine.state() if hasattr(self.engine, "state") else None,
            "collector": self.collector.state_dict(),
            "version": self.weights.version,
            "base": self.weights.base_fingerprints(),
            "rng": checkpoint.rng_state(),
        }


@dataclass(kw_only=True)
class Parts(CommonParts):
    """The parts that a run of GRPO trains with.

    Args:
        reference: None where no KL term reads it.
        needs_old_log_probs: whether the policy scores each collection before training on it.
    """

    env: LLMEnv
    engine: Sampler
    loss: GRPOLoss
    reference: Reference | None
    compute_advantages: AdvantageEstimator
    buffer: GroupBuffer
    needs_old_log_probs: bool
