"""The command line: `grpo-rl batches` draws a config's batches, `grpo-rl plan` says what it needs of a cluster,
`grpo-rl doctor` asks every node of one, `grpo-rl replay` puts a stored step under another loss, and `grpo-rl export`
writes the model of a checkpoint.

Wrong input is told in one line, with exit code 2; with 1 a command says that it found what it looks for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoTokenizer

from grpo_rl.build.training import make_advantages, make_loss
from grpo_rl.data.group import Group
from grpo_rl.monitor.lineage_reader import read_step
from grpo_rl.planner.advice import best_in_turns, best_overlapped, remedies, with_devices
from grpo_rl.planner.batches import plan_batches
from grpo_rl.planner.drawing import picture, svg
from grpo_rl.planner.hardware import Cluster
from grpo_rl.planner.plan import make_plan
from grpo_rl.planner.scenario import Scenario, config_source
from grpo_rl.planner.simulation import TAIL, simulate_plan
from grpo_rl.planner.table import plan_view, simulation_view
from grpo_rl.planner.time import SAMPLE_SHARE, TRAIN_SHARE
from grpo_rl.policies.hub import CONVERTED, DEFAULT_MODEL
from grpo_rl.policies.loading import skeleton
from grpo_rl.replay.replay import Objective, replay
from grpo_rl.replay.table import replay_view
from grpo_rl.run.export import export_checkpoint
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.declaration import plain, select
from grpo_rl.settings.derived import micro_batching, needs_old_log_probs
from grpo_rl.settings.schema import Settings
from grpo_rl.storage.cache import cache_folder

CONFIG = "grpo_gsm8k"
OF_A_LOSS = ("policy.kl_coef", "policy.entropy_coef")
"""Keys beside those of ``loss`` that a replay can change."""
OF_A_PLAN = ("cluster", "mode")
"""Words of a plan that are no keys of a config."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line; ``sys.argv`` where none is given."""
    parser = _parser()
    # Overrides may stand anywhere between the options, which argparse's own positionals may not.
    options, overrides = parser.parse_known_args(arguments)
    if unknown := [word for word in overrides if word.startswith("-") or "=" not in word.lstrip("~")]:
        parser.error(f"{unknown[0]!r} is neither an option nor an override such as env.repeats=8")
    try:
        return options.run_command(options, overrides)
    except (ValueError, OSError, HydraException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("grpo-rl", description="What belongs to training beside the training itself.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    response = "assumed length of a response (sampling.max_new_tokens)"
    batches = commands.add_parser(
        "batches",
        help="draw how prompts, responses, optimizer steps and micro-batches fit together",
        usage="grpo-rl batches [options] [overrides ...]",
        description="Draws how prompts, responses, optimizer steps, micro-batches, epochs and devices fit together in "
        "a config. Takes the overrides of `python sota/grpo.py`; loads no model and no data. Exit code 1: something "
        "does not divide, and the drawing shows where.",
    )
    batches.add_argument("--config-name", "-cn", default=CONFIG, help=f"the config to start from ({CONFIG})")
    batches.add_argument("--svg", type=Path, metavar="FILE", help="also write the picture there")
    batches.add_argument("--prompt-tokens", type=int, metavar="N", help="assumed length of a prompt")
    batches.add_argument("--response-tokens", "--answer-tokens", type=int, metavar="N", help=response)
    batches.add_argument("--gpus", type=int, metavar="N", help="plan for a machine with so many (those of this one)")
    batches.set_defaults(run_command=_batches)

    plan = commands.add_parser(
        "plan",
        help="say what a config needs of a cluster: memory and seconds, by role and device",
        usage="grpo-rl plan [options] [cluster=64xH100] [mode=sync|async] [overrides ...]",
        description="Says what fits on each device of a cluster, the largest micro-batch and context, the expected "
        "time of a step, and how to divide the devices. Takes the overrides of `python sota/grpo.py`; needs a model's "
        "config.json and no weights. cluster=64xH100, with numbers of your own cluster=64xH100,network_gb_s=25, or "
        "cluster=here, which measures this machine (the default). mode=async where there are several devices, unless "
        "it is given. Exit code 1: it does not fit, or no script runs it, and what to change is shown.",
    )
    plan.add_argument("--config-name", "-cn", default=CONFIG, help=f"the config to start from ({CONFIG})")
    plan.add_argument("--prompt-tokens", type=int, metavar="N", help="assumed length of a prompt in a step")
    plan.add_argument("--response-tokens", "--answer-tokens", type=int, metavar="N", help=response)
    share = "of the devices' rates that %s reaches: limit_fraction/%s of a run of one process in mode=sync (%s)"
    for phase, default in (("train", TRAIN_SHARE), ("sample", SAMPLE_SHARE)):
        text = share % (f"{phase[:-1]}ing", phase, default)
        plan.add_argument(f"--{phase}-share", type=float, default=default, metavar="X", help=text)
    plan.add_argument("--simulate", action="store_true", help="also simulate it with responses of many lengths")
    text = f"of the simulated lengths: the 99th percentile over the median ({TAIL:g})"
    plan.add_argument("--length-tail", type=float, default=TAIL, metavar="X", help=text)
    plan.set_defaults(run_command=_plan)

    doctor = commands.add_parser(
        "doctor",
        help="ask every node of a Ray cluster whether it is fit for a run",
        usage="grpo-rl doctor --ray ADDRESS [options]",
        description="Waits until all nodes of a Ray cluster are there, has each run something, compares their packages "
        "and looks whether all see the run's folder; starts nothing. Exit code 2: a node is missing, silent or "
        "different, and named.",
    )
    doctor.add_argument(
        "--ray", required=True, metavar="ADDRESS", help="host:port of the head, or auto on a node of it"
    )
    who = doctor.add_mutually_exclusive_group()
    who.add_argument("--nodes", type=int, default=1, metavar="N", help="how many there have to be (1)")
    who.add_argument("--names", metavar="A,B,...", help="or which, by the names of `ray start --node-name`")
    doctor.add_argument("--folder", type=Path, help="that all of them have to see: the run's, or the one it will be in")
    doctor.add_argument("--deadline-s", type=float, default=120.0, metavar="S", help="longest wait for the nodes (120)")
    doctor.set_defaults(run_command=_doctor)

    again = commands.add_parser(
        "replay",
        help="recompute a step of a run under another loss",
        usage="grpo-rl replay [options] RUN STEP [loss=NAME] [loss.KEY=VALUE ...]",
        description="Recomputes a step of a run that was trained with train.lineage=true under another loss, from the "
        "stored log-probabilities, without a model, and shows what changes; without an override, under its own.",
    )
    again.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    again.add_argument("step", type=int, metavar="STEP", help="from 1")
    again.add_argument("--json", action="store_true", help="print numbers instead of tables")
    again.add_argument("--top", type=int, default=10, metavar="N", help="tokens shown, those that differ most (10)")
    again.set_defaults(run_command=_replay)

    exported = commands.add_parser(
        "export",
        help="write the model of a checkpoint as a folder",
        usage="grpo-rl export CHECKPOINT FOLDER",
        description="Writes the model of a checkpoint, whichever processes wrote it, as a folder that transformers and "
        "vLLM read: of a run that is not at its end, which writes model/ itself. On the CPU, with 4 bytes a parameter "
        "of memory and half as much again.",
    )
    exported.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a run's checkpoints/checkpoint_*.pt")
    exported.add_argument("folder", type=Path, metavar="FOLDER", help="that is to be; it must not hold anything")
    exported.set_defaults(run_command=_export)
    return parser


def _batches(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    settings = Settings.read(compose_config(options.config_name, overrides), divides=False)  # the drawing shows it
    plan = plan_batches(settings, options.prompt_tokens, options.response_tokens, options.gpus)
    name = [] if options.config_name == CONFIG else [f"--config-name {options.config_name}"]
    title = " ".join(["grpo-rl batches", *name, *overrides])
    Console(highlight=False).print(picture(plan, title))
    if options.svg:
        options.svg.write_text(svg(plan, title))
    return int(bool(plan.misfits))


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    own = {key: value for key, _, value in (word.partition("=") for word in overrides) if key in OF_A_PLAN}
    if own.get("mode", "sync") not in ("sync", "async"):
        raise ValueError(f"mode is {own['mode']!r}; it is sync or async")
    cfg = compose_config(options.config_name, [word for word in overrides if word.partition("=")[0] not in OF_A_PLAN])
    cluster = Cluster.parse(own.get("cluster", "here"), getattr(torch, cfg.train_model.dtype))
    cfg.mode = own.get("mode") or ("async" if cluster.count > 1 else "sync")
    settings = Settings.read(cfg)
    model = skeleton(config_source(settings.model.name)).to(getattr(torch, settings.train_model.dtype))
    lengths, shares = (options.prompt_tokens, options.response_tokens), (options.train_share, options.sample_share)
    scenario, chosen = with_devices(Scenario(settings, model, cluster, *lengths, *shares))
    plan = make_plan(scenario)
    name = [] if options.config_name == CONFIG else [f"--config-name {options.config_name}"]
    title = " ".join(["grpo-rl plan", *name, *overrides])
    view = plan_view(plan, title, remedies(plan), best_overlapped(scenario), best_in_turns(scenario), chosen)
    console = Console(highlight=False)
    console.print(view)
    if options.simulate and plan.fits:
        console.print(simulation_view(simulate_plan(plan, options.length_tail)))
    return int(not plan.fits or bool(plan.refused))


def _doctor(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ValueError(f"doctor takes no overrides such as {overrides[0]}; it looks at machines, not at a config")
    try:
        from grpo_rl.cluster.doctor import examine
    except ImportError as error:
        raise ValueError(f"Ray is not installed ({error}); install the extra `ray`") from None
    expected = options.names.split(",") if options.names else options.nodes
    reports = examine(options.ray, expected, options.folder, options.deadline_s)
    for node in reports:
        print(f"{node.name} ({node.address}): {node.cpus:g} CPUs, {node.gpus:g} GPUs")
    devices = sum(node.gpus for node in reports)
    print(f"All {len(reports)} nodes answer, with the same packages; {devices:g} GPUs in all.")
    return 0


def _export(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if overrides:
        raise ValueError(f"export takes no overrides such as {overrides[0]}; the checkpoint has its config")
    export_checkpoint(options.checkpoint, options.folder)
    print(f"The model of {options.checkpoint} is in {options.folder}.")
    return 0


def _replay(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    stored = read_step(options.run, options.step)
    settings = Settings.restored(stored.config)
    run, other = _objective(settings), _objective(_with_loss(settings, overrides))
    result = replay(stored, run, other, options.top)
    if options.json:
        print(json.dumps(result.summary() | {"overrides": list(overrides)}, indent=2))
        return 0
    tokens = sum(len(group.response_ids) for group in stored.groups)
    title = f"{options.run}, step {stored.step}: {len(stored.groups)} groups, {tokens:,} response tokens, "
    title += f"optimizer steps: {len(stored.updates)}"
    view = replay_view(result, title, " ".join(overrides) or "replayed", _decoder(options.run, settings.model.name))
    Console(highlight=False).print(view)
    return 0


def _objective(settings: Settings) -> Objective:
    """What the loss of these settings makes of groups.

    Raises:
        ValueError: settings that don't go together.
    """

    def compute_advantages(groups: list[Group]) -> list[Group]:
        return make_advantages(settings, list(groups[0].reward_parts))(groups)

    batching, has_reference = micro_batching(settings), bool(settings.policy.kl_coef)
    return Objective(make_loss(settings), compute_advantages, batching, has_reference, needs_old_log_probs(settings))


def _with_loss(settings: Settings, overrides: Sequence[str]) -> Settings:
    """A run's settings with another loss.

    Raises:
        ValueError: an override that has no part in a loss, or settings that don't go together.
        HydraException: an unknown preset, or an override that Hydra can't read.
    """
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    if others := [key for key in keys if key != "loss" and not key.startswith("loss.") and key not in OF_A_LOSS]:
        raise ValueError(
            f"{others[0]} has no part in the loss of responses that are there already; a replay takes loss=NAME, "
            f"loss.KEY=VALUE, {' and '.join(OF_A_LOSS)}"
        )
    chosen, changed = compose_config(CONFIG, overrides), OmegaConf.create(plain(settings))
    for key in sorted(keys, key=len):  # a preset first, and single settings over it
        OmegaConf.update(changed, key, OmegaConf.select(chosen, key), merge=False)
    # The loss alone, in a config in which all else is in order: the run's own may ask for what this machine lacks.
    checked = compose_config(CONFIG, [])
    for key in ("loss", *OF_A_LOSS):
        OmegaConf.update(checked, key, OmegaConf.select(changed, key), merge=False)
    loss = Settings.read(checked)
    return settings.with_values({key: select(loss, key) for key in ("loss", *OF_A_LOSS)})


def _decoder(run: Path, model: str) -> Callable[[Sequence[int]], str] | None:
    """ids -> text by the run's tokenizer, where this machine has it."""
    exported = run / "model"
    converted = [cache_folder() / CONVERTED] * (model == DEFAULT_MODEL)
    for name in [*([exported] if exported.is_dir() else []), model, *converted]:
        with contextlib.suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(name, local_files_only=True).decode
    return None


if __name__ == "__main__":
    sys.exit(main())
