"""The command `grpo-rl`: training, and tools around it. A command's code is imported only when it runs."""

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from grpo_rl import __version__
from grpo_rl.storage.masking import replace_unwritable, shown

TRAIN = "train a model, by Hydra's options and overrides; --async: async mode; --sft: imitate the data's responses"
COMMANDS = {
    "batches": ("planner.commands", "draw how prompts, responses, optimizer steps and micro-batches fit together"),
    "plan": ("planner.commands", "show a config's requirements of a cluster: memory and seconds, by role and device"),
    "check-model": ("checks.commands", "check whether a model can be trained here, line by line, with remedies"),
    "eval": ("evaluation.command", "evaluate a model or an endpoint on held-out rows, or compare two"),
    "serve-policy": ("serving.command", "serve a model to an agent by OpenAI's API on loopback, without training"),
    "doctor": ("checks.commands", "check a run's requirements in two minutes, here or on every node of a Ray cluster"),
    "from-trl": ("migration.command", "convert a GRPO config of TRL, and list the differences"),
    "status": ("run.status", "show whether a run is alive, its progress, and which of its waits were late"),
    "replay": ("replay.command", "recompute a step of a run under another loss"),
    "report": ("report.command", "write the page of a run or a comparison, or serve it live; --demo shows one"),
    "send": ("assembly.send", "send a run's metrics and responses to its loggers again"),
    "export": ("cli", "write the model of a checkpoint as a folder"),
    "push-to-hub": ("run.push", "upload the model of a finished run to the Hugging Face hub"),
}
"""The module whose ``add_<command>``, with underscores for dashes, declares a command's options, and has its
description as docstring; its help. Neither help nor a usage error waits for torch: commands import it behind these."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {shown(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default ``sys.argv``, and returns its exit code."""
    replace_unwritable()
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:  # its options are Hydra's, which argparse can't pass on
        return _train(arguments[1:])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        from grpo_rl.section import unknown

        print(f"error: {unknown('command', arguments[0], ['train', *COMMANDS])}", file=sys.stderr)
        return 2
    parser = _Parser("grpo-rl", description="Trains language models with GRPO, and tools around that.")
    parser.add_argument("--version", action="version", version=f"grpo-rl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser("train", help=TRAIN)
    for name, (module, help_line) in COMMANDS.items():
        command = commands.add_parser(name, help=help_line)
        if name in arguments:
            declare = getattr(importlib.import_module(f"grpo_rl.{module}"), f"add_{name.replace('-', '_')}")
            command.description = declare.__doc__
            declare(command)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    # Overrides may stand anywhere between the options, which argparse's own positionals may not.
    options, overrides = parser.parse_known_args(arguments)
    if invalid := [word for word in overrides if word.startswith("-") or "=" not in word.lstrip("~")]:
        parser.error(f"{invalid[0]!r} is neither an option nor an override such as env.repeats=8")
    takes = len(inspect.signature(options.run_command).parameters) > 1
    if overrides and not takes:
        parser.error(f"{arguments[0]} takes no overrides such as {overrides[0]}")
    try:
        return options.run_command(options, overrides) if takes else options.run_command(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(shown(str(error)).split())}", file=sys.stderr)
        return 2


def _train(arguments: Sequence[str]) -> int:
    """Runs sota/grpo.py, or the script of an option in `MODES`, with all other arguments."""
    from grpo_rl.settings.compose import MODES

    chosen = sorted(set(MODES).intersection(arguments))
    if len(chosen) > 1:
        print(f"error: {' and '.join(chosen)} exclude each other", file=sys.stderr)
        return 2
    sys.argv[1:] = [word for word in arguments if word not in MODES]
    name = MODES[chosen[0]] if chosen else "grpo"
    getattr(importlib.import_module(f"grpo_rl.sota.{name}"), name)()
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    """Writes the model of a checkpoint, sharded or not, as a folder that transformers and vLLM read; a finished run has
    written model/ itself. Runs on the CPU, with 4 bytes a parameter of memory and half as much again.
    """
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a run's checkpoints/checkpoint_*.pt")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder; must be empty or absent")
    parser.set_defaults(run_command=_export_model)


def _export_model(options: argparse.Namespace) -> int:
    if not options.checkpoint.is_file():
        raise ValueError(f"there is no checkpoint {options.checkpoint}; a run's are its checkpoints/checkpoint_*.pt")
    from grpo_rl.evaluation.models import export_checkpoint

    export_checkpoint(options.checkpoint, options.folder)
    print(f"The model of {options.checkpoint} is in {options.folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
