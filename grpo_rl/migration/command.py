"""``grpo-rl from-trl``: writes the config that trains as a GRPO config of TRL does, and names every difference."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.migration.from_trl import convert
from grpo_rl.migration.trl_config import read_trl


def add_from_trl(parser: argparse.ArgumentParser) -> None:
    """Converts a GRPO config of TRL (YAML, JSON, or a Python script, which is not run) into one for
    grpo-rl train --config-dir . --config-name NAME, and names every difference.
    """
    parser.add_argument("config", type=Path, metavar="FILE", help="TRL's config, or a script with GRPOConfig(...)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the YAML file to write (NAME_grpo_rl.yaml)")
    parser.add_argument("--processes", type=int, metavar="N", help="TRL's training processes (its num_processes, or 1)")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of the training data, for num_train_epochs")
    parser.add_argument(
        "--rewards",
        default="",
        metavar="A,B",
        help="rewards by name, or module:function, instead of those that FILE names",
    )
    parser.set_defaults(run_command=_run)


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ValueError(f"from-trl takes no overrides such as {overrides[0]}; give them to grpo-rl train")
    fields, unknown = read_trl(options.config)
    rewards = [name for name in options.rewards.split(",") if name]
    made = convert(fields, processes=options.processes, rows=options.rows, rewards=rewards)
    if rewards:
        unknown = [line for line in unknown if not line.startswith("reward_funcs")]
    made.differences[:0] = unknown
    output = options.output or Path(f"{options.config.stem}_grpo_rl.yaml")
    if output.exists():
        raise ValueError(f"{output} exists; give another --output")
    output.write_text(made.as_yaml(options.config.name), encoding="utf-8")
    print(f"Differences ({len(made.differences)}):")
    for line in made.differences or ["none"]:
        print(f"  {line}")
    print(f"Written: {output}. Next: {made.start} --config-dir {output.parent} --config-name {output.stem}")
    return 0
