"""The calculator's task as a taskset of verifiers."""

from grpo_rl.envs.as_taskset import taskset_of

Sums, SumsEnv = taskset_of("calculator")

__all__ = ["Sums", "SumsEnv"]
