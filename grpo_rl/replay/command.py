"""The command `grpo-rl replay`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.by_name import is_name
from grpo_rl.settings.compose import loss_config, with_loss
from grpo_rl.settings.declaration import select
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.cache import cache_folder
from grpo_rl.storage.printable import printable


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
    loss_config(overrides)  # wrong words before the imports
    # Imported late: torch takes seconds, and neither help nor a wrong word should wait for it.
    from rich.console import Console

    from grpo_rl.replay.replay import replay
    from grpo_rl.replay.stored import read_step
    from grpo_rl.replay.table import replay_view

    stored = read_step(options.run, options.step)
    _check_imports(stored.config, [*options.imports, *(word.partition("=")[2] for word in overrides)])
    settings = Settings.restored(stored.config)
    result = replay(stored, settings, with_loss(settings, overrides), options.top)
    if options.json:
        print(json.dumps(result | {"overrides": list(overrides)}, indent=2))
        return 0
    title = f"{options.run}, step {stored.step}: {len(stored.groups)} groups, optimizer steps: {len(stored.updates)}"
    view = replay_view(result, title, " ".join(overrides) or "replayed", _decoder(options.run, settings.model.name))
    Console(highlight=False).print(view)
    return 0


def _check_imports(config: Mapping[str, Any], given: Sequence[str]) -> None:
    """Refuses to import what a run names, which may be a stranger's, unless the command line names it too."""
    for key in ("env.dataset", "loss.surrogate", "loss.kl"):
        if is_name(name := select(config, key)) and name not in given:
            raise ValueError(f"the run's {key} is {name}, whose module would be imported; allow it by --imports {name}")


def _decoder(run: Path, model: str) -> Callable[[Sequence[int]], str]:
    """The function ids -> text of the run's tokenizer; of ids as numbers where this machine lacks it."""
    from transformers import AutoTokenizer

    from grpo_rl.policies.hub import CONVERTED, DEFAULT_MODEL

    converted = [cache_folder() / "models" / CONVERTED] * (model == DEFAULT_MODEL)
    for name in (run / "model", model, *converted):
        with contextlib.suppress(OSError, ValueError):
            tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
            return lambda ids: printable(tokenizer.decode(ids)).replace("\n", "⏎")
    return lambda ids: "".join(f"{i} " for i in ids)
