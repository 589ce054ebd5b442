"""Converted: a config of ours that was made of another trainer's, and the file that it is written to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_rl.storage.yaml_text import read_yaml


@dataclass
class Converted:
    """A config of ours, and how it differs from TRL's.

    Args:
        config: nested settings; only what is not left to the defaults of config/grpo.yaml.
        task: the value of ``env.dataset``.
        differences: a line each for what has no counterpart, or another meaning; begins with TRL's field.
    """

    config: dict[str, Any] = field(default_factory=dict)
    task: str = "prompt_response"
    differences: list[str] = field(default_factory=list)
    start: str = "grpo-rl train"
    """The command that trains with this config, without its options."""

    def put(self, key: str, value: Any) -> None:
        """Sets ``section.key`` to a value."""
        *path, last = key.split(".")
        section = self.config
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value

    def differs(self, name: str, value: Any, why: str) -> None:
        """Adds a difference."""
        text, name = f"{value!r}", name if name.isidentifier() else repr(name)  # the line is a comment of one line
        self.differences.append(f"{name}={text if len(text) <= 60 else text[:57] + '...'}: {why}")

    def as_yaml(self, source: str) -> str:
        """The config as a file for ``--config-dir . --config-name NAME``, the differences as its first comment.

        Raises:
            ValueError: a value would be more than itself in that file, or none.
        """
        # Its texts may be a stranger's: a line break would end the comment, and Hydra resolves ${...}.
        lines = [" ".join(line.split()) for line in (source, *(self.differences or ["none"]))]
        notes = "".join(f"#   {line}\n" for line in lines[1:])
        head = {"defaults": ["grpo", {"env": self.task}, "_self_"]}
        try:
            parts = [
                yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=110) for part in (head, self.config)
            ]
        except yaml.YAMLError as error:
            raise ValueError(f"{source} has a value that YAML does not hold: {error}") from None
        settings = "".join(parts)
        text = f"# Converted from TRL's {lines[0]} by grpo-rl from-trl. Differences:\n{notes}{settings}"
        if "${" in str(self.config) or read_yaml(text) != read_yaml(settings):
            raise ValueError(f"{source} has a text that would be more than text in YAML, such as ${{...}}; take it out")
        return text
