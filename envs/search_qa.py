"""Questions with a search tool over a corpus of one's own: several searches, then an answer, judged by EM and F1."""

import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import override

from grpo_rl.envs import tables
from grpo_rl.envs.declared import means, weight
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.sources import AnySource, Source
from grpo_rl.envs.spec import TaskSpec
from grpo_rl.envs.task import Messages, Reward, Unjudgeable
from grpo_rl.envs.tools.calls import Tool
from grpo_rl.envs.tools.search_index import HUB_NAME, HUB_SPLITS, SearchIndex, load_corpus
from grpo_rl.envs.tools.task import Form, ToolRole, ToolTask, form_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

SYSTEM_PROMPT = (
    "Answer the question from documents. Write only {call} with your own words, and wait for the documents; do so "
    "again where there is more to find. Then write only <answer>England</answer> with your own answer of a few words, "
    "or yes or no."
)
"""``{call}`` is replaced by a search in the form that the examples are in."""
# Two, as a small model takes one for chance.
EXAMPLES = (
    {
        "question": "In which country was the author of Emma born?",
        "call": "author of the novel Emma",
        "result": "Title: Jane Austen\nText: Jane Austen, born in Steventon, England, wrote Emma and Persuasion.",
        "answer": "England",
    },
    {
        "question": "Are Lima and Cusco in the same country?",
        "call": "Lima and Cusco",
        "result": "Title: Lima\nText: Lima is the capital of Peru.\nTitle: Cusco\nText: Cusco is a city in Peru.",
        "answer": "yes",
    },
)

COLUMNS = ("question", "answer", "supporting_facts")
TEXTS = {"question": str, "answer": str}
MAX_TITLE_CHARS = 200

_TITLE = re.compile(r"^Title: (.*)$", re.MULTILINE)


class SearchQA(ToolTask):
    r"""Questions with a search tool; a conversation earns ``exact_match`` and ``f1``.

    "If Gallu is a demon Lilu is what?" A policy that searches, reads and answers well earns 2:

    >>> from grpo_rl.envs.tools.search_index import Document
    >>> row = {"question": "If Gallu is a demon Lilu is what?", "answer": "spirit", "documents": ["Alû", "Lilu"]}
    >>> task = SearchQA([row], SearchIndex([Document("Lilu", "A lilu is a spirit."), Document("Gallu", "A demon.")]))
    >>> messages = task.prompt(row) + [{"role": "assistant", "content": "Search: Lilu"}]
    >>> task.reply(row, messages)
    [{'role': 'tool', 'content': 'Title: Lilu\nText: A lilu is a spirit.'}]
    >>> messages += task.reply(row, messages) + [{"role": "assistant", "content": "<answer>A spirit</answer>"}]
    >>> reward = task.score_dialog(row, messages)
    >>> reward.parts, reward.measures
    ({'exact_match': 1.0, 'f1': 1.0}, {'supporting_recall': 0.5})

    What is judged is inside the last message's last ``<answer>…</answer>``, else all of that message; a conversation
    that was cut off at a search has no answer.

    Rows have ``question``, ``answer``, and ``documents``: titles of those that the answer follows from, may be empty.
    At the weight 0 ``supporting_recall`` is no part of the reward, and measured all the same.

    Args:
        index: finds documents; None makes one of ``corpus``.

    Raises:
        ValueError: a setting makes no sense, an example lacks a key, or documents are to be found and a row names none.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        index: SearchIndex | None = None,
        *,
        corpus: Annotated[
            str | Path | None,
            means("documents: JSON (title -> sentences) or JSONL (title, text); null: those next to the questions"),
        ] = None,
        exact_match: Annotated[float, weight("the final answer is the gold answer")] = 1.0,
        f1: Annotated[float, weight("share of words in common with the gold answer")] = 1.0,
        supporting_recall: Annotated[float, weight("share of the supporting documents that were shown")] = 0.0,
        results: Annotated[int, means("documents that a search shows", ge=1)] = 3,
        max_result_chars: Annotated[int, means("characters of a document that a search shows", ge=1)] = 500,
        form: Annotated[Form, form_of("searches", "Search: Jane Austen")] = "line",
        tool_role: ToolRole = "tool",
        system_prompt: Annotated[
            str | None, means("system message, in which {call} becomes a search in that form; null: none")
        ] = SYSTEM_PROMPT,
        examples: Annotated[Sequence[Mapping[str, Any]], means("turns before the question")] = EXAMPLES,
    ) -> None:
        weights = {"exact_match": exact_match, "f1": f1, "supporting_recall": supporting_recall}
        if not supporting_recall:
            # A part that is always 0 would look as if nothing was found.
            del weights["supporting_recall"]
        tool = Tool("search", "query", "author of the novel Emma", self._search, "Finds documents about a subject.")
        super().__init__(rows, tool, weights, form, tool_role, system_prompt, examples)
        bare = next((index for index, row in enumerate(rows) if not row["documents"]), None)
        if supporting_recall and bare is not None:
            where = tables.place_of(rows, bare)
            raise ValueError(f"{where} names no supporting facts; set env.reward.supporting_recall=0")
        self.reward_parts = tuple(weights)
        self.correct_part = "exact_match"
        self._results, self._max_chars = results, max_result_chars
        self._index = index or SearchIndex(load_corpus(corpus))

    @override
    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        gold = row["answer"]
        if not normalize_answer(gold):
            raise Unjudgeable(f"the gold answer {gold!r} has no word but articles; give another, or leave the row out")
        _, replies, final = self._turns(messages)
        inside = last_answer(final)
        answer = final if inside is None else inside
        earned = {"exact_match": float(exact_match(answer, gold)), "f1": f1(answer, gold)}
        recall = _supporting_recall(row, replies)
        return Reward({name: weight * (earned | recall)[name] for name, weight in self._weights.items()}, recall)

    def final_answers(self, responses: Sequence[str]) -> list[str | None]:
        """The answer of each conversation's last message, normalised; one that ends on a search states none."""
        finals = [self._final(response) for response in responses]
        inside = [last_answer(final) for final in finals]
        found = [final if answer is None else answer for final, answer in zip(finals, inside, strict=True)]
        return [normalize_answer(answer) or None for answer in found]

    def gold(self, row: dict) -> str | None:
        """The gold answer."""
        return row["answer"]

    def _search(self, query: str) -> str:
        found = self._index.search(query, self._results)
        if not found:
            return "Error: no document has a word of this query; search with other words"
        lines = [(_line(title, MAX_TITLE_CHARS), _line(text, self._max_chars)) for title, text in found]
        return "\n".join(f"Title: {title}\nText: {text}" for title, text in lines)


def _supporting_recall(row: dict, replies: Sequence[str]) -> dict[str, float]:
    """The share of the row's documents that searches showed; empty where it names none."""
    wanted = {_line(title, MAX_TITLE_CHARS) for title in row["documents"]}
    if not wanted:
        return {}
    shown = {title for reply in replies for title in _TITLE.findall(reply)}
    return {"supporting_recall": len(wanted & shown) / len(wanted)}


def _line(text: str, max_chars: int) -> str:
    r"""The text in one line, cut between words where it is too long.

    >>> _line("A river in\n South America", 12)
    'A river in …'
    """
    # Cut first: a document may be a book.
    line = " ".join(text[: 4 * max_chars].split())
    return line if len(line) <= max_chars else f"{line[: max_chars + 1].rpartition(' ')[0] or line[:max_chars]} …"


def load_rows(
    path: AnySource = None,
    split: str = "train",
    *,
    held_out: Annotated[float, means("share of `path` that is kept for evaluation", ge=0, lt=1)] = 0.0,
) -> Sequence[dict]:
    """Questions with ``question``, ``answer`` and ``documents``, the titles of their supporting facts.

    They are of HotpotQA's JSON file, of rows with the same columns, where ``supporting_facts`` may be left out, or of
    ``hotpotqa/hotpot_qa`` (distractor) of the hub, whose validation split is the test split.
    """
    source = Source.of(path)
    loaded = tables.load_rows(source, HUB_SPLITS[split], COLUMNS, hub=HUB_NAME)
    rows = [row.now(_question(row, row.where)) for row in loaded]
    if source.path is not None and held_out:
        chosen = set(random.Random(0).sample(range(len(rows)), round(held_out * len(rows))))
        rows = [row for index, row in enumerate(rows) if (index in chosen) == (split == "test")]
    if not rows:
        raise ValueError(f"no row of {source.path or HUB_NAME} is left for {split} at env.held_out={held_out}")
    return rows


def _question(row: dict, where: str) -> dict:
    row = tables.checked_row(row, TEXTS, where)
    facts = row.get("supporting_facts") or []
    try:
        # The hub turns the file's list of pairs into a pair of lists.
        titles = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
        documents = list(dict.fromkeys(title.strip() for title in titles))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{where}: supporting_facts is {str(facts)[:80]}; it must be [[title, sentence], …]") from None
    return {"question": row["question"], "answer": row["answer"], "documents": documents}


SearchQAEnv = TaskSpec(SearchQA, load_rows, row_settings=("held_out",), beside="corpus", hub=HUB_NAME.partition(":")[0])
"""Questions with a search tool as a TorchRL environment, of several turns."""


def normalize_answer(text: str) -> str:
    """The text in lower case, without ASCII punctuation, articles and spare spaces, as SQuAD and HotpotQA compare.

    Source: https://github.com/hotpotqa/hotpot/blob/master/hotpot_evaluate_v1.py

    >>> normalize_answer("The  U.S. Army, an army")
    'us army army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> bool:
    """True if both are the same once normalised."""
    return normalize_answer(prediction) == normalize_answer(gold)


def f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over normalised words; ``yes`` and ``no`` are right or wrong as a whole.

    Source: as :func:`normalize_answer`.

    One word of two is right, and the gold answer's only one is found: precision 1/2, recall 1.

    >>> round(f1("Barack Obama", "Obama"), 3), f1("yes, it is", "yes")
    (0.667, 0.0)
    """
    predicted, wanted = normalize_answer(prediction), normalize_answer(gold)
    if predicted != wanted and {predicted, wanted} & {"yes", "no", "noanswer"}:
        return 0.0
    predicted_words, wanted_words = predicted.split(), wanted.split()
    same = (Counter(predicted_words) & Counter(wanted_words)).total()
    return 2 * same / (len(predicted_words) + len(wanted_words)) if same else 0.0
