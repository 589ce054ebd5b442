"""The page's groups, tokens and conversations in a real browser."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.held_out_log import HeldOutLog
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.monitor.step_parts import TOKENS_FOLDER, StepParts
from grpo_rl.monitor.token_log import SCHEMA
from grpo_rl.report import page as pages

pytestmark = pytest.mark.nightly

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>\x1b[2J\u202e<b>bold</b>"
SAID = ("Sum first.\nCalculator: 2+2", "\ntool\n4\nassistant\n", "<answer>4</answer>")


def response(group_id, reward, text, **more):
    return {
        "group_id": group_id,
        "row": group_id,
        "prompt": f"Prompt of row {group_id} {HOSTILE}",
        "completion": text,
        "answer": HOSTILE,
        "reward": reward,
        "reward_correct": reward,
        "reward_format": 0.0,
        "advantage": 0.5,
        "tokens": 3,
        "truncated": False,
        "policy_version": 1,
        "turn_ends": [len(text)],
    } | more


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A run of two steps of two groups: rewards 1, 3, 2 in the first, all 0.5 in the second."""
    run = tmp_path_factory.mktemp("run")
    metrics, completions = MetricsLog(run), CompletionsLog(run)
    ends = [len(SAID[0]), len(SAID[0]) + len(SAID[1]), sum(map(len, SAID))]
    for step in (1, 2):
        first, second = 2 * step, 2 * step + 1
        rows = [
            response(first, reward, f"{name} of step {step}")
            for name, reward in zip("abc", (1.0, 3.0, 2.0), strict=True)
        ]
        rows += [response(second, 0.5, HOSTILE, truncated=True), response(second, 0.5, "".join(SAID), turn_ends=ends)]
        completions.log(step, rows)
        metrics.log(step, {"reward/mean": 1.0})
        texts = [" four", HOSTILE, "\n", "<|end|>"]
        tokens = [
            {
                "step": step,
                "group_id": first,
                "response": 1,
                "position": i,
                "token_id": 40 + i,
                "text": text,
                "special": text == "<|end|>",
                "trainable": i != 2,
                "policy_version": step + (i > 2),
                "sampler_log_prob": None if i == 2 else -0.6931 - i,
                "log_prob": -0.75 - i,
                "entropy": 1.25,
            }
            for i, text in enumerate(texts)
        ]
        StepParts(run / TOKENS_FOLDER).write(step, pa.Table.from_pylist(tokens, schema=SCHEMA))
    for step, rewards in ((0, [0.0, 1.0]), (2, [3.0, 1.0])):
        evaluation = SimpleNamespace(
            rewards=rewards,
            prompts=[HOSTILE, "second prompt"],
            completions=[f"{HOSTILE} at {step}", f"second at {step}"],
            lengths=[4, 5],
            truncated=[False, True],
        )
        HeldOutLog(run).write(step, evaluation, [HOSTILE, None])
    return pages.write_report(run).resolve().as_uri()


@pytest.fixture
def tab(browser, url):
    """The page, opened; afterwards nothing has run that came from a text, and nothing was complained of."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    tab, complaints = context.new_page(), []
    tab.on("console", lambda said: complaints.append(said.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(url)
    tab.wait_for_selector("body[data-ready]")
    yield tab
    assert complaints == [] and tab.evaluate("window.hacked") is None
    assert tab.locator("main img, main b:text('bold')").count() == 0
    context.close()


def test_hostile_texts_are_shown_as_text(tab):
    shown = HOSTILE.replace("\x1b[2J\u202e", "")  # what moves a cursor or turns text around is left out
    assert tab.locator("#responses .prompt pre").inner_text() == f"Prompt of row 2 {shown}"
    assert tab.locator("#responses .gold").inner_text() == f"Gold answer: {shown}"
    assert shown in tab.locator("#held_out").inner_text() and shown in tab.locator("#tokens .strip").inner_text()
    tab.get_by_label("Search in texts").fill("<img")
    assert "<img" in tab.locator("#responses mark").first.inner_text()


def test_a_conversation_tells_calls_results_and_what_is_trained_on_apart(tab):
    tab.locator("#responses").get_by_label("Group", exact=True).select_option(index=1)
    turns = tab.locator("#responses article").nth(1).locator(".turn")
    assert turns.count() == 3
    assert turns.locator(".role").all_inner_texts() == [
        "policy · trained on",
        "tool · read, not trained on",
        "policy · trained on",
    ]
    assert turns.nth(0).locator(".call").inner_text() == "Calculator: 2+2"
    assert turns.nth(1).locator("pre").inner_text() == "4"  # without the words of the chat template
    assert (
        turns.nth(2).locator("pre").inner_text() == "<answer>4</answer>" and turns.nth(2).locator(".call").count() == 0
    )
