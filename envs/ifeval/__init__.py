"""IFEval: instructions whose following can be checked, such as "at least 300 words" or "no commas"."""

from grpo_rl.envs.ifeval.task import IFEval, IFEvalEnv, load_rows, split_of

__all__ = ["IFEval", "IFEvalEnv", "load_rows", "split_of"]
