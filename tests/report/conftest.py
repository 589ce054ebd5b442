"""A real browser for the page's tests, where one is installed."""

from __future__ import annotations

import os
import shutil

import pytest


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
