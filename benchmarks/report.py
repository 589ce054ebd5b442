"""The page of a long run: its size, how long it takes to write, and when a browser paints it first.

``python benchmarks/report.py`` makes a run of 1,000 steps with 64 groups of 8 responses, writes its page, and opens it
in Chromium (see CONTRIBUTING.md) five times; without one, it gives the size alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import yaml

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.report.page import write_report

PARTS = ("correctness", "reasoning_format", "answer_format")
RUNS = 5
WORDS = (Path(__file__).parents[1] / "README.md").read_text().split()


def make_run(folder: Path, steps: int, groups: int, size: int) -> None:
    """Writes the logs of a run that learns: every metric of a synchronous run, and all of its responses."""
    rng, metrics, completions = random.Random(0), MetricsLog(folder), CompletionsLog(folder)
    config = {"model": {"name": "SmolLM2-135M-Instruct"}, "env": {"dataset": "gsm8k", "repeats": size}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    metrics.log(0, {"eval/reward": 0.4, "eval/standard_error": 0.03})
    for step in range(1, steps + 1):
        learned = 1 - math.exp(-5 * step / steps)
        names = [
            *("reward/mean", "reward/std", "reward/zero_std_fraction", "response/mean_length", "response/max_length"),
            *(f"reward/{part}" for part in PARTS),
            *(f"reward_distribution/{part}/p{p}" for part in ("total", *PARTS) for p in (10, 50, 90)),
            *("response/length_correlation", "response/repetition", "response/truncated_fraction"),
            *("advantage/mean", "advantage/std", "staleness/mean", "staleness/max", "kl/sampler", "kl/ref", "entropy"),
            *("loss/objective", "loss/kl", "loss/entropy", "loss/total", "clip/low_fraction", "clip/high_fraction"),
            *("ess", "grad_norm", "lr", "train/optimizer_steps", "mismatch/mean", "mismatch/max"),
            *(f"time/{phase}_s" for phase in ("sample", "score", "train", "sync", "other")),
            *("throughput/sample_tokens_per_s", "throughput/train_tokens_per_s", "memory/peak_gib"),
            *("limit_fraction", *(f"limit_fraction/{phase}" for phase in ("sample", "train", "sync"))),
        ]
        metrics.log(step, {name: learned + rng.gauss(0, 0.1) for name in names})
        if step % 50 == 0:
            metrics.log(step, {"eval/reward": 0.4 + learned, "eval/standard_error": 0.03})
        completions.log(step, [_response(rng, step, group, learned) for group in range(groups) for _ in range(size)])


def _response(rng: random.Random, step: int, group: int, learned: float) -> dict[str, object]:
    right = float(rng.random() < learned)
    text = " ".join(rng.choices(WORDS, k=60))
    return {
        "group_id": 1000 * step + group, "row": 64 * step + group, "prompt": " ".join(WORDS[group : group + 60]),
        "completion": text, "answer": "7", "reward": 2 * right, "reward_correctness": 2 * right, "advantage": right,
        "tokens": 90, "truncated": False, "policy_version": step - 1,
    }  # fmt: skip


def first_paint_ms(browser: object, url: str) -> dict[str, float]:
    """Milliseconds from the navigation's start to the first contentful paint, and to the whole page being filled."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(url)
    page.wait_for_selector("body[data-ready]", state="attached")
    found = page.evaluate(
        "new Promise((done) => new PerformanceObserver((list) => done({"
        "first_paint_ms: list.getEntriesByName('first-contentful-paint')[0].startTime, filled_ms: performance.now()"
        "})).observe({type: 'paint', buffered: true}))"
    )
    page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--size", type=int, default=8, help="responses of a group")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        make_run(run, options.steps, options.groups, options.size)
        begun = time.perf_counter()
        page = write_report(run)
        result = {"steps": options.steps, "groups": options.groups, "write_s": round(time.perf_counter() - begun, 2)}
        result["page_mb"] = round(page.stat().st_size / 1e6, 2)
        path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        if path:
            from playwright.sync_api import sync_playwright

            with sync_playwright() as started:
                browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
                runs = [first_paint_ms(browser, page.as_uri()) for _ in range(RUNS + 1)][1:]  # the first warms up
                browser.close()
            result |= {name: round(statistics.median(run[name] for run in runs)) for name in runs[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
