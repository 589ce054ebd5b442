"""Writes docs/model_classes.md, the verdict on every causal language model: `python tools/model_classes.py`.

It tries all that the installed transformers has, a minute or two. `make test-all` does too, and compares the page.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "model_classes.md"
HEAD = """# Model classes

Of transformers {version}: **{equal} classes are equal, {refused} are refused, none is wrong**; {unbuilt} can't be built here.

Each class for causal language models is built tiny, with settings far from harmless. *Equal*: scored with shared prompts,
its log-probabilities, entropies and all gradients are those of its own padded forward, to 1e-9 in fp64. *Refused*: by name,
before any weight is read. A config of an equal class can ask for what is refused, such as dynamic RoPE; `grpo-rl
check-model NAME` looks at one model ([models](models.md)).

`python tools/model_classes.py` writes this page from the verdicts of `tests/policies/test_every_model.py`. `make
test-all` compares it; `pytest -s tests/policies/test_every_model.py` prints each reason in full.
"""  # noqa: E501
REASONS = {
    "transformers can't exchange its attention": "attention of its own, which transformers can't exchange",
    "its .* would be left out|its head is a ": "logits that are not one matrix's product with the hidden states",
    "it has layers of type (.*);": "layers of type {}",
    "it has a recurrent state|its .* keeps a state that is neither": "a state that is not kept in transformers' cache",
    "its .* does not continue from its prompt's state": "a state that is forgotten where several tokens follow it",
    "its .* takes or returns more than hidden states": "a state that is passed on next to the hidden states",
    "it is several models in one": "several models in one, such as text and vision",
    "its .* is not causal": "attention that is not causal",
    "(its|the layer of its) .* gets no keyword arguments": "layers that can't get the layout of responses",
    "a trial forward without weights": "a forward pass that can't be tried without weights",
    "it computes with its attention mask": "arithmetic of its own with the attention mask",
    "its .* mixes neighbouring tokens": "a convolution over neighbouring tokens, of whatever sequence",
}
"""Reasons as the page has them, by the beginnings of refusals; any other refusal is shown as it is."""
UNBUILT = {
    "timm": "needs timm, which is not installed",
    "no attribute 'vocab_size'": "drafts tokens for another model",
}


def merged(verdicts: Mapping[tuple[str, float | None], Any]) -> dict[str, Any]:
    """One verdict for each class, from those without and with noise, which never differ where both can be built."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, _), verdict in sorted(verdicts.items(), key=str):
        found[name][verdict.kind] = verdict
    for name, kinds in found.items():
        if len(kinds) > 1:
            kinds.pop("unbuilt", None)
        assert len(kinds) == 1, f"{name} is {' and '.join(kinds)}"
    return {name: next(iter(kinds.values())) for name, kinds in found.items()}


def shared_reason(text: str) -> str:
    """The reason that a refusal shares with others, as the page says it; the refusal itself where it shares none."""
    text = text.partition(" cannot be trained here: ")[2] or text
    for start, said in REASONS.items():
        if found := re.match(start, text):
            return said.format(*(found.groups() if "{}" in said else ()))
    return text


def names(classes: Iterable[str]) -> str:
    """Classes as Markdown, in the order of the alphabet."""
    return ", ".join(f"`{name}`" for name in sorted(classes, key=str.lower))


def rows(groups: Mapping[str, Iterable[str]]) -> list[str]:
    """Table rows, the largest groups first."""
    ordered = sorted(((reason, list(classes)) for reason, classes in groups.items()), key=lambda g: (-len(g[1]), g[0]))
    return [f"| {reason} | {len(classes)} | {names(classes)} |" for reason, classes in ordered]


def page(verdicts: Mapping[tuple[str, float | None], Any], kind_of: Callable[[str], str], version: str) -> str:
    """The page as Markdown.

    Args:
        verdicts: by class and noise; each has a ``kind`` and a ``detail``.
        kind_of: of an equal class by its name: what its layers are.
    """
    by_kind: dict[str, dict[str, str]] = defaultdict(dict)
    for name, verdict in merged(verdicts).items():
        by_kind[verdict.kind][name] = verdict.detail
    assert by_kind.keys() <= {"equal", "refused", "unbuilt"}, by_kind.keys()
    lines = [HEAD.format(version=version, **{kind: len(by_kind[kind]) for kind in ("equal", "refused", "unbuilt")})]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in by_kind["equal"]:
        kinds[kind_of(name)].append(name)
    lines += ["## Equal", "", "| layers | | classes |", "| --- | ---: | --- |", *rows(kinds), ""]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, detail in by_kind["refused"].items():
        reasons[shared_reason(detail)].append(name)
    lines += ["## Refused", "", "| because of | | classes |", "| --- | ---: | --- |", *rows(reasons), ""]
    lines += ["## Not built here", ""]
    for name, detail in sorted(by_kind["unbuilt"].items()):
        why = next((said for start, said in UNBUILT.items() if start in detail), detail)
        lines.append(f"- `{name}`: {why}")
    return "\n".join(lines) + "\n"


def of_page(text: str) -> tuple[str, dict[str, str]]:
    """The version of transformers that a page is about, and the verdict on each class that it names."""
    (version,) = re.findall(r"Of transformers ([\w.]+):", text)
    found = {}
    for part, kind in (("Equal", "equal"), ("Refused", "refused"), ("Not built here", "unbuilt")):
        (section,) = re.findall(rf"^## {part}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        found |= {name: kind for name in re.findall(r"`(\w+)`(?=[:, ])", section)}
    return version, found


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    PAGE.write_text(runpy.run_path(str(ROOT / "tests" / "policies" / "test_every_model.py"))["model_page"]())
