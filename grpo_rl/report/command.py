"""``grpo-rl report``: the page of a run written again or live, the comparison of several, and the demo."""

import argparse
import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from grpo_rl.storage.whole_file import write_whole

RECORDED = Path(__file__).parent / "assets" / "demo.tar.xz"
"""A run of ``+experiment=quickstart``: 15 steps of SmolLM2-135M-Instruct on two CPU cores."""
NAME = "quickstart"


def unpack(folder: Path) -> Path:
    """Unpacks the recorded run into a folder, and returns the run's own folder there."""
    shutil.unpack_archive(RECORDED, folder, filter="data")
    return folder / NAME


def add_report(parser: argparse.ArgumentParser) -> None:
    """Writes the page of a run, RUN/report.html, again; of several runs comparison.html in this folder, and of a sweep
    the report.html of its folder. With --serve the page is live while the run goes on, on this machine alone.
    """
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a run's folder, or that of a sweep")
    parser.add_argument("--serve", action="store_true", help="serve the page, and update it while the run goes on")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of --serve and --demo (a free one)")
    parser.add_argument("--demo", action="store_true", help="show a recorded run: a first look without training")
    output = "file to write the page to, without --serve and --demo"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    parser.set_defaults(run_command=_report)


def _report(options: argparse.Namespace) -> int:
    if options.demo == bool(options.runs):
        raise ValueError("give the folder of a run, such as outputs/2026-01-31/12-00-00, or --demo")
    if options.port and not (options.serve or options.demo):
        raise ValueError("--port is of --serve and --demo; give one of them")
    if missing := [run for run in options.runs if not run.is_dir()]:
        raise ValueError(f"{missing[0]} is not a run folder; give one like outputs/2026-01-31/12-00-00")
    from grpo_rl.report import compare, page, serve
    from grpo_rl.report.files import REPORT

    with ExitStack() as stack:
        runs = options.runs
        if options.demo:
            runs = [unpack(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-rl-demo-"))))]
        found = compare.run_folders(runs)
        if found == runs and len(runs) == 1:
            sections, head, source = page.SECTIONS, page.SUMMARY, runs[0]
        else:
            sections, head, source = compare.SECTIONS, compare.SUMMARY, found
        build = partial(page.build, sections, source, head)
        if options.serve or options.demo:
            live = serve.LivePage(build, partial(page.assemble, sections, live=True), partial(serve.state_of, found))
            return serve.serve(live, options.port)
        path = options.output or (runs[0] / REPORT if len(runs) == 1 else Path("comparison.html"))
        write_whole(path, page.assemble(sections, build()))
    print(path)
    return 0
