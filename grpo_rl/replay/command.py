"""The command `grpo-rl replay`."""

import argparse
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.by_name import is_name
from grpo_rl.losses.factors import FACTORS
from grpo_rl.section import select
from grpo_rl.settings.compose import loss_config, with_loss
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.masking import printable


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
    from grpo_rl.monitor.stored_tokens import read_step
    from grpo_rl.replay.replay import replay

    stored = read_step(options.run, options.step)
    allowed = {*options.imports, *(word.partition("=")[2] for word in overrides)}
    for key in ("env.dataset", *(f"loss.{factor.name}" for factor in FACTORS)):  # of a run that may be untrusted
        if is_name(name := select(stored.config, key)) and name not in allowed:
            raise ValueError(f"the run's {key} is {name}, whose module would be imported; allow it by --imports {name}")
    settings = Settings.restored(stored.config)
    other = with_loss(settings, overrides)
    try:
        result = replay(stored, settings, other, options.top)
    except ValueError as error:
        raise ValueError(f"{error} (a replay has only what the run computed)") from error
    if options.json:
        print(json.dumps(result | {"overrides": list(overrides)}, indent=2))
        return 0
    title = f"{options.run}, step {stored.step}: {len(stored.groups)} groups, optimizer steps: {len(stored.updates)}"
    _show(result, title, " ".join(overrides) or "replayed", _decoder(options.run, settings.model.name))
    return 0


def _decoder(run: Path, model: str) -> Callable[[Sequence[int]], str]:
    """A function from ids to their text, of the run's tokenizer; the ids as numbers where this machine lacks it."""
    from transformers import AutoTokenizer

    for name in (run / "model", model):
        with contextlib.suppress(OSError, ValueError):
            tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
            return lambda ids: printable(tokenizer.decode(ids)).replace("\n", "⏎")
    return lambda ids: "".join(f"{i} " for i in ids)


def _show(result: Mapping[str, Any], title: str, other: str, decode: Callable[[Sequence[int]], str]) -> None:
    """Prints both losses side by side, and the tokens that they treat most differently."""
    sides = result["run"], result["other"]
    print(f"{title}\nAs trained, and {other}:\n")
    for name in sides[0] | sides[1]:
        print(f"{name:28}", *(f"{_number(side[name]) if name in side else '':>12}" for side in sides))
    cosine = "one of the gradients is zero" if result["cosine"] is None else f"cosine similarity {result['cosine']:.4f}"
    print(f"\nThe gradient of {result['changed_fraction']:.1%} of the trained tokens changes; {cosine}.")
    if not result["recorded_gap"] <= 1e-4 * max(abs(sides[0]["loss/total"]), 1e-3):
        gap = f"{result['recorded_gap']:.2g}"
        print(f"The run recorded a loss that differs by {gap}: its code or its settings were others.")
    if result["tokens"]:
        print("\nTokens that differ the most; of each what was before it, and its values as trained → now:")
    for token in result["tokens"]:
        text = f"{decode(token['before'])[-16:]}[{decode([token['token_id']])}]"
        values = (f"{name} {' → '.join(map(_number, token[name]))}" for name in ("advantage", "ratio", "gradient"))
        print(f"\nrow {token['row']}, response {token['response']}, position {token['position']}: {text}")
        print("   ", ", ".join(values))


def _number(value: float) -> str:
    """A count in full, another number to four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
