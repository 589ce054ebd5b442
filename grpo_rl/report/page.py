"""``report.html``: sections of data built in Python, and the scripts that show them, assembled into one file.

The file loads nothing. Data go in as compressed JSON, and scripts set them as text, never as HTML: responses are
hostile text. A content security policy allows the one script and the one style by their hashes, so that a script in
the data that got through all the same would stay dead.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_rl.monitor.advisories import Advisories
from grpo_rl.report import charts, headline, responses
from grpo_rl.report.files import CONFIG, REPORT, read_config, read_overrides, read_rows, read_summary, versions
from grpo_rl.storage.masking import masked
from grpo_rl.storage.whole_file import write_whole
from grpo_rl.storage.yaml_text import flat

ASSETS = Path(__file__).parent / "assets"
TEMPLATES = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class Section:
    """A section of the page: data from the run folder, and the script that shows them.

    ``assets/<id>.js`` defines ``sections.<id> = function (root, data) {...}``: it fills the element ``root``, which has
    its heading already, with something in any case. It may return a function that takes new data while the page is
    live; otherwise the section is filled anew. ``assets/<id>.css`` is its style, if there is one.

    Args:
        id: also the name of its assets, and of its element in the page.
        build: data of a run folder (of a comparison: of a list of them), as what JSON can say; None: there is nothing
            for this section, and it is left out. Numbers that are not finite become null. An error leaves the section
            out, and is shown.
        note: one sentence below the title.
    """

    id: str
    title: str
    build: Callable[[Any], Mapping[str, Any] | None]
    note: str = ""


def _advice(run_dir: Path) -> dict[str, Any] | None:
    found = [
        {"id": one.name, "title": one.title, "text": one.seen, "remedy": f"Try {one.setting}. See {one.page}"}
        for one in Advisories(read_config(run_dir), read_rows(run_dir)).raised.values()
    ]
    return {"advisories": found} if found else None


def _configuration(run_dir: Path) -> dict[str, Any] | None:
    """Overrides, every setting as (key, value), the config's text, and versions; None where no config was stored.

    Secrets are masked: the page may be mailed.
    """
    config, overrides = read_config(run_dir), read_overrides(run_dir)
    if not config and not overrides:
        return None
    shown, text = masked(config), (run_dir / CONFIG).read_text(encoding="utf-8") if config else ""
    return {
        "overrides": overrides,
        "settings": [[key, written(value)] for key, value in flat(shown).items()],
        # The text as it is keeps its comments; it can be shown where there is nothing to mask.
        "text": text if shown == config else yaml.safe_dump(shown, sort_keys=False),
        "versions": list((read_summary(run_dir).get("versions") or versions()).items()),
    }


def written(value: object) -> str:
    """A setting as its YAML would say it, on one line.

    >>> written(None), written({}), written(True), written([1, "a"]), written(5e-05), written("text")
    ('null', '{}', 'true', '[1, a]', '5e-05', 'text')
    """
    if isinstance(value, str | float):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")


SUMMARY = Section("summary", "Summary", headline.build)
"""The head of the page, which every page has. Its data have ``title``, ``subject``, ``headline``, ``note``,
``origin``, ``command`` and ``footer``, each a text that may be empty."""

SECTIONS: list[Section] = [
    Section("advisories", "Advice", _advice),
    Section("responses", "Responses", responses.build),
    Section("tokens", "Tokens", responses.build_tokens),
    Section("held_out", "Held-out responses", responses.build_held_out),
    Section(
        "charts",
        "Curves",
        charts.build,
        "Numbers read first → last: means over a tenth of the steps at each end, 5 at least, half at most; of "
        "evaluations, the first and the last. A subject opens on a click. Point to read values, drag to zoom, "
        "double-click to zoom out.",
    ),
    Section("configuration", "Configuration", _configuration),
]
"""Sections of a run, in the order of the page."""


def write_report(run_dir: str | Path) -> Path:
    """Writes ``report.html`` into the run folder and returns its path.

    What the folder lacks is left out of the page: a run killed at its first step, or one without evaluation or
    completions, still gets a report of what there is. A section that can't be built is left out too, with the reason.

    Raises:
        ValueError: the run's metrics or its summary are not what they should be.
    """
    path = Path(run_dir) / REPORT
    write_whole(path, assemble(SECTIONS, build(SECTIONS, path.parent)))
    return path


def build(sections: Sequence[Section], source: Path | Sequence[Path], head: Section = SUMMARY) -> dict[str, str]:
    """The data of each section that the run has, or the runs have, as JSON, by id; those of the head come first.

    Raises:
        ValueError: the metrics or the summary can't be read; the head needs them.
    """
    try:
        found = {SUMMARY.id: as_json(head.build(source))}
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        # A run's folder may come from elsewhere: its files may hold what no run writes.
        raise ValueError(f"{source} can't be shown ({type(error).__name__}: {error})") from error
    for section in sections:
        try:
            data = section.build(source)
        except ValueError as error:
            data = {"left_out": str(error)}
        except Exception as error:  # a defect of one section must not lose the page of a run, which may be its only one
            data = {"left_out": f"{type(error).__name__}: {error} (a defect of this section; please report it)"}
        if data is not None:
            found[section.id] = as_json(data)
    return found


def assemble(sections: Sequence[Section], data: Mapping[str, str], live: bool = False) -> str:
    """The page of these data (see :func:`build`); a ``live`` one asks its server for new data."""
    script, style = Markup(joined("js")), Markup(joined("css"))
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    } | ({"connect-src": "'self'"} if live else {})
    return TEMPLATES.get_template("page.html.j2").render(
        summary=json.loads(data[SUMMARY.id]),
        sections=[{**vars(section), "empty": section.id not in data} for section in sections],
        data={name: packed(text) for name, text in data.items()},
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        script=script,
        style=style,
        live=live,
    )


def as_json(data: object) -> str:
    """The data as JSON, in which a number that is not finite is null.

    >>> as_json({"x": [1.5, float("nan")]})
    '{"x":[1.5,null]}'
    """
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Byte-level tokens cut in the middle of a character can decode to a lone surrogate, which UTF-8 cannot hold.
    return text.encode("utf-8", "replace").decode()


def packed(text: str) -> str:
    """The text, gzipped, in base64, which the page's script unpacks."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def joined(kind: str) -> str:
    """All assets of a kind, ``js`` or ``css``, as one text: the plotting library, the page's, then the sections'."""
    first = {"js": ["uplot.js", "page.js"], "css": ["uplot.css", "page.css"]}[kind]
    rest = sorted(path.name for path in ASSETS.glob(f"*.{kind}") if path.name not in (*first, "start.js"))
    last = ["start.js"] if kind == "js" else []
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in (*first, *rest, *last))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def finite(data: Any) -> Any:
    """The same lists and mappings with None for each number that is not finite.

    >>> finite({"best": (3, [0.5, math.nan])})
    {'best': [3, [0.5, None]]}
    """
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
