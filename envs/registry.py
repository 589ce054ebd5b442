"""The tasks that ``env.dataset`` can name; a module is imported when its task is asked for."""

from __future__ import annotations

import importlib

from grpo_rl.envs.spec import TaskSpec

TASKS = {
    "gsm8k": "GSM8KEnv",
    "ifeval": "IFEvalEnv",
    "math": "MathEnv",
    "countdown": "CountdownEnv",
    "calculator": "CalculatorEnv",
    "search_qa": "SearchQAEnv",
    "prompt_response": "PromptResponseEnv",
}
"""The module of each task, and the name of its :class:`TaskSpec` there."""


def task_spec(name: str) -> TaskSpec:
    """The task and the loader of ``env.dataset=name``.

    >>> task_spec("gsm8k").load_rows("quickstart-test")[0]["answer"].splitlines()[-1]
    '#### ...'
    """
    return getattr(importlib.import_module(f"grpo_rl.envs.{name}"), TASKS[name])
