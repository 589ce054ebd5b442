import re
import runpy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_rl.envs.gsm8k import GSM8K, load_rows
from grpo_rl.envs.tools.arithmetic import calculate

EXPERIMENT = Path(__file__).parents[2] / "config" / "experiment" / "quickstart.yaml"


@pytest.fixture(scope="module", params=["quickstart-train", "quickstart-test"])
def rows(request) -> list[dict]:
    return load_rows(request.param)


def test_the_shipped_files_are_what_the_generator_writes():
    generator = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "quickstart.py"))
    for path, content in generator["files"]().items():
        assert path.read_bytes() == content.encode(), f"run python tools/quickstart.py: {path.name} is stale"


def test_every_equation_holds_and_uses_the_questions_numbers_in_order(rows):
    for row in rows:
        *lines, last = row["answer"].split("\n")
        numbers = [int(number) for number in re.findall(r"\d+", row["question"])]
        value = numbers[0]
        for line, number in zip(lines, numbers[1:], strict=True):
            expression, result = line.split(" = ")
            left, _, right = expression.split()
            assert (int(left), int(right)) == (value, number), row
            assert calculate(expression) == result and int(result) > 0, row
            value = int(result)
        assert last == f"#### {value}"


def test_a_gold_solution_earns_everything_in_the_quickstarts_config(rows):
    config = OmegaConf.load(EXPERIMENT)
    task = GSM8K(rows, examples=config.env.examples, system_prompt=None, **config.env.reward)
    for row in rows:
        assert task.score(row, row["answer"]).parts == {
            "correctness": 2.0, "reasoning_format": 0.5, "answer_format": 0.5
        }  # fmt: skip
        assert task.score(row, row["answer"].split("\n")[-1]).total == 2.5  # right, in form, without its steps
