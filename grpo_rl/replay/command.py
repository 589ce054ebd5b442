"""The command `grpo-rl replay`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.by_name import is_name
from grpo_rl.settings.compose import loss_config, with_loss
from grpo_rl.settings.declaration import select
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.cache import cache_folder
from grpo_rl.storage.printable import printable

Decoder = Callable[[Sequence[int]], str]
"""A function from ids to their text."""


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Recomputes a step of a run that was trained with train.lineage=true under another loss, from the stored
    log-probabilities, without a model, and shows what changes; without an override, under its own.
    """
    parser.usage = "grpo-rl replay [options] RUN STEP [loss=NAME] [loss.KEY=VALUE ...]"
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("step", type=int, metavar="STEP", help="from 1")
    parser.add_argument("--json", action="store_true", help="print numbers instead of tables")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="tokens shown, those that differ most (10)")
    parser.add_argument(
        "--imports", action="append", default=[], metavar="MODULE:NAME", help="code that the run names, to be imported"
    )
    parser.set_defaults(run_command=_replay)


def _replay(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    loss_config(overrides)  # usage errors before the imports
    # Imported late: torch takes seconds, and neither help nor a usage error should wait for it.
    from grpo_rl.monitor.stored_tokens import read_step
    from grpo_rl.replay.replay import replay

    stored = read_step(options.run, options.step)
    _check_imports(stored.config, [*options.imports, *(word.partition("=")[2] for word in overrides)])
    settings = Settings.restored(stored.config)
    result = replay(stored, settings, with_loss(settings, overrides), options.top)
    if options.json:
        print(json.dumps(result | {"overrides": list(overrides)}, indent=2))
        return 0
    title = f"{options.run}, step {stored.step}: {len(stored.groups)} groups, optimizer steps: {len(stored.updates)}"
    _show(result, title, " ".join(overrides) or "replayed", _decoder(options.run, settings.model.name))
    return 0


def _check_imports(config: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuses to import what a run names, which may be untrusted, unless the command line names it too."""
    for key in ("env.dataset", "loss.surrogate", "loss.kl"):
        if is_name(name := select(config, key)) and name not in given:
            raise ValueError(f"the run's {key} is {name}, whose module would be imported; allow it by --imports {name}")


def _decoder(run: Path, model: str) -> Decoder:
    """The function of the run's tokenizer; the ids as numbers where this machine lacks it."""
    from transformers import AutoTokenizer

    from grpo_rl.policies.hub import CONVERTED, DEFAULT_MODEL

    converted = [cache_folder() / "models" / CONVERTED] * (model == DEFAULT_MODEL)  # where no hub was reached
    for name in (run / "model", model, *converted):
        with contextlib.suppress(OSError, ValueError):
            tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
            return lambda ids: printable(tokenizer.decode(ids)).replace("\n", "⏎")
    return lambda ids: "".join(f"{i} " for i in ids)


def _show(result: Mapping[str, Any], title: str, other: str, decode: Decoder) -> None:
    """Prints both losses side by side, and the tokens that they treat most differently."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    def right(*names: str) -> list[Column]:
        return [Column(Text(name), justify="right", overflow="fold") for name in names]

    console, sides = Console(highlight=False, markup=False), (result["run"], result["other"])
    numbers = Table("", *right("as trained", other), box=None, pad_edge=False)
    for name in sides[0] | sides[1]:
        numbers.add_row(name, *(_number(side[name]) if name in side else "" for side in sides))
    console.print(title, "", numbers, "", sep="\n")
    cosine = "one of the gradients is zero" if result["cosine"] is None else f"cosine similarity {result['cosine']:.4f}"
    console.print(f"The gradient of {result['changed_fraction']:.1%} of the trained tokens changes; {cosine}.")
    if not result["recorded_gap"] <= 1e-4 * max(abs(sides[0]["loss/total"]), 1e-3):
        gap = f"{result['recorded_gap']:.2g}"
        console.print(f"The run recorded a loss that differs by {gap}: its code or its settings were others.")
    if any(side["not_scored_groups"] for side in sides):
        console.print("Groups that were not scored in the run are missing here; they still count in the means.")
    if not result["tokens"]:
        return
    plain, pairs = ("row", "response", "position"), ("advantage", "ratio", "gradient")
    columns = [*right(*plain), Column("token", overflow="fold", ratio=1), *right(*pairs)]
    tokens = Table(*columns, box=None, pad_edge=False)
    for token in result["tokens"]:
        text = Text(decode(token["before"])[-16:], style="dim").append(decode([token["token_id"]]), "bold cyan")
        tokens.add_row(*(str(token[name]) for name in plain), text, *(_pair(*token[name]) for name in pairs))
    console.print("\nTokens that differ the most", tokens, sep="\n")


def _number(value: float) -> str:
    """A count in full, another number to four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _pair(ours: float, theirs: float) -> str:
    """Two values; once where they are the same."""
    return f"{ours:.3g}" if math.isclose(ours, theirs, rel_tol=1e-5) else f"{ours:.3g} → {theirs:.3g}"
