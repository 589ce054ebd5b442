"""The page in a real browser: what is shown, what is asked of the network, and what hostile text comes to."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from itertools import pairwise

import pytest

from grpo_rl.monitor.completions import CompletionsLog
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.report import page as pages
from tests.report.runs import make_run, response, served, write_held_out, write_tokens

pytestmark = pytest.mark.nightly

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>\x1b[2J\u202e<b>bold</b>{{7*7}}"

LAYOUT_SHIFT = """new Promise((resolve) => {
  let sum = 0;
  const observer = new PerformanceObserver((list) => list.getEntries().forEach((entry) => { sum += entry.value; }));
  observer.observe({type: "layout-shift", buffered: true});
  setTimeout(() => resolve(sum), 300);
})"""
"""How far what was on screen has moved since the page was opened: the web's "cumulative layout shift"."""


class Tab:
    """A page opened, with what it asked for and complained of."""

    def __init__(self, page) -> None:
        self.page, self.requests, self.complaints = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, url: str) -> Tab:
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")
        return self

    def card(self, title: str):
        return self.page.locator("article.chart", has=self.page.locator(f'.title:text-is("{title}")'))  # may be folded


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


@pytest.fixture
def tab(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    yield Tab(context.new_page())
    context.close()


def url_of(run_dir) -> str:
    return pages.write_report(run_dir).resolve().as_uri()


def until(tab: Tab, condition: str) -> None:
    """Waits for a condition; playwright's own wait would evaluate text in the page, which its policy forbids."""
    deadline = time.monotonic() + 20
    while not tab.page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        tab.page.wait_for_timeout(50)


def test_the_page_of_a_run_asks_for_nothing_and_complains_of_nothing(tab, tmp_path):
    url = url_of(make_run(tmp_path))
    tab.open(url)
    assert tab.page.evaluate(LAYOUT_SHIFT) == 0
    levels = tab.page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((heading) => +heading.tagName[1])")
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels))
    tab.page.mouse.wheel(0, 6000)
    tab.page.wait_for_timeout(300)
    assert tab.requests == [url] and tab.complaints == []
    assert tab.page.locator("article.chart").count() == 42
    assert tab.page.locator("article.chart:visible").count() == 2  # subjects are folded until one is opened
    tab.page.locator("summary", has_text="Policy").click()
    tab.card("Gradient norm").locator(".uplot").wait_for()
    assert tab.page.get_by_role("heading", level=1).inner_text().startswith("Held-out reward rose")


def test_hostile_text_and_numbers_are_shown_as_text(tab, tmp_path):
    run = make_run(tmp_path, steps=3)
    (run / "config.yaml").write_text(json.dumps({"model": {"name": HOSTILE}, "long": "x" * 1_000_000}))
    (run / "overrides.yaml").write_text(json.dumps([HOSTILE]))
    MetricsLog(run).log(4, {"reward/mean": math.nan, "grad_norm": math.inf, f"reward/{HOSTILE}": 1.0})
    url = url_of(run)
    tab.open(url)
    tab.page.wait_for_timeout(300)
    assert tab.page.evaluate("window.hacked") is None
    assert tab.requests == [url] and tab.complaints == []
    assert tab.page.locator("img").count() == 0
    assert "<script>window.hacked=1</script>" in tab.page.locator("#configuration pre").inner_text()
    assert "(1 not finite)" in tab.card("Gradient norm").locator(".legend").text_content()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_live_page_follows_the_run_to_its_end(tab, tmp_path):
    with served(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/"
        tab.open(url)
        heading, live = tab.page.get_by_role("heading", level=1), tab.page.locator("#live")
        assert heading.inner_text() == "No training step was logged yet."
        log = MetricsLog(tmp_path)
        for step in range(1, 7):
            log.log(step, {"reward/mean": float(step)})
        until(tab, "document.querySelector('h1').textContent.startsWith('Training reward rose')")
        tab.card("Reward").locator(".uplot").wait_for()
        log.log(7, {"reward/mean": 7.0})
        until(tab, "document.querySelector('.plot').card.plot.data[0].at(-1) === 7")
        for name in ("Log scale: Reward", "Large: Reward"):
            tab.card("Reward").get_by_role("button", name=name).click()
        log.log(8, {"reward/mean": 8.0, "lr": 0.1})  # a metric that is new: the charts are made anew
        tab.card("Learning rate").wait_for(state="attached")
        tab.card("Reward").locator(".uplot").wait_for()
        assert tab.card("Reward").locator(".plot").evaluate("(node) => node.card.plot.scales.y.distr") == 3
        assert "wide" in tab.card("Reward").get_attribute("class")
        (tmp_path / "summary.json").write_text(json.dumps({"finished": True, "steps": 8, "seconds": 1.0}))
        until(tab, "document.querySelector('#live').textContent === 'The run has ended.'")
        assert live.is_visible() and tab.complaints == []
        assert all(request.startswith(url) for request in tab.requests)


SAID = ("Sum first.\nCalculator: 2+2", "\ntool\n4\nassistant\n", "<answer>4</answer>")


def hostile(group_id, reward, text, **more):
    of_prompt = {"prompt": f"Prompt of row {group_id} {HOSTILE}", "answer": HOSTILE}
    return response(group_id, reward, text, **{"turn_ends": [len(text)]} | of_prompt | more)


@pytest.fixture
def groups(tab, tmp_path):
    """The page of two steps of two groups, with rewards 1, 3, 2 and all 0.5; nothing that came from a text has run."""
    ends = [len(SAID[0]), len(SAID[0]) + len(SAID[1]), sum(map(len, SAID))]
    for step in (1, 2):
        first, second = 2 * step, 2 * step + 1
        rows = [hostile(first, reward, f"{reward} of step {step}") for reward in (1.0, 3.0, 2.0)]
        rows += [hostile(second, 0.5, HOSTILE, truncated=True), hostile(second, 0.5, "".join(SAID), turn_ends=ends)]
        CompletionsLog(tmp_path).log(step, rows)
        MetricsLog(tmp_path).log(step, {"reward/mean": 1.0})
        write_tokens(tmp_path, step, [[" four", HOSTILE, "!\n", "<|end|>"]], first)
    for step, rewards in ((0, [0.0, 1.0]), (2, [3.0, 1.0])):
        write_held_out(tmp_path, step, rewards, [HOSTILE, None], f"{HOSTILE} at {step}", HOSTILE)
    page = tab.open(url_of(tmp_path)).page
    yield page
    assert tab.complaints == [] and page.evaluate("window.hacked") is None
    assert page.locator("main img, main b:text('bold')").count() == 0


def test_hostile_texts_are_shown_as_text(groups):
    shown = HOSTILE.replace("\x1b[2J\u202e", "")  # what moves a cursor or turns text around is left out
    assert groups.locator("#responses .prompt pre").inner_text() == f"Prompt of row 2 {shown}"
    assert groups.locator("#responses .gold").inner_text() == f"Gold answer: {shown}"
    assert shown in groups.locator("#held_out").inner_text() and shown in groups.locator("#tokens .strip").inner_text()
    groups.get_by_label("Search in texts").fill("<img")
    assert "<img" in groups.locator("#responses mark").first.inner_text()


def test_a_conversation_tells_calls_results_and_what_is_trained_on_apart(groups):
    groups.locator("#responses").get_by_label("Group", exact=True).select_option(index=1)
    turns = groups.locator("#responses article").nth(1).locator(".turn")
    assert turns.count() == 3
    policy, tool = "policy · trained on", "tool · read, not trained on"
    assert turns.locator(".role").all_inner_texts() == [policy, tool, policy]
    assert turns.nth(0).locator(".call").inner_text() == "Calculator: 2+2"
    assert turns.nth(1).locator("pre").inner_text() == "4"  # without the words of the chat template
    assert turns.nth(2).locator("pre").inner_text() == "<answer>4</answer>"
    assert turns.nth(2).locator(".call").count() == 0
