from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from grpo_rl.monitor import report
from grpo_rl.monitor.charts import Chart, draw
from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.report import headline, write_report

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} \x1b[2J\u202e"


def make_run(run_dir: Path, steps: int = 40, evaluated: bool = True, hostile: str = "") -> Path:
    """A run folder as a quickstart leaves it: a small model that learns the format first and the sums later."""
    rng = random.Random(0)
    metrics, completions = MetricsLog(run_dir), CompletionsLog(run_dir)
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "config.yaml").write_text(
        "env:\n  dataset: gsm8k\n  repeats: 8\nmodel:\n  name: HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "optimizer:\n  name: adamw\n  lr: 5.0e-05\ntrain:\n  optim_batch_size: 32\n  seed: 0\nresume: null\n"
    )
    (run_dir / ".hydra" / "overrides.yaml").write_text("- +experiment=quickstart\n- optimizer.lr=5e-5\n")
    if evaluated:
        metrics.log(0, {"eval/reward": 0.412})
    for step in range(1, steps + 1):
        learned = 1 / (1 + math.exp(-(step - 14) / 5))
        correct = 0.25 + 1.1 * learned + rng.gauss(0, 0.09)
        style = 0.2 + 0.75 * (1 - math.exp(-step / 6)) + rng.gauss(0, 0.03)
        sample_s, train_s = 4.2 + rng.random(), 6.5 + rng.random()
        metrics.log(
            step,
            {
                "reward/mean": correct + style,
                "reward/std": 0.8 - 0.4 * learned,
                "reward/correctness": correct,
                "reward/reasoning_format": style / 2,
                "reward/answer_format": style / 2,
                "reward/zero_std_fraction": 0.5 * abs(learned - 0.4),
                "advantage/mean": 0.0,
                "advantage/std": 0.93,
                "kl/ref": 0.03 * learned + 0.002 * rng.random(),
                "kl/sampler": 0.002 + 0.0004 * rng.random(),
                "entropy": 1.4 - 0.8 * learned + rng.gauss(0, 0.03),
                "loss/total": rng.gauss(0, 0.01),
                "loss/objective": rng.gauss(0, 0.01),
                "loss/kl": 0.001 * learned,
                "clip/low_fraction": 0.0,
                "clip/high_fraction": 0.004 * rng.random(),
                "ess": 0.99,
                "lr": 5e-5 * min(1, step / 4),
                "grad_norm": float("inf") if step == 21 else 1.1 + rng.gauss(0, 0.2),
                "response/mean_length": 62 - 20 * learned + rng.gauss(0, 2),
                "response/max_length": 96.0,
                "response/truncated_fraction": max(0.3 - 0.3 * learned + rng.gauss(0, 0.02), 0),
                "staleness/mean": 0.0,
                "staleness/max": 0.0,
                "mismatch/mean": 0.038 + rng.gauss(0, 0.002),
                "mismatch/max": 0.9 + rng.random() / 2,
                "throughput/sample_tokens_per_s": 2100 / sample_s,
                "throughput/train_tokens_per_s": 9000 / train_s,
                "time/sample_s": sample_s,
                "time/train_s": train_s,
                "time/score_s": 1.9 + rng.random() / 4,
                "time/sync_s": 0.3,
                "time/other_s": 0.4,
                "limit_fraction": 5.0 / (sample_s + train_s + 2.5),
                "limit_fraction/sample": 1.2 / sample_s,
                "limit_fraction/train": 3.7 / train_s,
            },
        )
        if evaluated and step % 10 == 0:
            metrics.log(step, {"eval/reward": 0.412 + 1.1 * learned})
        bare = "She has 3 boxes of 4 apples so 3 + 4 = 7 apples. The answer is 7 apples and so on and so on"
        tagged = "<reasoning>3 boxes of 4 apples are 12. 12 - 5 = 7.</reasoning>\n<answer>7</answer>"
        completions.log(
            step,
            [
                {
                    "group_id": 4 * step + g,
                    "row": 17 * step % 500 + g,
                    "prompt": "Solve the problem. Think inside <reasoning> and </reasoning>, then give the final "
                    "number inside <answer> and </answer>.\n"
                    "Tom has 3 boxes with 4 apples each and eats 5. How many are left?",
                    "completion": hostile or (tagged if learned > 0.5 else bare),
                    "answer": "7",
                    "reward": 3.0 if learned > 0.5 else 2.0,
                    "reward_correctness": 2.0,
                    "reward_reasoning_format": 0.5 if learned > 0.5 else 0.0,
                    "reward_answer_format": 0.5 if learned > 0.5 else 0.0,
                    "advantage": 0.5,
                    "tokens": 24,
                    "truncated": learned <= 0.5,
                    "policy_version": step - 1,
                }
                for g in range(4)
                for _ in range(2)
            ],
        )
    if evaluated:
        (run_dir / "summary.json").write_text(
            json.dumps(
                {
                    "eval_before": 0.412,
                    "eval_after": 1.508,
                    "eval_gain": 1.096,
                    "eval_gain_ci95": [0.957, 1.229],
                    "steps": steps,
                    "seconds": 541.7,
                    "versions": {"grpo_rl": "0.1.0", "torch": "2.13.0+cpu"},
                }
            )
        )
    return run_dir


class Page(HTMLParser):
    """The elements, attributes and visible text of a page, as a browser's parser sees them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.ids, self.words = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_whole_run_is_told_on_one_page(tmp_path):
    page = page_of(make_run(tmp_path))
    assert "SmolLM2-135M-Instruct trained with GRPO on gsm8k" in page.text
    assert "Held-out reward rose from 0.412 to 1.508: a gain of +1.096, 95 % interval +0.957 to +1.229." in page.text
    for title in (
        "Reward",
        "Held-out reward",
        "Reward parts",
        "Response length",
        "Cut-off and repetitive responses",
        "Entropy",
        "KL divergence",
        "Clipped tokens",
        "Gradient norm",
        "Sampler against trainer",
        "Throughput",
        "Time of a step",
        "Share of the machine's roofline",
    ):
        assert ("aria-label", f"{title} by step") in page.attributes, title
    assert "Step 1 " in page.text and "Step 40 " in page.text
    assert "+experiment=quickstart" in page.text and "optim_batch_size: 32" in page.text
    assert "torch 2.13.0+cpu" in page.text and "40 in 9:01" in page.text.replace("Steps 40", "40")


@pytest.mark.slow
def test_the_page_loads_nothing_and_is_small(tmp_path):
    html = write_report(make_run(tmp_path)).read_text()
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "image"} & set(page.tags)
    targets = [v for n, v in page.attributes if n in ("src", "href", "xlink:href", "data")]
    assert targets and all(target.startswith("#") for target in targets)
    assert not re.findall(r"url\((?!#)", html)
    assert len(html) < 400_000
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.slow
def test_responses_are_text_whatever_they_hold(tmp_path):
    html = write_report(make_run(tmp_path, steps=2, hostile=HOSTILE)).read_text()
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}" in page.text
    assert "\x1b" not in html and "\u202e" not in html
    assert "default-src 'none'" in html


@pytest.mark.slow
def test_a_run_killed_at_its_first_step_has_a_report(tmp_path):
    page = page_of(make_run(tmp_path, steps=1, evaluated=False))
    assert "One step was logged, with a training reward of" in page.text
    assert "up to step 1" in page.text and "Held-out reward by step" not in str(page.attributes)
    assert "Responses" in page.text and "early and late" not in page.text


def test_an_empty_folder_has_a_report(tmp_path):
    page = page_of(tmp_path)
    assert "No training step was logged." in page.text and "svg" not in page.tags


@pytest.mark.slow
def test_completions_that_cannot_be_read_are_left_out_and_named(tmp_path):
    make_run(tmp_path, steps=3)
    parts = sorted((tmp_path / "completions.parquet").glob("*.parquet"))
    whole = parts[-1].read_bytes()
    for damaged in (whole[: len(whole) // 2], b"rubbish", b"", whole[:40] + bytes(len(whole) - 80) + whole[-40:]):
        parts[-1].write_bytes(damaged)
        page = write_report(tmp_path).read_text()
        assert f"{parts[-1].name} can&#39;t be read" in page and "are left out" in page
        assert "Responses, early and late" not in page and "<h2>Responses</h2>" in page  # the first step's are there


def test_a_summary_that_is_none_is_named_with_the_remedy(tmp_path):
    make_run(tmp_path, steps=1)
    for rubbish in (b"{", b"\xff", b"[]"):
        (tmp_path / "summary.json").write_bytes(rubbish)
        with pytest.raises(ValueError, match=r"summary\.json (is not JSON|holds list).*; remove it"):
            write_report(tmp_path)


def test_one_response_of_each_group_is_shown_not_the_best(tmp_path):
    log = CompletionsLog(tmp_path)
    row = {
        "row": 0,
        "prompt": "p",
        "answer": None,
        "advantage": 0.0,
        "tokens": 1,
        "truncated": False,
        "policy_version": 0,
    }
    log.log(
        1,
        [
            row | {"group_id": g, "completion": f"group{g} response{i}", "reward": float(i)}
            for g in range(6)
            for i in range(3)
        ],
    )
    text = page_of(tmp_path).text
    assert re.findall(r"group\d response\d", text) == [f"group{g} response0" for g in range(4)]


@pytest.mark.parametrize(
    "interval, start",
    [
        ([0.1, 0.3], "Held-out reward rose"),
        ([-0.3, -0.1], "Held-out reward fell"),
        ([-0.1, 0.3], "Held-out reward went from 0.000 to 0.200: no clear change"),
    ],
)
def test_the_headline_claims_no_more_than_its_interval(interval, start):
    summary = {"eval_before": 0.0, "eval_after": 0.2, "eval_gain": 0.2, "eval_gain_ci95": interval}
    assert headline([], summary).startswith(start)


def test_without_evaluation_the_headline_compares_first_and_last_tenth():
    rows = [{"step": i, "reward/mean": float(i)} for i in range(20)]
    # Tenths of 20 steps: the mean of 0 and 1, and the mean of 18 and 19.
    assert headline(rows, {}) == "Training reward went from 0.5 to 18.5 in 20 steps."


def test_a_step_is_set_against_the_machines_limit_phase_by_phase(tmp_path):
    log = MetricsLog(tmp_path)
    for spent in (2.0, 4.0, 8.0):  # a step of 10 s, 12 s, 16 s; its floor is 6 s
        log.log(
            1,
            {
                "time/sample_s": spent,
                "time/score_s": 1e-6,  # no reference: the phase is there and has nothing to do
                "time/train_s": 7.0,
                "time/other_s": 1.0,
                "limit_fraction": 6.0 / (spent + 8.0),
                "limit_fraction/sample": 2.0 / spent,
                "limit_fraction/train": 4.0 / 7.0,
            },
        )
    page = page_of(tmp_path)
    assert "step 12 s, roofline 6 s: 50 %" in page.text
    assert "sample 4 s, roofline 2 s: 50 %" in page.text and "train 7 s, roofline 4 s: 57 %" in page.text
    assert "other 1 s" in page.text and "score" not in page.text.partition("A step against")[2]
    assert ("style", "width: 33.3%") in page.attributes  # 4 of 12 s
    assert "Of the machine's roofline 50%" in page.text


def test_a_floor_above_the_time_taken_stays_within_its_bar(tmp_path):
    MetricsLog(tmp_path).log(1, {"time/train_s": 1.0, "limit_fraction": 2.5, "limit_fraction/train": 2.5})
    page = page_of(tmp_path)
    assert "train 1 s, roofline 2.5 s: 250 %" in page.text
    assert {value for name, value in page.attributes if value.startswith("width: ")} == {"width: 100.0%"}


def svg_paths(svg: str) -> list[str]:
    return [e.get("d") for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path") if e.get("d")]


def test_a_long_run_is_drawn_with_few_points():
    rows = [{"step": i, "lr": math.sin(i)} for i in range(20_000)]
    drawing = draw(Chart("Rate", {"lr": "lr"}, ""), rows)
    assert drawing and len(drawing.svg) < 60_000


def test_a_non_finite_point_is_a_gap_in_the_line():
    rows = [{"step": i, "x": math.nan if i == 2 else float(i)} for i in range(5)]
    drawing = draw(Chart("X", {"x": "x"}, ""), rows)
    assert drawing and "nan" not in drawing.svg.lower()
    assert any(path.count("M") == 2 for path in svg_paths(drawing.svg))
    assert drawing.curves[0].ends == "0 → 4 (1 not finite)"


def test_a_chart_without_finite_values_is_left_out():
    assert draw(Chart("X", {"x": "x"}, ""), [{"step": 1, "x": math.nan}, {"step": 2}]) is None


def test_stacked_phases_add_up_where_a_phase_did_not_run():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": 1.0, "b": 2.0}, {"step": 3, "a": 1.0}]
    drawing = draw(Chart("T", {"a": "a", "b": "b"}, "", floor=0, stacked=True), rows)
    assert drawing and [curve.label for curve in drawing.curves] == ["a", "b"]


def test_colours_follow_the_page_theme():
    drawing = draw(Chart("X", {"x": "x"}, ""), [{"step": i, "x": float(i)} for i in range(3)])
    assert drawing and "var(--series-0)" in drawing.svg and "#fe01" not in drawing.svg


@pytest.mark.slow
def test_the_command_writes_the_page_and_refuses_what_is_no_run_folder(tmp_path, capsys):
    report.main([str(make_run(tmp_path / "run", steps=1))])
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "nothing")])
    assert "is not a run folder" in capsys.readouterr().err
