"""The check of rewards names the task of a mixture, and looks at that task's own deadline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from grpo_rl.checks import data
from grpo_rl.envs.base import LLMEnv, Reward, Task
from grpo_rl.envs.mixture import MixtureEnv
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings


class Pays(Task):
    """Pays one for anything but garbage."""

    rows, reward_parts = [{}], ("right",)

    def prompt(self, row):
        return [{"role": "user", "content": "?"}]

    def gold(self, row):
        return "gold"

    def score(self, row, response):
        return Reward({"right": float(response == "gold")})


def test_each_task_of_a_mixture_is_named_and_has_its_own_deadline(monkeypatch):
    monkeypatch.setattr(data, "env_of", lambda case: env)
    words: Any = range(8)  # nothing is tokenised here
    envs = {name: LLMEnv(Pays(), words, 2, 2, score_timeout_s=seconds) for name, seconds in {"a": 5, "b": 7}.items()}
    env = MixtureEnv(envs, {"a": 1, "b": 1}, 2, 2)
    found = list(data.rewards(SimpleNamespace(read=Settings.read(compose_config("grpo_gsm8k", [])))))
    assert [(f.kind, f.text.split(";")[0], f.text.split(" of ")[-1]) for f in found] == [
        ("OK", "a: gold earns 1, garbage earns 0", "5 s"),
        ("OK", "b: gold earns 1, garbage earns 0", "7 s"),
    ]
