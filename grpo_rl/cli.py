"""The command line: `grpo-rl batches` draws a config's batches, `grpo-rl replay` puts a stored step under another loss.

Wrong input is told in one line, with exit code 2; with 1 a command says that it found what it looks for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoTokenizer

from grpo_rl.batches import Misfit, plan_batches
from grpo_rl.config import check, compose_config
from grpo_rl.models import CONVERTED, DEFAULT_MODEL, cache_folder
from grpo_rl.monitor.batch_drawing import terminal
from grpo_rl.monitor.batch_svg import svg
from grpo_rl.monitor.lineage_reader import read_step
from grpo_rl.replay import replay
from grpo_rl.replay_table import replay_view

CONFIG = "grpo_gsm8k"
OF_A_LOSS = ("policy.kl_coef", "policy.entropy_coef")
"""Keys beside those of ``loss`` that a replay can change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line; ``sys.argv`` where none is given."""
    parser = _parser()
    # Overrides may stand anywhere between the options, which argparse's own positionals may not.
    options, overrides = parser.parse_known_args(arguments)
    if unknown := [word for word in overrides if word.startswith("-") or "=" not in word.lstrip("~")]:
        parser.error(f"{unknown[0]!r} is neither an option nor an override such as env.repeats=8")
    try:
        return options.run_command(options, overrides)
    except (ValueError, OSError, HydraException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("grpo-rl", description="What belongs to training beside the training itself.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    batches = commands.add_parser(
        "batches",
        help="draw how prompts, answers, optimizer steps and micro-batches fit together",
        usage="grpo-rl batches [options] [overrides ...]",
        description="Draws how prompts, answers, optimizer steps, micro-batches, epochs and devices fit together in a "
        "config. Takes the overrides of `python sota/grpo.py`; loads no model and no data. Exit code 1: something "
        "does not divide, and the drawing shows where.",
    )
    batches.add_argument("--config-name", "-cn", default=CONFIG, help=f"the config to start from ({CONFIG})")
    batches.add_argument("--svg", type=Path, metavar="FILE", help="also write the picture there")
    batches.add_argument("--prompt-tokens", type=int, metavar="N", help="assumed length of a prompt")
    batches.add_argument("--answer-tokens", type=int, metavar="N", help="and of an answer (sampling.max_new_tokens)")
    batches.add_argument("--gpus", type=int, metavar="N", help="plan for a machine with so many (those of this one)")
    batches.set_defaults(run_command=_batches)

    again = commands.add_parser(
        "replay",
        help="recompute a step of a run under another loss",
        usage="grpo-rl replay [options] RUN STEP [loss=NAME] [loss.KEY=VALUE ...]",
        description="Recomputes a step of a run that was trained with train.lineage=true under another loss, from the "
        "stored log-probabilities, without a model, and shows what changes; without an override, under its own.",
    )
    again.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    again.add_argument("step", type=int, metavar="STEP", help="from 1")
    again.add_argument("--json", action="store_true", help="print numbers instead of tables")
    again.add_argument("--top", type=int, default=10, metavar="N", help="tokens shown, those that differ most (10)")
    again.set_defaults(run_command=_replay)
    return parser


def _batches(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    cfg = compose_config(options.config_name, overrides)
    with contextlib.suppress(Misfit):  # which is what the drawing shows
        check(cfg)
    plan = plan_batches(cfg, options.prompt_tokens, options.answer_tokens, options.gpus)
    name = [] if options.config_name == CONFIG else [f"--config-name {options.config_name}"]
    title = " ".join(["grpo-rl batches", *name, *overrides])
    Console(highlight=False).print(terminal(plan, title))
    if options.svg:
        options.svg.write_text(svg(plan, title))
    return int(bool(plan.misfits))


def _replay(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    stored = read_step(options.run, options.step)
    run_cfg = OmegaConf.create(stored.config)
    result = replay(stored, run_cfg, _with_loss(run_cfg, overrides), options.top)
    if options.json:
        print(json.dumps(result.summary() | {"overrides": list(overrides)}, indent=2))
        return 0
    tokens = sum(len(group.response_ids) for group in stored.groups)
    title = f"{options.run}, step {stored.step}: {len(stored.groups)} groups, {tokens:,} response tokens, "
    title += f"optimizer steps: {len(stored.updates)}"
    view = replay_view(result, title, " ".join(overrides) or "replayed", _decoder(options.run, run_cfg.model.name))
    Console(highlight=False).print(view)
    return 0


def _with_loss(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A run's config with another loss.

    Raises:
        ValueError: an override that has no part in a loss, or settings that don't go together.
        HydraException: an unknown preset, or an override that Hydra can't read.
    """
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    if others := [key for key in keys if key != "loss" and not key.startswith("loss.") and key not in OF_A_LOSS]:
        raise ValueError(
            f"{others[0]} has no part in the loss of answers that are there already; a replay takes loss=NAME, "
            f"loss.KEY=VALUE, {' and '.join(OF_A_LOSS)}"
        )
    chosen, changed = compose_config(CONFIG, overrides), copy.deepcopy(cfg)
    for key in sorted(keys, key=len):  # a preset first, and single settings over it
        OmegaConf.update(changed, key, OmegaConf.select(chosen, key), merge=False)
    # The loss alone, in a config in which all else is in order: the run's own may ask for what this machine lacks.
    checked = compose_config(CONFIG, [])
    for key in ("loss", *OF_A_LOSS):
        OmegaConf.update(checked, key, OmegaConf.select(changed, key), merge=False)
    check(checked)
    return changed


def _decoder(run: Path, model: str) -> Callable[[Sequence[int]], str] | None:
    """ids -> text by the run's tokenizer, where this machine has it."""
    exported = run / "model"
    converted = [cache_folder() / CONVERTED] * (model == DEFAULT_MODEL)
    for name in [*([exported] if exported.is_dir() else []), model, *converted]:
        with contextlib.suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(name, local_files_only=True).decode
    return None


if __name__ == "__main__":
    sys.exit(main())
