"""The command `grpo-rl check-model`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.checks.check import OF_RUN, Case, all_findings
from grpo_rl.checks.finding import shown
from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
from grpo_rl.settings.schema import Settings


def add_check_model(parser: argparse.ArgumentParser) -> None:
    """Says line by line whether a model can be trained here, or what to do: whether it is scored exactly, its chat
    template, memory, the engine, sampler against trainer. Takes the overrides of `grpo-rl train` for one process.
    Exit code 1: there is something to do.
    """
    parser.usage = "grpo-rl check-model [options] NAME [overrides ...]"
    parser.add_argument("name", metavar="NAME", help="a local folder, or a name on the hub")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="that samples (inference_model.engine)")
    parser.add_argument("--quick", action="store_true", help="read no weights: gate, chat template and memory alone")
    parser.set_defaults(run_command=_check_model)


def _check_model(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    given = ("model.name=", "mode=", *(["inference_model.engine="] if options.engine else []))
    if clashing := [word for word in overrides if word.lstrip("+").startswith(given)]:
        raise ValueError(
            f"{clashing[0]}: check-model takes the model as NAME, and looks at one process (mode=sync); the engine is "
            "given once"
        )
    cfg = compose_config(DEFAULT_CONFIG, overrides)
    cfg.model.name, cfg.mode = options.name, "sync"
    cfg.inference_model.engine = options.engine or cfg.inference_model.engine
    settings = Settings.read(cfg)
    # Imported late: torch takes seconds, and neither help nor a wrong word should wait for it.
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    checks = {name: OF_RUN[name] for name in ("model", "memory", *(() if options.quick else ("weights",)))}
    found = shown(all_findings(checks, Case(settings, Path(), options.quick, needs_template=False)))
    if to_do := sum(finding.kind == "FIX" for finding in found):
        print(f"\n{options.name} can't be trained like this; to fix, above: {to_do}")
        return 1
    words = [f"model.name={_written(options.name)}"]
    words += [f"inference_model.engine={options.engine}"] if options.engine else []
    has_prompt = "system_prompt" in settings.env and settings.env["system_prompt"]
    words += [finding.override for finding in found if finding.override and has_prompt]
    loaded = any((finding.kind, finding.about) == ("OK", "weights") for finding in found)
    said = "" if loaded else ", as far as can be told without weights"
    print(f"\nOK{said}. Train it: {shlex.join(['grpo-rl', 'train', *words, *overrides])}")
    return 0


def _written(name: str) -> str:
    """The name as Hydra reads it in an override.

    >>> _written("org/Model-1.5B"), _written("/my models/a=b")
    ('org/Model-1.5B', "'/my models/a=b'")
    """
    return name if re.fullmatch(r"[\w./~-]+", name) else "'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'"
