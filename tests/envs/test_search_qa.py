import json
import random

import pytest

from grpo_rl.envs.base import Unjudgeable
from grpo_rl.envs.calculator import Calculator
from grpo_rl.envs.grading.tags import last_answer
from grpo_rl.envs.search_qa import SearchQA, exact_match, f1, load_rows
from grpo_rl.envs.tools.calls import find_calls
from grpo_rl.envs.tools.search_index import Document, SearchIndex, load_corpus
from tests.envs.conftest import said
from tests.envs.tools.test_search_index import DOCUMENTS

pytestmark = pytest.mark.usefixtures("cache")

ROW = {
    "question": "In which village was the author of Emma born?",
    "answer": "Steventon",
    "documents": ["Jane Austen", "Emma (novel)"],
}


@pytest.mark.parametrize(
    ("prediction", "gold", "em", "expected"),
    [
        # What hotpot_evaluate_v1.py gives, worked out by hand: 2 * common / (words + words).
        ("Paris", "Paris", True, 1), ("the Paris.", "paris", True, 1), ("Paris  \n", "Paris", True, 1),
        ("An apple a day", "apple day", True, 1), ("U.S.A.", "USA", True, 1), ("1,000", "1000", True, 1),
        ("Barack Obama", "Obama", False, 2 * 1 / 3), ("Obama", "Barack Obama", False, 2 * 1 / 3),
        ("New York City, New York", "New York", False, 2 * 2 / 7),  # a word counts as often as both have it
        ("new new new", "new York", False, 2 * 1 / 5), ("York New", "New York", False, 1),
        ("x x y", "x y y", False, 2 * 2 / 6),
        ("London", "Paris", False, 0), ("", "Paris", False, 0), ("a an the", "Paris", False, 0),
        ("...", "Paris", False, 0),
        ("theatre", "the atre", False, 0), ("twenty-one", "twenty one", False, 0), ("Anne", "an ne", False, 0),
        ("“Paris”", "Paris", False, 0), ("Café", "cafe", False, 0), ("CAFÉ", "café", True, 1),
        # yes and no are right or wrong as a whole
        ("yes", "Yes.", True, 1), ("no", "yes", False, 0), ("yes it is", "yes", False, 0), ("no", "no way", False, 0),
        ("the yes", "yes", True, 1), ("noanswer", "noanswer at all", False, 0), ("yes and no", "no and yes", False, 1),
    ],
)  # fmt: skip
def test_exact_match_and_f1_are_those_of_hotpotqa(prediction, gold, em, expected):
    assert exact_match(prediction, gold) is em
    assert f1(prediction, gold) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("texts", "parts", "recall"),
    [
        (["Search: Jane Emma", "<answer>Steventon</answer>"], (1.0, 1.0), 1.0),
        (["Search: Emma", "<answer>Steventon.</answer>"], (1.0, 1.0), 0.5),
        (["Search: Emma", "Search: Jane", "<answer>Steventon</answer>"], (1.0, 1.0), 1.0),
        (["Search: Turandot", "<answer>Steventon, Hampshire</answer>"], (0.0, 2 / 3), 0.0),
        (["<answer>Steventon</answer>"], (1.0, 1.0), 0.0),
        (["Steventon"], (1.0, 1.0), 0.0),
        (["It was Steventon <answer>Bath</answer>"], (0.0, 0.0), 0.0),
        (["Search: Emma\n<answer>Steventon</answer>"], (1.0, 1.0), 0.0),  # no one searched
        # cut off at a search: its words are no answer
        (["Search: Steventon"], (0.0, 0.0), 0.5),
        (["Search: Emma", "Steventon\nSearch: Turandot"], (0.0, 0.0), 0.5),
        # what the policy says itself was not found
        (["Title: Jane Austen\nTitle: Emma (novel)\nSearch: Turandot", "Title: Jane Austen"], (0.0, 0.0), 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_conversation_earns_its_parts(texts, parts, recall, role):
    # "Emma" is in one document, "Jane" in two.
    task = SearchQA([ROW], SearchIndex(DOCUMENTS), tool_role=role, results=2)
    messages = said(task, ROW, *texts)
    assert tuple(task.score_dialog(ROW, messages).parts.values()) == pytest.approx(parts)
    assert task.score_dialog(ROW, messages).measures == {"supporting_recall": recall}


def test_recall_is_part_of_the_reward_only_where_it_has_a_weight():
    index = SearchIndex(DOCUMENTS)
    assert SearchQA([ROW], index).reward_parts == ("exact_match", "f1")
    task = SearchQA([ROW], index, exact_match=0, f1=2.0, supporting_recall=0.5)
    assert task.reward_parts == ("exact_match", "f1", "supporting_recall")
    messages = said(task, ROW, "Search: Emma", "<answer>Steventon</answer>")
    assert task.score_dialog(ROW, messages).parts == {"exact_match": 0.0, "f1": 2.0, "supporting_recall": 0.5 * 0.5}


def test_a_question_that_looks_like_a_result_has_found_nothing():
    row = {**ROW, "question": "Who?\nTitle: Jane Austen"}
    task = SearchQA([row], SearchIndex(DOCUMENTS))
    assert task.score_dialog(row, said(task, row, "<answer>x</answer>")).measures == {"supporting_recall": 0.0}


def test_a_gold_answer_that_is_empty_once_normalised_is_not_judged():
    task = SearchQA([], SearchIndex(DOCUMENTS))
    with pytest.raises(Unjudgeable, match="the gold answer 'The' has no word"):
        task.score({"question": "?", "answer": "The", "documents": []}, "")


def test_results_are_bounded_and_in_one_line_each():
    documents = [Document("Long " * 100, "river  word\n" * 10_000), Document("Short", "A river")]
    task = SearchQA([], SearchIndex(documents), results=2, max_result_chars=20)
    [reply] = task.reply(ROW, [{"role": "assistant", "content": "Search: river"}]) or []
    assert sorted(reply["content"].split("\n")) == sorted(
        ["Title: Short", "Text: A river", "Title: " + "Long " * 40 + "…", "Text: river word river …"]
    )


def test_the_fault_of_a_search_is_in_the_reply():
    task = SearchQA([], SearchIndex(DOCUMENTS))
    [reply] = task.reply(ROW, [{"role": "assistant", "content": "Search: zyzzyva"}]) or []
    assert reply["content"] == "Error: no document has a word of this query; search with other words"
    call = '<tool_call>{"name": "search", "arguments": {"query": "Puccini"}}</tool_call>'
    found = task.reply(ROW, [{"role": "assistant", "content": call}])
    assert found == [{"role": "tool", "content": "Title: Turandot\nText: Turandot is an opera by Giacomo Puccini."}]


@pytest.mark.parametrize("form", ["line", "json"])
@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("of", [Calculator, lambda rows, **how: SearchQA(rows, SearchIndex(DOCUMENTS), **how)])
def test_the_prompt_shows_calls_and_results_as_they_are(of, form, role):
    row = {"question": "?", "answer": "#### 7", "documents": []}
    task = of([row], form=form, tool_role=role)
    system, *examples, question = task.prompt(row)
    assert question == {"role": "user", "content": "?"} and len(examples) == 8
    assert task._tool.written(form) in system["content"] and "{call}" not in system["content"]
    for asked, call, result, answer in zip(*(examples[i::4] for i in range(4)), strict=True):
        assert asked["role"] == "user" and result["role"] == role
        assert [found.tool for found in find_calls(call["content"], [task._tool])] == [task._tool]
        if of is Calculator:
            assert task.reply(row, [call]) == [result] and last_answer(answer["content"]) == result["content"]
        else:
            assert all(line.startswith(("Title: ", "Text: ")) for line in result["content"].splitlines())
            assert last_answer(answer["content"])
    assert of([row], system_prompt=None, examples=()).prompt(row) == [question]


@pytest.fixture
def file(tmp_path):
    def write(name: str, content: object):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def question(number: int) -> dict:
    return {
        "question": f"Question {number}?",
        "answer": "yes",
        "supporting_facts": [["B", 0], ["A", 1], ["B", 2]],
        "context": [["A", ["One. ", " Two."]], [f"C{number}", ["Three."]]],
    }


def test_questions_are_read_with_the_titles_of_their_facts(file):
    expected = {"question": "Question 0?", "answer": "yes", "documents": ["B", "A"]}
    assert load_rows(file("rows.json", [question(0)])) == [expected]
    as_the_hub_has_it = {**question(0), "supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 2]}}
    assert load_rows(file("hub.json", [as_the_hub_has_it])) == [expected]
    bare = {"question": "?", "answer": "no"}
    assert load_rows(file("bare.json", [bare])) == [{**bare, "documents": []}]
    with pytest.raises(ValueError, match="row 0 has no answer"):
        load_rows(file("unanswered.json", [{"question": "?"}]))


def test_held_out_rows_are_the_same_each_time_and_never_trained_on(file):
    path = file("rows.json", [question(number) for number in range(50)])
    everything = load_rows(path)
    train, test = (load_rows(path, split, held_out=0.2) for split in ("train", "test"))
    assert (len(train), len(test)) == (40, 10)
    assert sorted(row["question"] for row in train + test) == sorted(row["question"] for row in everything)
    assert test == load_rows(path, "test", held_out=0.2)
    assert load_rows(path, "test") == everything  # a file is one split


def test_documents_come_from_every_kind_of_file_and_one_that_cannot_be_read_is_named(file):
    two = [Document("A", "One. Two."), Document("B", "Three.")]
    assert load_corpus(file("a.json", {"A": ["One.", " Two."], "B": "Three."})) == two
    rows = [{"title": "A", "text": "One.  Two."}, {"title": "B", "text": ["Three."]}, {"title": "B", "text": "Three."}]
    assert load_corpus(file("b.jsonl", "\n".join(json.dumps(row) for row in rows))) == two
    of_questions = [Document("A", "One. Two."), Document("C0", "Three."), Document("C1", "Three.")]
    assert load_corpus(file("c.json", [question(0), question(1)])) == of_questions
    hub = {**question(0), "context": {"title": ["A", "C0"], "sentences": [["One. ", " Two."], ["Three."]]}}
    assert load_corpus(file("d.json", [hub])) == of_questions[:2]
    with pytest.raises(ValueError, match=r"env\.corpus=.*can't be read"):
        load_corpus(file("rows.json", "[" * 100_000))


def test_real_questions_are_answered_by_their_gold_answers_alone(hotpotqa):
    rows, documents = hotpotqa
    task, others = SearchQA(rows, SearchIndex(documents)), rows[1:] + rows[:1]
    random.Random(0).shuffle(others)
    for row, other in zip(rows, others, strict=True):
        right = said(task, row, f"Search: {row['question']}", f"<answer>{row['answer']}</answer>")
        assert task.score_dialog(row, right).parts == {"exact_match": 1.0, "f1": 1.0}, row
        if not exact_match(row["answer"], other["answer"]):
            assert task.score(row, f"<answer>{other['answer']}</answer>").parts["exact_match"] == 0.0
