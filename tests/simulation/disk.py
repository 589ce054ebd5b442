"""The disk of a simulated process: what a kill and a power cut leave of a run's folder.

Faults come at `os.fsync` and `os.replace`, and not in a write between them; names of folders count as safe.
A kill leaves files as they are. A power cut keeps only what was synced: of a file the contents at its last `fsync` and
perhaps a part of what followed, of a folder the names at its own last one and perhaps later ones.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

Files = dict[str, bytes]
"""Contents by path below the run's folder."""


class Disk:
    """The run's folder, whose writes are watched.

    Args:
        before: called before each sync and rename with its name and the path; raises what is to go wrong.
    """

    def __init__(self, root: Path, rng: random.Random, before: Callable[[str, Path], None]) -> None:
        self.root, self._rng, self._before = root.resolve(), rng, before
        self._synced: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, tuple[int, bytes]]] = {}
        self.whole: set[str] = set()
        """SHA-256 of every checkpoint file that was written to its end."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the folder; nothing else is touched."""
        fsync, replace, unlink = os.fsync, os.replace, os.unlink

        def watch_fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not path.is_relative_to(self.root):
                return fsync(descriptor)
            self._before("sync", path)
            self._sync(path)

        def watch_replace(source: str | Path, target: str | Path, **options: int) -> None:
            if Path(target).is_relative_to(self.root):
                self._before("rename", Path(target))
                self._forget(Path(target))
            replace(source, target, **options)

        def watch_unlink(path: str | Path, **options: int) -> None:
            self._forget(Path(path))
            unlink(path, **options)

        with (
            mock.patch.object(os, "fsync", watch_fsync),
            mock.patch.object(os, "replace", watch_replace),
            mock.patch.object(os, "unlink", watch_unlink),
        ):
            yield

    def _sync(self, path: Path) -> None:
        if path.is_dir():
            files = [(entry.name, entry.inode()) for entry in os.scandir(path) if entry.is_file()]
            self._names[path] = {name: (inode, self._synced.get(inode, b"")) for name, inode in files}
            return
        content = path.read_bytes()
        self._synced[path.stat().st_ino] = content
        if path.name.startswith("checkpoint_"):
            self.whole.add(hashlib.sha256(content).hexdigest())

    def _forget(self, path: Path) -> None:
        """Forgets a file whose inode another one may get."""
        if path.is_relative_to(self.root) and path.exists():
            self._synced.pop(path.stat().st_ino, None)

    def is_whole(self, path: Path) -> bool:
        """True if a checkpoint file is one that was written to its end, and has not changed since."""
        return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() in self.whole

    def after_kill(self) -> Files:
        """The folder's files as they are."""
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self._files()}

    def after_power_cut(self) -> Files:
        """One of the states that a power cut may leave."""
        left: Files = {}
        for folder in sorted({self.root, *(path.parent for path in self._files()), *self._names}):
            now = {path.name: path for path in sorted(folder.glob("*")) if path.is_file()}
            synced = self._names.get(folder, {})
            for name in sorted(now.keys() | synced.keys()):
                is_same = name in now and name in synced and now[name].stat().st_ino == synced[name][0]
                if name in now and (is_same or self._rng.random() < 0.5):
                    content = self._content(now[name])
                elif name in synced and (name in now or self._rng.random() < 0.5):
                    content = synced[name][1]
                else:
                    continue
                left[str((folder / name).relative_to(self.root))] = content
        return left

    def _content(self, path: Path) -> bytes:
        now, synced = path.read_bytes(), self._synced.get(path.stat().st_ino, b"")
        if now.startswith(synced):
            return now[: self._rng.randint(len(synced), len(now))]
        return self._rng.choice([now, synced])

    def _files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def put(self, files: Files) -> None:
        """Makes the folder hold these files, all of them safe."""
        shutil.rmtree(self.root)
        self._synced, self._names = {}, {}
        self.root.mkdir()
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._synced[path.stat().st_ino] = content
        for folder in {path.parent for path in self._files()}:
            files_of = [(path.name, path.stat().st_ino) for path in folder.glob("*") if path.is_file()]
            self._names[folder] = {name: (inode, self._synced[inode]) for name, inode in files_of}


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A file's contents with its end missing or one byte changed, as a failing disk leaves them."""
    if rng.random() < 0.25:
        return content[: rng.randrange(len(content))]
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 + rng.randrange(255))]) + content[place + 1 :]
