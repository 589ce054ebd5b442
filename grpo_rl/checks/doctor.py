"""The command `grpo-rl doctor`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_rl.checks.check import Case
    from grpo_rl.checks.finding import Finding

FOLDER = "hydra.run.dir="


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Checks within two minutes what a run with these overrides will need, from cheap to dear: versions, limits,
    loggers, folder, disk, devices, model, memory, data, rewards, the processes' sums, and on the model itself a push of
    changed weights and sampler against trainer. Each line is OK, a note, FIX with what to do, or SKIP with the reason;
    what hangs is named. With --ray every node is there, responds and is checked; the config too, where overrides are
    given. Exit code 1: there is something to fix; 2: a node, which is named, is missing, silent or different.
    """
    parser.usage = "grpo-rl doctor [--async] [--quick] [--ray ADDRESS --nodes N] [overrides ...]"
    parser.add_argument("--async", dest="is_async", action="store_true", help="of a run of `grpo-rl train --async`")
    parser.add_argument("--quick", action="store_true", help="read no weights: leave out engine, push and sampling")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="the config to start from, as for training")
    text = "longest time of all checks, and with --ray also of the wait for the nodes (120)"
    parser.add_argument("--deadline-s", type=float, default=120.0, metavar="S", help=text)
    parser.add_argument("--ray", metavar="ADDRESS", help="host:port of the head, or auto on a node of it")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--nodes", type=int, metavar="N", help="number of nodes to expect (1)")
    who.add_argument("--names", metavar="A,B,...", help="or their names, as given to `ray start --node-name`")
    parser.add_argument("--folder", type=Path, help="folder that all nodes must see: the run's, or its parent")
    parser.set_defaults(run_command=_doctor)


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from grpo_rl.checks.check import child_process, findings_of
    from grpo_rl.checks.sequence import checks_of

    if options.ray is None and (options.nodes or options.names or options.folder):
        raise ValueError(
            "--nodes, --names and --folder are about the cluster at --ray ADDRESS; this run's own folder is "
            f"{FOLDER}FOLDER"
        )
    if not options.deadline_s > 0:
        raise ValueError(f"--deadline-s {options.deadline_s:g}: give a number of seconds above 0")
    began = time.monotonic()
    case, found = _case(options, overrides)
    if options.ray:
        from dataclasses import replace

        resources, more = _nodes(options, case)
        found += more
        if not (overrides or options.config_name):
            return _told(found, time.monotonic() - began)
        case = replace(case, cluster=resources)
    with child_process(options.deadline_s) as run:
        found += _shown(findings_of(checks_of(case), case, run))
    return _told(found, time.monotonic() - began)


def _case(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Case, list[Finding]]:
    """The run that is about to start; without settings where they can't be read, which is told."""
    from grpo_rl.checks.check import Case
    from grpo_rl.checks.finding import Finding
    from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
    from grpo_rl.settings.derived import total_steps
    from grpo_rl.settings.schema import Settings

    named = [word.removeprefix(FOLDER).strip("'\"") for word in overrides if word.startswith(FOLDER)]
    folder = Path(named[-1] if named else time.strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    folder, is_named = (options.folder, True) if options.folder and not named else (folder, bool(named))
    if options.ray and not (overrides or options.config_name):
        return Case(None, folder, is_named, options.quick), []
    try:
        cfg = compose_config(options.config_name or DEFAULT_CONFIG, overrides)
        mode = "async" if options.is_async or options.ray else "sync"
        if cfg.mode == "sft":
            raise ValueError("doctor is about sampling beside training, and mode=sft samples nothing")
        if cfg.mode not in (None, mode):
            raise ValueError(f"mode={cfg.mode}: leave it out, and give --async where it is async")
        cfg.mode = mode
        if options.ray:
            cfg.ray.address = options.ray
        if cfg.resume == "auto" and named:
            cfg.resume = str(folder) if folder.exists() else None
        settings = Settings.read(cfg)
    except ValueError as error:
        return Case(None, folder, is_named, options.quick), _shown([Finding("FIX", "config", str(error))])
    text = f"mode={mode}, {total_steps(settings):,} steps of {settings.env.num_envs} x {settings.env.repeats} responses"
    return Case(settings, folder, is_named, options.quick), _shown([Finding("OK", "config", text)])


def _nodes(options: argparse.Namespace, case: Case) -> tuple[tuple[int, int], list[Finding]]:
    """GPUs and CPUs of the cluster at ``--ray``, and the findings on its nodes."""
    try:
        from grpo_rl.cluster.doctor import examined
    except ImportError as error:
        raise ValueError(f"Ray is not installed ({error}); install the extra `ray`") from None
    from grpo_rl.checks.nodes import node_findings

    expected = options.names.split(",") if options.names else options.nodes or 1
    with examined(options.ray, expected, options.folder, options.deadline_s) as alive:
        for node in alive:
            print(f"{node.name} ({node.address}): {node.cpus:g} CPUs, {node.gpus:g} GPUs")
        gpus, cpus = (int(sum(of)) for of in zip(*((node.gpus, node.cpus) for node in alive), strict=True))
        print(f"All {len(alive)} nodes answer, with the same packages; {gpus} GPUs in all.", flush=True)
        return (gpus, cpus), _shown(node_findings(alive, case, options.folder is not None, options.deadline_s))


def _shown(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, each printed as soon as it is there."""
    found = []
    for finding in findings:
        print(finding, flush=True)
        found.append(finding)
    return found


def _told(found: Sequence[Finding], seconds: float) -> int:
    to_do = list(dict.fromkeys(finding.about for finding in found if finding.kind == "FIX"))
    skipped = sum(finding.kind == "SKIP" for finding in found)
    also = f", {skipped} not looked at" if skipped else ""
    if to_do:
        print(f"\nTo fix: {', '.join(to_do)} ({seconds:.0f} s{also})")
        return 1
    print(f"\nNothing to fix ({seconds:.0f} s{also})")
    return 0
