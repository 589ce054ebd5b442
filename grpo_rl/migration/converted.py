"""Converted: a config of ours that was made of another trainer's, and the file that it is written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_rl.storage.masking import shown


@dataclass
class Converted:
    """A config of ours, and how it differs from TRL's.

    Args:
        fields: TRL's, with its defaults; ``made[name]`` is one of them, or None.
        config: nested settings; only what is not left to the defaults of config/grpo.yaml.
        task: the value of ``env.dataset``.
        differences: a line each for what has no counterpart, or another meaning; begins with TRL's field.
        start: the command that trains with this config, without its options.
    """

    fields: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    task: str = "prompt_response"
    differences: list[str] = field(default_factory=list)
    start: str = "grpo-rl train"

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def get(self, name: str, default: Any) -> Any:
        return self.fields.get(name, default)

    @property
    def evaluates(self) -> bool:
        return self.get("eval_strategy", "no") != "no"

    def put(self, values: Mapping[str, Any]) -> None:
        """Gives settings, by their dotted names, these values."""
        for key, value in values.items():
            *sections, name = key.split(".")
            place = self.config
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value

    def differs(self, name: str, why: str, value: Any = ...) -> None:
        """Adds a difference: one line without secrets, and without escape sequences."""
        text = f"{self[name] if value is ... else value!r}"
        text = shown(f"{name}={text if len(text) <= 60 else text[:57] + '...'}")
        self.differences.append(" ".join(f"{text}: {shown(why)}".split()))

    def as_yaml(self, source: str) -> str:
        """The config as a file for ``--config-dir . --config-name NAME``, the differences as its first comment.

        Raises:
            ValueError: a text of it would be resolved by Hydra, or a value is none of YAML's.
        """
        parts = ({"defaults": ["grpo", {"env": self.task}, "_self_"]}, self.config)
        try:
            settings = "".join(yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=110) for part in parts)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{source}: {error}") from None
        if "${" in str(self.config):
            raise ValueError(f"{source} has ${{ in a text, which Hydra would resolve; take it out")
        lines = [f"Converted from TRL's {source} by grpo-rl from-trl. Differences:"]
        lines += [f"  {line}" for line in self.differences or ["none"]]
        # They quote untrusted text: a line break would end the comment.
        comment = "".join(f"# {''.join(c if c.isprintable() else ' ' for c in line)}\n" for line in lines)
        return comment + settings
