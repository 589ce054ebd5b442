"""Parts: what a run of GRPO trains with."""

from dataclasses import dataclass

from grpo_rl.data.advantages import AdvantageEstimator
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.engines.base import Sampler
from grpo_rl.envs.base import LLMEnv
from grpo_rl.losses.grpo import GRPOLoss
from grpo_rl.policies.policy import ReferencePolicy
from grpo_rl.run.common_parts import CommonParts


@dataclass(kw_only=True)
class Parts(CommonParts):
    """The parts that a run of GRPO trains with.

    Args:
        reference: None where no KL term reads it.
        needs_old_log_probs: whether the policy scores each collection before training on it.
    """

    env: LLMEnv  # pyrefly: ignore[bad-override-mutable-attribute]
    engine: Sampler
    loss: GRPOLoss  # pyrefly: ignore[bad-override-mutable-attribute]
    reference: ReferencePolicy | None
    compute_advantages: AdvantageEstimator
    buffer: GroupBuffer
    needs_old_log_probs: bool
