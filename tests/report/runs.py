"""Runs for the page's tests: a made one, its live page served, and single responses, tokens and held-out responses."""

import base64
import gzip
import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa

from grpo_rl.monitor import step_parts
from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.token_log import SCHEMA
from grpo_rl.report import page as pages
from grpo_rl.report import serve
from grpo_rl.training.evaluate import Evaluation

NAMES = json.loads((Path(__file__).parent / "metric_names.json").read_text())
"""Metrics of a line of an evaluation and of one of a step, as a real run has them (tests/run/test_run.py)."""


def unpacked(path: Path) -> str:
    """A page's file with its data as JSON."""
    html = path.read_text(encoding="utf-8")
    return re.sub('(?<=">)H4s[^<]+', lambda data: gzip.decompress(base64.b64decode(data[0])).decode(), html)


def make_run(run_dir: Path, steps: int = 40, evaluated: bool = True) -> Path:
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
        parts = {"reward_correct": 1.5, "reward_format": 0.5}
        responses = [response(4 * step + g, 2.0, truncated=g % 2 == 0, **parts) for g in range(4) for _ in range(2)]
        completions.log(step, responses)
    if evaluated:
        summary = {"eval_before": 0.412, "eval_after": 1.508, "eval_gain": 1.096, "eval_gain_ci95": [0.957, 1.229]}
        summary |= {"finished": True, "steps": steps, "seconds": 541.7}
        summary["versions"] = {"grpo_rl": "0.1.0", "torch": "2.13.0+cpu"}
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


@contextmanager
def served(run_dir: Path) -> Iterator[int]:
    """A run's live page is served; the server's port."""
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


def response(group_id, reward, text="4", **more):
    said = {"group_id": group_id, "row": group_id + 10, "prompt": f"Prompt {group_id}", "completion": text}
    judged = {"answer": "4", "reward": reward, "reward_correct": reward, "advantage": 0.0, "tokens": len(text)}
    return said | judged | {"truncated": False, "policy_version": 3} | more


def write_tokens(run_dir, step, responses, group_id=7):
    """Tokens of a group, a list of texts for each response: one that begins with ! was read, of one with ? only ids."""
    rows = [
        {
            "step": step,
            "group_id": group_id,
            "response": number,
            "position": position,
            "token_id": 100 + position,
            "text": None if text.startswith("?") else text.removeprefix("!"),
            "special": text.startswith("<|"),
            "trainable": not text.startswith("!"),
            "policy_version": 3 + (position > 0),
            "sampler_log_prob": None if text.startswith("!") else -0.5 - position,
            "log_prob": -0.75 - position,
            "entropy": 1.5,
        }
        for number, texts in enumerate(responses)
        for position, text in enumerate(texts)
    ]
    StepParts(run_dir / TOKENS_FOLDER).write(step, pa.Table.from_pylist(rows, schema=SCHEMA))


def write_held_out(run_dir, step, rewards, gold, said, prompt="Prompt"):
    prompts, texts = ([f"{text} {i}" for i in range(len(rewards))] for text in (prompt, said))
    evaluation = Evaluation(rewards, {}, {}, prompts, texts, [2] * len(rewards), [False] * len(rewards))
    step_parts.write_held_out(run_dir, step, evaluation, gold)
