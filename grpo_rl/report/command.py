"""``grpo-rl report``: the page of a run written again or live, the comparison of several, and the demo."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from grpo_rl.loopback import LOOPBACK
from grpo_rl.report.serve import LivePage, make_server
from grpo_rl.storage.whole_file import write_whole

COMPARISON = "comparison.html"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Writes the page of a run, RUN/report.html, again; of several runs comparison.html in this folder, and of a sweep
    the report.html of its folder. With --serve the page is live while the run goes on, on this machine alone.
    """
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a run's folder, or that of a sweep")
    parser.add_argument("--serve", action="store_true", help="serve the page, and update it while the run goes on")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of --serve and --demo (a free one)")
    parser.add_argument("--demo", action="store_true", help="show a recorded run: a first look without training")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write the page to instead")
    parser.set_defaults(run_command=_report)


def _report(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ValueError(f"report takes no overrides such as {overrides[0]}; give run folders")
    if options.demo == bool(options.runs):
        raise ValueError("give the folder of a run, such as outputs/2026-01-31/12-00-00, or --demo")
    if options.output and (options.serve or options.demo):
        raise ValueError("--output writes a file, and --serve and --demo none; leave one out")
    if missing := [run for run in options.runs if not run.is_dir()]:
        raise ValueError(f"{missing[0]} is not a run folder; give one like outputs/2026-01-31/12-00-00")
    # Imported late: torch takes seconds, and neither help nor a usage error should wait for it.
    from grpo_rl.report import compare, demo, page
    from grpo_rl.report.files import REPORT

    with ExitStack() as stack:
        runs = options.runs
        if options.demo:
            runs = [demo.unpack(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-rl-demo-"))))]
        found = compare.run_folders(runs)
        if found == runs and len(runs) == 1:
            sections, head, source = page.SECTIONS, page.SUMMARY, runs[0]
            path = runs[0] / REPORT
        else:
            sections, head, source = compare.SECTIONS, compare.SUMMARY, found
            path = runs[0] / REPORT if len(runs) == 1 else Path(COMPARISON)
        build = partial(page.build, sections, source, head)
        if options.serve or options.demo:
            live = LivePage(build, partial(page.assemble, sections, live=True))
            return _serve(live, options.port, webbrowser.open if options.demo and _has_display() else None)
        write_whole(options.output or path, page.assemble(sections, build()))
    print(options.output or path)
    return 0


def _serve(live: LivePage, port: int, open_url: Callable[[str], object] | None) -> int:
    with make_server(live, port) as server:
        url = f"http://{LOOPBACK}:{server.server_address[1]}/"
        print(f"{url}  (on this machine alone; Ctrl-C ends)", flush=True)
        if open_url:
            open_url(url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0


def _has_display() -> bool:
    """True if a browser opens a window: without one, ``webbrowser`` may start one that takes the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
