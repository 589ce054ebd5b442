"""Fixtures of the page's tests: a made run, and a real browser where one is installed."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.report import page as pages
from grpo_rl.report import serve
from tests.report.stored import response

NAMES = json.loads((Path(__file__).parent / "metric_names.json").read_text())
"""Metrics of a line of an evaluation and of one of a step, as a real run has them (tests/run/test_run.py)."""


@pytest.fixture
def make_run():
    """A function that makes a run folder."""
    return _make_run


@pytest.fixture
def served():
    """A function of a run folder: a context in which its live page is served, with the server's port."""
    return _served


@contextmanager
def _served(run_dir: Path) -> Iterator[int]:
    build, assemble = partial(pages.build, pages.SECTIONS, run_dir), partial(pages.assemble, pages.SECTIONS, live=True)
    live = serve.LivePage(build, assemble, partial(serve.state_of, [run_dir]))
    with serve.make_server(live) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


# Not the session's: while Playwright's synchronous interface is open, its event loop counts as running, and no test of
# another module could run one.
@pytest.fixture(scope="module")
def browser():
    """A Chromium, from $CHROMIUM or the system; tests that need one are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; see CONTRIBUTING.md")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        pytest.skip("no Chromium on this machine; CONTRIBUTING.md says how to get one")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def _make_run(run_dir: Path, steps: int = 40, evaluated: bool = True) -> Path:
    """A run folder as a quickstart leaves it: all of its files and metrics, a few of which move."""
    metrics, completions = MetricsLog(run_dir), CompletionsLog(run_dir)
    (run_dir / "config.yaml").write_text(
        "env:\n  dataset: gsm8k\n  repeats: 8\nmodel:\n  name: HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "optimizer:\n  name: adamw\n  lr: 5.0e-05\ntrain:\n  optim_batch_size: 32\n  seed: 0\nresume: null\n"
    )
    (run_dir / "overrides.yaml").write_text("- +experiment=quickstart\n- optimizer.lr=5e-5\n")
    if evaluated:
        metrics.log(0, dict.fromkeys(NAMES["evaluation"], 0.5))
    for step in range(1, steps + 1):
        moving = {"total/trained_tokens": 9000.0 * step, "time/at_s": 16.0 * step, "reward/mean": step / steps}
        moving["grad_norm"] = math.inf if step == 21 else 1.1
        still = {"kl/ref": 0.02, "staleness/mean": 0.0, "staleness/max": 0.0}
        metrics.log(step, dict.fromkeys(NAMES["step"], 0.5) | moving | still)
        if evaluated and step % 10 == 0:
            metrics.log(step, dict.fromkeys(NAMES["evaluation"], 0.5))
        completions.log(step, [response(4 * step + g, 2.0) for g in range(4) for _ in range(2)])
    if evaluated:
        summary = {"eval_before": 0.412, "eval_after": 1.508, "eval_gain": 1.096, "eval_gain_ci95": [0.957, 1.229]}
        summary |= {"finished": True, "steps": steps, "seconds": 541.7}
        summary["versions"] = {"grpo_rl": "0.1.0", "torch": "2.13.0+cpu"}
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir
