"""Rewards for any task: Open-R1's and DAPO's by name and weight, and functions of one's own.

Each is a pure function, :data:`REWARDS` names them, :func:`with_rewards` adds them to a task.
"""

from grpo_rl.envs.rewards.combined import WithRewards, token_counter, with_rewards
from grpo_rl.envs.rewards.functions import RewardFunction, RewardFunctionError
from grpo_rl.envs.rewards.registry import REWARDS

__all__ = ["REWARDS", "RewardFunction", "RewardFunctionError", "WithRewards", "token_counter", "with_rewards"]
