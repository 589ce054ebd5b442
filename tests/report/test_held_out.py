import math

from grpo_rl.report import responses
from tests.report.runs import write_held_out


def test_rows_pair_the_first_and_the_last_evaluation(tmp_path):
    gold = ["4", None, "6"]
    write_held_out(tmp_path, 0, [0.0, 1.0, math.nan], gold, "before")
    write_held_out(tmp_path, 5, [9.0, 9.0, 9.0], gold, "between")
    write_held_out(tmp_path, 9, [2.0, 0.5, 1.0], gold, "after")
    data = responses.build_held_out(tmp_path)
    assert data["steps"] == [0, 9] and (data["better"], data["worse"], data["same"]) == (1, 1, 0)
    assert [row["gain"] for row in data["rows"]] == [2.0, -0.5, None]  # a response without a reward gains nothing
    first = data["rows"][0]
    assert (first["prompt"], first["gold"]) == ("Prompt 0", "4")
    texts = [(one["step"], one["text"], one["reward"]) for one in first["responses"]]
    assert texts == [(0, "before 0", 0.0), (9, "after 0", 2.0)]
    assert data["rows"][2]["responses"][0]["reward"] is None
