"""The commands `grpo-rl check-model` and `grpo-rl doctor`."""

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_rl.checks.check import OF_MACHINE, OF_RUN, Case, Finding, all_findings, child_process, shown
from grpo_rl.policies.before_loading import need
from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
from grpo_rl.settings.derived import total_steps
from grpo_rl.settings.schema import Settings

FOLDER = "hydra.run.dir="


def add_check_model(parser: argparse.ArgumentParser) -> None:
    """Checks line by line whether a model can be trained here, with remedies: whether it is scored exactly, its chat
    template, memory, the engine, sampler against trainer. Takes the overrides of `grpo-rl train` for one process.
    Exit code 1: there is something to do.
    """
    parser.usage = "grpo-rl check-model [options] NAME [overrides ...]"
    parser.add_argument("name", metavar="NAME", help="a local folder, or a name on the hub")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="that samples (inference_model.engine)")
    parser.add_argument("--quick", action="store_true", help="read no weights: gate, chat template and memory alone")
    parser.set_defaults(run_command=_check_model)


def _check_model(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if any(word.startswith(("model.name=", "mode=")) for word in overrides):
        raise ValueError("check-model takes the model as NAME, and looks at one process; leave model.name and mode out")
    cfg = compose_config(DEFAULT_CONFIG, overrides)
    cfg.model.name, cfg.mode = options.name, "sync"
    cfg.inference_model.engine = options.engine or cfg.inference_model.engine
    settings = Settings.read(cfg)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    checks = {name: OF_RUN[name] for name in ("model", "memory", *(() if options.quick else ("weights",)))}
    found = shown(all_findings(checks, Case(settings, Path(), options.quick)))
    if to_do := sum(finding.kind == "FIX" for finding in found):
        print(f"\n{options.name} can't be trained like this; to fix, above: {to_do}")
        return 1
    words = [f"model.name={options.name}"]
    words += [f"inference_model.engine={options.engine}"] if options.engine else []
    if settings.env.get("system_prompt"):
        words += [finding.override for finding in found if finding.override]
    loaded = any((finding.kind, finding.about) == ("OK", "weights") for finding in found)
    caveat = "" if loaded else ", as far as can be checked without weights"
    print(f"\nOK{caveat}. Train it: {shlex.join(['grpo-rl', 'train', *words, *overrides])}")
    return 0


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Checks within two minutes what a run with these overrides will need, cheapest first: versions, limits,
    folder, loggers, disk, devices, model, memory, data, rewards, the processes' sums, and on the model itself a push of
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
    parser.add_argument("--folder", type=Path, help="the run's folder, which all nodes must see")
    parser.set_defaults(run_command=_doctor)


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if not options.ray and (options.nodes or options.names):
        raise ValueError("--nodes and --names are about the cluster at --ray ADDRESS")
    began, found, has_config = time.monotonic(), [], bool(overrides or options.config_name or not options.ray)
    named = [word.removeprefix(FOLDER).strip("'\"") for word in overrides if word.startswith(FOLDER)]
    folder = Path(named[-1]) if named else options.folder or Path(time.strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    case = Case(None, folder, options.quick)
    if has_config:
        try:
            settings = _settings(options, overrides)
        except ValueError as error:
            found += shown([Finding("FIX", "config", str(error))])
        else:
            text = f"mode={settings.mode}, {total_steps(settings):,} steps of {settings.env.num_envs} x "
            found += shown([Finding("OK", "config", f"{text}{settings.env.repeats} responses")])
            case = replace(case, settings=settings)
    if options.ray:
        case, of_nodes = _nodes(options, case)
        found += of_nodes
    if has_config:
        with child_process(options.deadline_s) as run:
            found += shown(all_findings(OF_MACHINE | (OF_RUN if case.settings else {}), case, run))
    to_do = list(dict.fromkeys(finding.about for finding in found if finding.kind == "FIX"))
    skipped = sum(finding.kind == "SKIP" for finding in found)
    result = f"To fix: {', '.join(to_do)}" if to_do else "Nothing to fix"
    print(f"\n{result} ({time.monotonic() - began:.0f} s{f', {skipped} not looked at' if skipped else ''})")
    return int(bool(to_do))


def _settings(options: argparse.Namespace, overrides: Sequence[str]) -> Settings:
    """The settings of the run that is about to start."""
    cfg = compose_config(options.config_name or DEFAULT_CONFIG, overrides)
    mode = "async" if options.is_async or options.ray else "sync"
    if cfg.mode not in (None, mode):
        raise ValueError(f"mode={cfg.mode}: doctor is about mode=sync or, with --async, mode=async; leave mode out")
    cfg.mode, cfg.ray.address = mode, options.ray or cfg.ray.address
    return Settings.read(cfg)


def _nodes(options: argparse.Namespace, case: Case) -> tuple[Case, list[Finding]]:
    """The case on the cluster at ``--ray``, and the findings on its nodes."""
    need("ray", "--ray", "ray")
    from grpo_rl.checks.nodes import node_findings
    from grpo_rl.cluster.nodes import RayError, check_nodes, cluster, nodes

    expected = options.names.split(",") if options.names else options.nodes or 1
    try:
        with cluster(options.ray):
            check_nodes(expected, options.deadline_s, join_s=options.deadline_s)
            alive = nodes()
            for node in alive:
                print(f"{node.name} ({node.address}): {node.cpus:g} CPUs, {node.gpus:g} GPUs", flush=True)
            gpus, cpus = int(sum(node.gpus for node in alive)), int(sum(node.cpus for node in alive))
            case = replace(case, cluster=(gpus, cpus))
            found = node_findings(alive, case, options.folder, options.deadline_s)
            same = "" if any(finding.about == "node" for finding in found) else ", with the same packages"
            print(f"All {len(alive)} nodes answer{same}; {gpus} GPUs in all.")
            return case, shown(found)
    except RayError as error:  # such as a token that is not the cluster's
        raise ValueError(f"Ray at {options.ray} refuses: {' '.join(str(error).split())}") from error
