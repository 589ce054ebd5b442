"""The commands `grpo-rl batches` and `grpo-rl plan`."""

import argparse
from collections.abc import Sequence

from grpo_rl.planner.hardware import SAMPLE_SHARE, TRAIN_SHARE, Cluster
from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
from grpo_rl.settings.devices import default_dtype, has_no_gpu
from grpo_rl.settings.schema import Settings


def add_batches(parser: argparse.ArgumentParser) -> None:
    """Draws how prompts, responses, optimizer steps, micro-batches, epochs and devices fit together in a config. Takes
    the overrides of `grpo-rl train`; loads no model and no data. Exit code 1: something does not divide, and the
    drawing shows where.
    """
    parser.usage = "grpo-rl batches [options] [overrides ...]"
    _add_lengths(parser, "assumed length of a prompt")
    parser.add_argument("--gpus", type=int, metavar="N", help="plan for a machine with so many (those of this one)")
    parser.set_defaults(run_command=_batches)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Shows what fits on a cluster, by device, the largest micro-batch and context, the expected time of a step, and
    how to divide the devices. Takes the overrides of `grpo-rl train`; needs a model's config.json and no weights.
    cluster=64xH100, with numbers of your own cluster=64xH100,network_gb_s=25, or cluster=here, which measures this
    machine (the default). mode=async where there are several devices, unless it is given. Exit code 1: it does not fit,
    or no script runs it, and what to change is shown.
    """
    parser.usage = "grpo-rl plan [options] [cluster=64xH100] [mode=sync|async] [overrides ...]"
    _add_lengths(parser, "assumed length of a prompt in a step")
    share = "of the devices' rates that %s reaches: limit_fraction/%s of a run of one process in mode=sync (%s)"
    for phase, doing, default in (("train", "training", TRAIN_SHARE), ("sample", "sampling", SAMPLE_SHARE)):
        text = share % (doing, phase, default)
        parser.add_argument(f"--{phase}-share", type=float, default=default, metavar="X", help=text)
    parser.set_defaults(run_command=_plan)


def _add_lengths(parser: argparse.ArgumentParser, prompt: str) -> None:
    start = f"the config to start from ({DEFAULT_CONFIG})"
    parser.add_argument("--config-name", "-cn", default=DEFAULT_CONFIG, help=start)
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help=prompt)
    response = "assumed length of a response (sampling.max_new_tokens)"
    parser.add_argument("--response-tokens", "--answer-tokens", type=int, metavar="N", help=response)


def _title(command: str, options: argparse.Namespace, overrides: Sequence[str]) -> str:
    name = [] if options.config_name == DEFAULT_CONFIG else [f"--config-name {options.config_name}"]
    return " ".join([f"grpo-rl {command}", *name, *overrides])


def _refuse_sft(mode: str | None) -> None:
    if mode == "sft":
        raise ValueError("mode=sft samples nothing, and a plan is of sampling and training; leave it out")


def _batches(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    cfg = compose_config(options.config_name, overrides)
    _refuse_sft(cfg.mode)
    settings = Settings.read(cfg, divides=False)  # the drawing shows it
    from grpo_rl.planner.batches import plan_batches

    plan = plan_batches(settings, options.prompt_tokens, options.response_tokens, options.gpus)
    from rich.console import Console

    from grpo_rl.planner.drawing import picture

    Console(highlight=False).print(picture(plan, _title("batches", options, overrides)))
    return int(bool(plan.errors))


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    cfg = compose_config(options.config_name, [word for word in overrides if not word.startswith("cluster=")])
    _refuse_sft(cfg.mode)
    for name, share in (("train", options.train_share), ("sample", options.sample_share)):
        if not 0 < share <= 1:
            raise ValueError(f"--{name}-share {share:g}: a share of the rates is above 0 and at most 1")
    where = ["here", *(word.removeprefix("cluster=") for word in overrides if word.startswith("cluster="))][-1]
    here = where.startswith("here")
    if not cfg.mode and (not here or has_no_gpu()):
        cfg.mode = "async" if not here and Cluster.parse(where).count > 1 else "sync"
    if cfg.mode:  # usage errors before the imports; GPUs here need torch
        Settings.read(cfg)
    cfg.train_model.dtype = cfg.train_model.dtype or (default_dtype(cfg.ray.address) if here else "bfloat16")
    cluster = Cluster.parse(where, cfg.train_model.dtype)
    cfg.mode = cfg.mode or ("async" if cluster.count > 1 else "sync")
    settings = Settings.read(cfg)
    import torch

    from grpo_rl.planner.drawing import plan_view, show
    from grpo_rl.planner.plan import best_overlapped, make_plan, remedies, with_devices
    from grpo_rl.planner.scenario import Scenario, config_source
    from grpo_rl.policies.loading import skeleton

    model = skeleton(config_source(settings.model.name)).to(getattr(torch, cfg.train_model.dtype))
    lengths, shares = (options.prompt_tokens, options.response_tokens), (options.train_share, options.sample_share)
    scenario, chosen = with_devices(Scenario(settings, model, cluster, *lengths, *shares))
    plan, best = make_plan(scenario), None if chosen else best_overlapped(scenario)
    title = _title("plan", options, overrides)
    show(plan_view(plan, title, remedies(plan), best, chosen))
    return int(not plan.fits or bool(plan.refused))
