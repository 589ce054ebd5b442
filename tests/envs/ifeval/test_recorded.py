"""2,690 answers of five models, with the verdicts that the reference scorer gave on another machine."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import langdetect
import pytest

from grpo_rl.envs.ifeval import load_rows
from grpo_rl.envs.ifeval.language import detect_language
from grpo_rl.envs.ifeval.task import parse, verdicts

pytestmark = pytest.mark.slow

# All 4 of 8,280 are langdetect's, which draws features from the text, and was not seeded when the verdicts were
# recorded: by the draw, the same text is one language or another. Here stand model, key, instruction, strict or loose,
# and our verdict; above each, what langdetect takes the deciding text for over 200 seeds.
DISAGREEMENTS = {
    # Names in capitals, of which it reads the first letters only: 89 times English, 108 German, 3 Somali.
    ("qwen2.5-7b-instruct", 3456, "change_case:english_capital", "strict"): True,
    # "ONE TWO SOFTWARE SOLUTIONS TWOBY TECH", without its last line: 165 times English, 35 Vietnamese.
    ("qwen2.5-7b-instruct", 3617, "change_case:english_capital", "loose"): True,
    # A list of three company names in bold, without the introduction: 68 times English, 132 Spanish.
    ("llama-3.1-8b-instruct", 3617, "change_case:english_capital", "loose"): True,
    # One Gujarati line with its reading in Latin letters: 39 times Gujarati, 161 Finnish.
    ("mistral-7b-instruct-v0.3", 3112, "language:response_language", "loose"): False,
}
ABOUT_LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}


@pytest.fixture(scope="module")
def rows(real_data) -> dict[int, dict]:
    return {row["key"]: row for row in load_rows(real_data / "ifeval" / "input_data.jsonl")}


@pytest.fixture(scope="module")
def recorded(real_data, rows) -> list[dict]:
    with open(real_data / "ifeval" / "recorded_verdicts.jsonl", encoding="utf-8") as lines:
        answers = [json.loads(line) for line in lines]
    assert len(answers) == 2690
    assert all(answer["instruction_id_list"] == rows[answer["key"]]["instruction_id_list"] for answer in answers)
    return answers


def judge(row: dict, answer: dict, kind: str) -> list[bool]:
    instructions = parse(row["instruction_id_list"], row["kwargs"], "a row")
    return verdicts(instructions, answer["response"], loose=kind == "loose")


@pytest.fixture(scope="module")
def ours(punkt, rows, recorded) -> list[dict[str, list[bool]]]:
    """Our verdicts on the recorded answers."""
    return [{kind: judge(rows[answer["key"]], answer, kind) for kind in ("strict", "loose")} for answer in recorded]


def test_the_recorded_verdicts_are_ours_but_for_those_that_are_explained(recorded, ours):
    differing = {}
    for kind in ("strict", "loose"):
        verdicts = 0
        for theirs, mine in zip(recorded, ours, strict=True):
            verdicts += len(theirs[kind])
            for name, one, other in zip(theirs["instruction_id_list"], theirs[kind], mine[kind], strict=True):
                if one != other:
                    differing[theirs["model"], theirs["key"], name, kind] = other
        assert verdicts == 4140
        assert sum(key[-1] == kind for key in differing) <= verdicts / 1000
    assert differing == DISAGREEMENTS


def test_verdicts_do_not_depend_on_threads_order_or_other_seeds(recorded, ours, rows):
    chosen = [at for at, answer in enumerate(recorded) if ABOUT_LANGUAGE & set(answer["instruction_id_list"])][::3]
    assert len(chosen) > 80
    random.Random(0).shuffle(chosen)
    detect_language.cache_clear()
    random.seed(1)
    seed, langdetect.DetectorFactory.seed = langdetect.DetectorFactory.seed, 7
    try:
        with ThreadPoolExecutor(8) as pool:
            again = pool.map(lambda at: judge(rows[recorded[at]["key"]], recorded[at], "loose"), chosen)
            assert list(again) == [ours[at]["loose"] for at in chosen]
    finally:
        langdetect.DetectorFactory.seed = seed


@pytest.mark.nightly
def test_another_process_with_other_hashes_gives_the_same_languages():
    # Names in capitals: which language this is hangs on the draw.
    names = ["ALICE", "BRIAN", "CAROLINE", "DAVID", "EVELYN", "FIONA", "GEORGE", "HANNAH", "IAN", "JULIA"]
    texts = [" ".join(names[start::step]) for step in (1, 2, 3) for start in range(step + 2)]
    code = f"from grpo_rl.envs.ifeval.language import detect_language; print([detect_language(x) for x in {texts}])"
    hashes = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"}
    there = subprocess.run([sys.executable, "-c", code], env=hashes, capture_output=True, text=True, check=True).stdout
    here = [detect_language(text) for text in texts]
    assert there == f"{here}\n"
    assert len(set(here)) > 2
