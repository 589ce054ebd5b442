"""A corpus to search in: documents from files or the hub, found by BM25, with the index kept on disk."""

import functools
import hashlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from grpo_rl.envs import tables
from grpo_rl.storage.cache import cache_folder

HUB_NAME = "hotpotqa/hotpot_qa:distractor"
HUB_SPLITS = {"train": "train", "test": "validation"}

MAX_QUERY_WORDS = 64

_FORMAT = 1
"""The version of what is stored; raise it when that changes, so that caches are built anew."""


class Document(NamedTuple):
    """A title and a text, each in one line."""

    title: str
    text: str


class SearchIndex:
    """Documents by BM25 (Lucene's, k1 = 1.5, b = 0.75), over words of two letters or more but the commonest.

    Searching is safe from several threads. The index is kept in the user's cache folder under a digest of the
    documents, as arrays and JSON; what can't be read is built again.

    Raises:
        ValueError: no document has a word.

    >>> texts = ["A river in Peru.", "A city on the Amazon.", "The longest river."]
    >>> documents = [Document("Ucayali", texts[0]), Document("Manaus", texts[1]), Document("Nile", texts[2])]
    >>> [document.title for document in SearchIndex(documents).search("Which river is in Peru?", 5)]
    ['Ucayali', 'Nile']
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self._bm25 = _kept_index(documents, cache_folder() / "bm25")

    def search(self, query: str, count: int) -> list[Document]:
        """Up to ``count`` documents that share a word with ``query``, the best first; ties go by the corpus' order."""
        words = [word for word in _words([query], ids=False)[0] if word][:MAX_QUERY_WORDS]
        known = self._bm25.get_tokens_ids(words)
        if not known:
            return []
        scores = self._bm25.get_scores_from_ids(known)
        count = min(count, len(scores))
        # Not bm25s's own choice of the best: among equal scores it takes whichever its partition leaves there.
        least = np.partition(scores, -count)[-count]
        found = np.flatnonzero((scores >= least) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:count]
        return [self.documents[index] for index in best.tolist()]


@functools.cache
def _bm25s() -> Any:
    """The library, imported without numba and jax: of no use here, seconds to load, and vLLM can't start with numba.

    vLLM 0.32 looks through all modules for kernels and takes every attribute for one that may be asked for its own.
    """
    hidden = {name: sys.modules.get(name) for name in ("numba", "jax")}
    sys.modules.update(dict.fromkeys(hidden))  # importing what is None here fails, and bm25s goes on without it
    try:
        return importlib.import_module("bm25s")
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _words(texts: list[str], ids: bool) -> Any:
    return _bm25s().tokenize(texts, stopwords="en", return_ids=ids, show_progress=False)


def _built_index(documents: Sequence[Document]) -> Any:
    words = _words([f"{title} {text}" for title, text in documents], ids=True)
    if not words.vocab:
        raise ValueError(f"the corpus has {len(documents)} documents and no word; give one with titles and texts")
    bm25 = _bm25s().BM25(method="lucene", k1=1.5, b=0.75, backend="numpy")
    bm25.index(words, show_progress=False)
    return bm25


def _kept_index(documents: Sequence[Document], cache: Path) -> Any:
    digest = hashlib.sha256(f"{_FORMAT} {_bm25s().__version__}".encode())
    for document in documents:
        digest.update(json.dumps(document).encode())
    folder = cache / digest.hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Another process that starts with the same corpus waits, and then reads.
        with FileLock(cache / f"{folder.name}.lock"):
            bm25 = _loaded_index(folder)
            if bm25 is None:
                bm25 = _built_index(documents)
                _store_index(bm25, folder)
    except OSError as error:
        warnings.warn(f"the search index can't be kept, and is built at each start: {error}", stacklevel=3)
        bm25 = _built_index(documents)
    return bm25


def _loaded_index(folder: Path) -> Any:
    try:
        bm25 = _bm25s().BM25.load(folder, allow_pickle=False)
        return bm25 if bm25.vocab_dict and bm25.scores["num_docs"] else None
    # A damaged file may be read as anything, and it is only a cache.
    except Exception:
        return None


def _store_index(bm25: Any, folder: Path) -> None:
    """Writes the index, all of it or nothing: a killed process leaves no half of it under its name."""
    with TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        built = Path(temporary) / "index"
        bm25.save(built, allow_pickle=False, show_progress=False)
        if folder.exists():
            folder.rename(Path(temporary) / "broken")
        built.rename(folder)


def load_corpus(path: str | Path | None = None) -> list[Document]:
    """Documents to search in, each once.

    Args:
        path: one JSON object of titles with their sentences or texts; rows with ``title`` and ``text``, or questions
            with HotpotQA's ``context``, in any form of `grpo_rl.envs.tables`. None takes the contexts of the hub's
            HotpotQA, of both its splits.

    Raises:
        ValueError: there is no such file, the hub can't be reached, or something in it is no document.
    """
    name = str(path or HUB_NAME)
    documents = list(dict.fromkeys(_found(path, name)))
    if not documents:
        raise ValueError(f"{name} has no documents; give titles with texts, or questions with a context")
    return documents


def _found(path: str | Path | None, name: str) -> Iterator[Document]:
    titles = None if path is None else _titled(Path(os.path.expanduser(path)))
    if titles is not None:
        yield from (_document(title, text, name) for title, text in titles.items())
        return
    for split in ("train",) if path else HUB_SPLITS.values():
        for row in tables.load_rows(name, split):
            if "title" in row and "text" in row:
                yield _document(row["title"], row["text"], row.where)
            else:
                yield from _context(row, row.where)


def _titled(file: Path) -> dict | None:
    if file.suffix.lower() != ".json":
        return None
    try:
        whole = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"env.corpus={file} can't be read: {error}; give a JSON or JSONL file") from error
    return whole if isinstance(whole, dict) else None


def _context(row: Mapping, where: str) -> Iterator[Document]:
    try:
        context = row["context"]
        # The hub turns the file's list of pairs into a pair of lists.
        pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
        pairs = [(title, sentences) for title, sentences in pairs]
    except (KeyError, TypeError, ValueError):
        wanted = "a document has title and text, a question a context [[title, [sentence, …]], …]"
        raise ValueError(f"{where} has {list(row)}; {wanted}") from None
    return (_document(title, sentences, where) for title, sentences in pairs)


def _document(title: object, text: object, where: str) -> Document:
    sentences = [text] if isinstance(text, str) else text
    if not isinstance(title, str) or not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
        raise ValueError(f"{where}: {str(title)[:80]!r} is no title with a text or a list of sentences")
    return Document(" ".join(title.split()), " ".join(" ".join(sentences).split()))
