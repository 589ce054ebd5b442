import math
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grpo_rl.envs.tools import search_index
from grpo_rl.envs.tools.search_index import Document, SearchIndex

DOCUMENTS = [
    Document("Jane Austen", "Jane Austen was an English novelist, born in Steventon."),
    Document("Emma (novel)", "Emma is a novel by Jane Austen."),
    Document("Steventon", "Steventon is a village in Hampshire, England."),
    Document("Turandot", "Turandot is an opera by Giacomo Puccini."),
]
pytestmark = pytest.mark.usefixtures("cache")


def bm25_by_hand(documents: list[Document], query: str) -> list[float]:
    """Scores by the formula, idf = ln(1 + (N - n + 1/2) / (n + 1/2)), word by word."""
    from bm25s.stopwords import STOPWORDS_EN

    def words(text: str) -> list[str]:
        return [word for word in re.findall(r"\w\w+", text.lower()) if word not in STOPWORDS_EN]

    counts = [Counter(words(f"{title} {text}")) for title, text in documents]
    mean_length = sum(count.total() for count in counts) / len(counts)
    scores = [0.0] * len(documents)
    for word in words(query):
        having = sum(word in count for count in counts)
        idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        for index, count in enumerate(counts):
            length = 1.5 * (1 - 0.75 + 0.75 * count.total() / mean_length)
            scores[index] += idf * count[word] / (count[word] + length)
    return scores


@pytest.mark.slow
def test_documents_are_ranked_by_the_formula_and_those_that_answer_are_found(hotpotqa):
    rows, documents = hotpotqa
    index = SearchIndex(documents)
    place = {document: at for at, document in enumerate(documents)}
    for row in rows[:20]:
        scores = bm25_by_hand(documents, row["question"])
        found = [scores[place[document]] for document in index.search(row["question"], 10)]
        assert found == pytest.approx(sorted(scores, reverse=True)[:10], rel=1e-4)
    # In percent of 100 questions, by one search with the question itself: the second document of a chain often shares
    # no rare word with the question. The corpus has 994 documents, so 2 or 10 of them by chance are 0.2 or 1 %.
    assert (len(rows), len(documents)) == (100, 994)
    for count, recall in ((2, 60.0), (10, 88.0)):
        found = [{document.title for document in index.search(row["question"], count)} for row in rows]
        shares = [
            len(titles & set(row["documents"])) / len(row["documents"]) for titles, row in zip(found, rows, strict=True)
        ]
        assert sum(shares) == pytest.approx(recall, abs=0.01)


def test_equal_scores_go_by_the_order_of_the_corpus():
    documents = [Document(f"Document {number}", "river") for number in "abcdefghij" * 3]
    titles = [document.title for document in SearchIndex(documents).search("river", 7)]
    assert titles == [f"Document {number}" for number in "abcdefg"]


@pytest.fixture
def built(monkeypatch) -> list[int]:
    """Counts how often an index is built."""
    times: list[int] = []
    build = search_index._built_index

    def counted(documents):
        times.append(len(documents))
        return build(documents)

    monkeypatch.setattr(search_index, "_built_index", counted)
    return times


def index_folder(cache):
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    return folder


def test_an_index_is_built_once_also_by_several_threads(cache, built):
    queries = ["Jane Austen", "village England", "opera"]
    with ThreadPoolExecutor(8) as pool:
        first, again, *_ = pool.map(lambda _: SearchIndex(list(DOCUMENTS)), range(8))
        assert built == [4]
        found = [first.search(query, 3) for query in queries]
        assert list(pool.map(lambda query: again.search(query, 3), queries)) == found
    SearchIndex(DOCUMENTS[::-1])
    SearchIndex([*DOCUMENTS[:3], Document("Turandot", "An opera.")])
    assert built == [4, 4, 4] and len([path for path in cache.iterdir() if path.is_dir()]) == 3


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda _: b"", lambda _: b"PK\x03\x04", lambda _: b"{}"]
)
def test_a_damaged_index_is_built_again(cache, built, damage):
    expected = SearchIndex(DOCUMENTS).search("Jane Austen novel", 3)
    folder = index_folder(cache)
    for number, name in enumerate(sorted(path.name for path in folder.iterdir()), 2):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        assert SearchIndex(DOCUMENTS).search("Jane Austen novel", 3) == expected
        assert len(built) == number, name


def test_nothing_pickled_is_loaded(cache, built, tmp_path):
    SearchIndex(DOCUMENTS)
    folder, loaded = index_folder(cache), tmp_path / "loaded"

    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(loaded),))

    np.save(folder / "data.csc.index.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    assert SearchIndex(DOCUMENTS).search("opera", 1) == [DOCUMENTS[3]]
    assert len(built) == 2 and not loaded.exists()


@pytest.mark.slow
def test_searching_loads_no_numba_with_which_vllm_could_not_start():
    program = """
import sys
from grpo_rl.envs.tools.search_index import Document, SearchIndex
assert SearchIndex([Document("Lilu", "A spirit."), Document("Gallu", "A demon.")]).search("demon", 1)
assert not {"numba", "llvmlite", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
