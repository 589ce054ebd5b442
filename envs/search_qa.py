"""Questions with a search tool over a corpus of one's own: several searches, then an answer, judged by EM and F1."""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_rl.envs import tables
from grpo_rl.envs.base import LLMEnv, Messages, Reward, Task, Unjudgeable
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.search_index import HUB_NAME, HUB_SPLITS, Document, SearchIndex, load_corpus
from grpo_rl.envs.tools import Tool, answer_calls, check_settings, is_final, opening

__all__ = ["Document", "SearchIndex", "SearchQA", "SearchQAEnv", "exact_match", "f1", "load_corpus", "load_rows"]

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
MAX_TITLE_CHARS = 200

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TITLE = re.compile(r"^Title: (.*)$", re.MULTILINE)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and spare spaces, as SQuAD and HotpotQA compare answers.

    Source: https://github.com/hotpotqa/hotpot/blob/master/hotpot_evaluate_v1.py

    >>> normalize_answer("The  U.S. Army, an army")
    'us army army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> bool:
    """Whether both are the same once normalised."""
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


class SearchQA(Task):
    """Questions with a search tool; a conversation earns ``exact_match`` and ``f1``.

    What is judged is inside the last message's last ``<answer>…</answer>``, else all of that message; a conversation
    that was cut off at a search has no answer.

    Args:
        rows: ``question``, ``answer``, and ``documents``: titles of those that the answer follows from, may be empty.
        index: finds documents.
        exact_match: paid where the answer is the gold answer, see :func:`exact_match`.
        f1: paid by the share of common words, see :func:`f1`.
        supporting_recall: paid by the share of ``documents`` that were shown; at 0 it is no part of the reward, and
            measured all the same.
        results: documents that a search shows.
        max_result_chars: of each document's text.
        form: in which the prompt shows a search, see `grpo_rl.envs.tools`; both forms are read.
        tool_role: of results: ``tool``, or ``user`` for chat templates that know no such role.
        system_prompt: the first message, with ``{call}`` where a search stands; None or an empty text leaves it out.
        examples: ``question``, ``call``, ``result`` and ``answer`` of answered questions, shown as earlier turns.

    Raises:
        ValueError: a setting makes no sense, an example lacks a key, or documents are to be found and a row names none.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        index: SearchIndex,
        *,
        exact_match: float = 1.0,
        f1: float = 1.0,
        supporting_recall: float = 0.0,
        results: int = 3,
        max_result_chars: int = 500,
        form: str = "line",
        tool_role: str = "tool",
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = EXAMPLES,
    ) -> None:
        self._weights = {"exact_match": exact_match, "f1": f1, "supporting_recall": supporting_recall}
        check_settings(form, tool_role, self._weights)
        if results < 1 or max_result_chars < 1:
            raise ValueError(f"env.results={results}, env.max_result_chars={max_result_chars}; both must be at least 1")
        if not supporting_recall:
            # A part that is always 0 would look as if nothing was found.
            del self._weights["supporting_recall"]
        elif bare := next((row["question"] for row in rows if not row["documents"]), None):
            raise ValueError(
                f"env.reward.supporting_recall={supporting_recall}, but {bare[:80]!r} names no supporting facts; set 0"
            )
        self.reward_parts = tuple(self._weights)
        self.rows, self._index = rows, index
        self._results, self._max_chars, self.reply_role = results, max_result_chars, tool_role
        self.tools = (Tool("search", "query", "author of the novel Emma", self._search),)
        self._before = opening(self.tools[0], form, tool_role, system_prompt, examples)

    def prompt(self, row: dict) -> Messages:
        """System prompt, examples, and the question."""
        return [*self._before, {"role": "user", "content": row["question"]}]

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        """What the searches in the last message find; None where it searches nothing, or answers."""
        return answer_calls(messages[-1]["content"], self.tools, self.reply_role)

    def score(self, row: dict, response: str) -> Reward:
        """The reward of a conversation of one message."""
        return self.score_dialog(row, [*self.prompt(row), {"role": "assistant", "content": response}])

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        """How well the last message answers.

        Raises:
            Unjudgeable: nothing is left of the gold answer when it is normalised, so that an empty answer would match.
        """
        gold = row["answer"]
        if not normalize_answer(gold):
            raise Unjudgeable(f"the gold answer {gold!r} has no word but articles; give another, or leave the row out")
        said = [message["content"] for message in self._after(messages) if message["role"] == "assistant"]
        final = said[-1] if said and is_final(said[-1], self.tools) else ""
        inside = last_answer(final)
        answer = final if inside is None else inside
        earned = {"exact_match": float(exact_match(answer, gold)), "f1": f1(answer, gold)}
        recall = self._supporting_recall(row, messages)
        return Reward({name: weight * (earned | recall)[name] for name, weight in self._weights.items()}, recall)

    def _supporting_recall(self, row: dict, messages: Messages) -> dict[str, float]:
        """The share of the row's documents that searches showed; empty where it names none."""
        wanted = {_line(title, MAX_TITLE_CHARS) for title in row["documents"]}
        if not wanted:
            return {}
        replies = [message["content"] for message in self._after(messages) if message["role"] != "assistant"]
        shown = {title for reply in replies for title in _TITLE.findall(reply)}
        return {"supporting_recall": len(wanted & shown) / len(wanted)}

    def gold(self, row: dict) -> str | None:
        """The gold answer."""
        return row["answer"]

    def _after(self, messages: Messages) -> Messages:
        """What follows the prompt, whose examples are no words of the policy, and no documents found."""
        return messages[len(self._before) + 1 :]

    def _search(self, query: str) -> str:
        found = self._index.search(query, self._results)
        if not found:
            return "Error: no document has a word of this query; search with other words"
        return "\n".join(
            f"Title: {_line(title, MAX_TITLE_CHARS)}\nText: {_line(text, self._max_chars)}" for title, text in found
        )


def _line(text: str, max_chars: int) -> str:
    r"""The text in one line, cut between words where it is too long.

    >>> _line("A river in\n South America", 12)
    'A river in …'
    """
    # Cut first: a document may be a book.
    line = " ".join(text[: 4 * max_chars].split())
    return line if len(line) <= max_chars else f"{line[: max_chars + 1].rpartition(' ')[0] or line[:max_chars]} …"


class SearchQAEnv(LLMEnv):
    r"""Questions with a search tool as a TorchRL environment, of several turns.

    "If Gallu is a demon Lilu is what?" A policy that searches, reads and answers well earns 2:

    >>> row = {"question": "If Gallu is a demon Lilu is what?", "answer": "spirit", "documents": ["Alû", "Lilu"]}
    >>> task = SearchQA([row], SearchIndex([Document("Lilu", "A lilu is a spirit."), Document("Gallu", "A demon.")]))
    >>> messages = task.prompt(row) + [{"role": "assistant", "content": "Search: Lilu"}]
    >>> task.reply(row, messages)
    [{'role': 'tool', 'content': 'Title: Lilu\nText: A lilu is a spirit.'}]
    >>> messages += task.reply(row, messages) + [{"role": "assistant", "content": "<answer>A spirit</answer>"}]
    >>> reward = task.score_dialog(row, messages)
    >>> reward.parts, reward.measures
    ({'exact_match': 1.0, 'f1': 1.0}, {'supporting_recall': 0.5})

    Args:
        num_envs: prompts in flight.
        repeats: answers to each, the group size G.
        tokenizer: of the model that answers.
        path: see :func:`load_rows`.
        split: see :func:`load_rows`.
        held_out: see :func:`load_rows`.
        corpus: see :func:`~grpo_rl.envs.search_index.load_corpus`; None takes the documents beside the questions.
        results: see :class:`SearchQA`.
        max_result_chars: see :class:`SearchQA`.
        system_prompt: see :class:`SearchQA`.
        examples: see :class:`SearchQA`.
        form: see :class:`SearchQA`.
        tool_role: see :class:`SearchQA`.
        reward: weights of :class:`SearchQA`, as in the config's ``env.reward``.
        settings: of :class:`LLMEnv`, such as ``max_turns`` and ``seed``.
    """

    def __init__(
        self,
        num_envs: int,
        repeats: int,
        tokenizer: PreTrainedTokenizerBase,
        *,
        path: str | Path | None = None,
        split: str = "train",
        held_out: float = 0.0,
        corpus: str | Path | None = None,
        results: int = 3,
        max_result_chars: int = 500,
        system_prompt: str | None = SYSTEM_PROMPT,
        examples: Sequence[Mapping[str, str]] = EXAMPLES,
        form: str = "line",
        tool_role: str = "tool",
        reward: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        task = SearchQA(
            load_rows(path, split, held_out=held_out),
            SearchIndex(load_corpus(corpus or path)),
            results=results,
            max_result_chars=max_result_chars,
            system_prompt=system_prompt,
            examples=examples,
            form=form,
            tool_role=tool_role,
            **(reward or {}),
        )
        super().__init__(task, tokenizer, num_envs, repeats, **settings)


def load_rows(
    path: str | Path | None = None, split: str = "train", *, held_out: float = 0.0, seed: int = 0
) -> list[dict]:
    """Questions with ``question``, ``answer`` and ``documents``, the titles of their supporting facts.

    Args:
        path: HotpotQA's JSON file, or rows with the same columns in any form of `grpo_rl.envs.tables`;
            ``supporting_facts`` may be left out. None takes ``hotpotqa/hotpot_qa`` (distractor) from the hub.
        split: ``train`` or ``test``; the hub's validation split is the test split.
        held_out: fraction of a file's rows that is its test split; at 0 the file is one split.
        seed: of the choice of the rows held out.

    Raises:
        ValueError: there is no such file or split, the hub can't be reached, a row lacks a column, or a split is empty.
    """
    if split not in HUB_SPLITS:
        raise ValueError(f"there is no split {split!r}; there are {' and '.join(HUB_SPLITS)}")
    if not 0 <= held_out < 1:
        raise ValueError(f"env.held_out={held_out}; it must be at least 0 and less than 1")
    name = str(path or HUB_NAME)
    found = tables.load_rows(name, HUB_SPLITS[split], COLUMNS)
    rows = [_question(row, f"{name}, row {index}") for index, row in enumerate(found)]
    if path is not None and held_out:
        chosen = set(random.Random(seed).sample(range(len(rows)), round(held_out * len(rows))))
        rows = [row for index, row in enumerate(rows) if (index in chosen) == (split == "test")]
    if not rows:
        raise ValueError(f"no row of {name} is left for {split} at env.held_out={held_out}")
    return rows


def _question(row: Mapping, where: str) -> dict:
    for column in ("question", "answer"):
        if not isinstance(row.get(column), str):
            raise ValueError(f"{where} has no text {column}; its columns are {list(row)}; rename or add the column")
    facts = row.get("supporting_facts") or []
    try:
        # The hub turns the file's list of pairs into a pair of lists.
        titles = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
        documents = list(dict.fromkeys(title.strip() for title in titles))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{where}: supporting_facts is {str(facts)[:80]}; it must be [[title, sentence], …]") from None
    return {"question": row["question"], "answer": row["answer"], "documents": documents}
