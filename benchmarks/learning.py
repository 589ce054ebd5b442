"""Held-out reward against minutes, ours and TRL's: `python benchmarks/learning.py --runs ours:0 trl:0 --show`.

Both train the quickstart's model on the same prompts in the same order, with its group size, tokens, rewards, loss,
learning rate and warm-up. TRL 1.16's `GRPOTrainer` runs with fused AdamW, fp32 weights, under bf16 autocast where the
CPU is fast at it, and without gradient checkpointing; of the `--trl-batch` it takes the one whose second step is the
shortest.

Greedy rewards on the held-out problems, every three steps, are all computed by our engine and scorer: of ours in its
run, of TRL's from the models that it saves. Minutes count from the start of the process, loading and compiling
included; evaluating and TRL's saving left out.

A run of TRL's may take an hour (`--trl-steps` ends it after its first steps); all are kept in `--folder`, so that
several calls can share the work, and `--show` joins the runs there to a JSON file and a picture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import matplotlib
import numpy as np
import run_all
import step_vs_trl

matplotlib.use("svg")
import matplotlib.pyplot as plt

from grpo_rl.intervals import mean_interval

NAME = "learning"
OURS, TRL = "ours", "trl"
TARGET, SLOWER_BAR = 1.9, 3.0
EVERY = 3
"""Steps between evaluations."""
CODE = (*step_vs_trl.CODE, "envs")


def overrides(seed: int, more: Sequence[str]) -> list[str]:
    """The settings of both arms."""
    return ["+experiment=quickstart", f"train.seed={seed}", f"evaluate.frequency={EVERY}", *more]


def run_ours(seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A run of `sota/grpo.py`, by its own metrics."""
    started = time.time()
    script = [sys.executable, str(harness.ROOT / "sota" / "grpo.py")]
    subprocess.run([*script, *overrides(seed, args.settings), f"hydra.run.dir={folder}"], check=True)
    points, steps, evaluating_s, before_s = [], [], 0.0, 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        evaluating_s += row.get("time/evaluate_s", 0.0)
        spent_s = row["time"] - started - evaluating_s
        if "reward/mean" in row:
            rates = {name: row[f"throughput/{name}_tokens_per_s"] for name in ("sample", "train")}
            steps.append({"step_s": spent_s - before_s, "limit_fraction": row["limit_fraction"], **rates})
        if "eval/reward" in row:
            points.append(point(row["step"], spent_s, row))
        before_s = spent_s
    return {"points": points, "steps": steps}


def point(step: int, seconds: float, row: Mapping[str, float]) -> dict[str, float]:
    """An evaluation: step, minutes, and the held-out rows' mean reward and share of right ones."""
    return {
        "step": step,
        "minutes": seconds / 60,
        "reward": row["eval/reward"],
        "accuracy": row["eval/accuracy"],
        "mean_length": row["eval/mean_length"],
    }


def run_trl(seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """TRL's trainer at its fastest batch, and our evaluation of the models that it saved."""
    tried: dict[int, float | str] = {}
    for batch in args.trl_batch if len(args.trl_batch) > 1 else []:
        try:
            tried[batch] = in_process(train_trl, time.time(), seed, folder, args, batch, 2)["steps"][-1]["step_s"]
        except BrokenProcessPool:
            tried[batch] = "its process ended, perhaps for lack of memory"
        print(f"TRL, {batch} responses a forward, seconds a step: {tried[batch]}", file=sys.stderr, flush=True)
    times = {batch: seconds for batch, seconds in tried.items() if isinstance(seconds, float)}
    batch = min(times, key=times.__getitem__) if tried else args.trl_batch[0]
    shutil.rmtree(folder, ignore_errors=True)  # models that a run before has left
    found = in_process(train_trl, time.time(), seed, folder, args, batch)
    ends_s = np.cumsum([found.pop("start_s"), *(step["step_s"] for step in found["steps"])])
    rewards = in_process(evaluate_saved, seed, folder, args)
    points = [point(step, ends_s[step], row) for step, row in sorted(rewards.items())]
    return {"points": points, **found, "batch": batch, "tried_alone_s": tried}


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The call's result from a process of its own, which leaves neither memory nor thread settings behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(harness.START)) as pool:
        return pool.submit(function, *arguments).result()


def parts_of(seed: int, args: argparse.Namespace):
    """Settings, model folder and environment as a run of ours builds them."""
    from grpo_rl.assembly.environment import make_env
    from grpo_rl.policies.generation import load_tokenizer
    from grpo_rl.policies.hub import resolve_model
    from grpo_rl.settings.compose import compose_config
    from grpo_rl.settings.schema import Settings

    settings = Settings.read(compose_config("grpo_gsm8k", overrides(seed, args.settings)))
    folder = resolve_model(settings.model.name)
    return settings, folder, make_env(settings, load_tokenizer(folder))


def train_trl(
    started: float, seed: int, folder: Path, args: argparse.Namespace, batch: int, max_steps: int | None = None
) -> dict[str, Any]:
    """TRL's run over the prompts that ours draws; a model is saved every three steps, or none with ``max_steps``."""
    import torch
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_rl.perf.roofline import StepRoofline
    from grpo_rl.settings.derived import micro_batching, optimizer_steps
    from grpo_rl.training.optimizer import lr_factor

    settings, model, env = parts_of(seed, args)
    task, optimizer, total = env.task, settings.optimizer, optimizer_steps(settings)
    responses = settings.train.optim_batch_size
    assert settings.env.num_envs * settings.env.repeats == responses, "TRL has one step a batch"
    assert responses % batch == 0, f"{responses} responses can't be cut into batches of {batch}"
    rows = [prompt.row for _ in range(total) for prompt in env.next_prompts()]
    steps: list[dict[str, float]] = []

    def reward(completion_ids: list[list[int]], row: list[int], **_: object) -> list[float]:
        return [task.score(task.rows[i], env.decode(ids)).total for i, ids in zip(row, completion_ids, strict=True)]

    class Timed(GRPOTrainer):
        sample_s = 0.0
        sampled: dict[str, torch.Tensor]

        def _generate_single_turn(self, *positional, **named):
            start = time.perf_counter()
            result = super()._generate_single_turn(*positional, **named)
            self.sample_s = time.perf_counter() - start
            return result

        def _generate_and_score_completions(self, inputs):
            self.sampled = super()._generate_and_score_completions(inputs)
            return self.sampled

        def create_scheduler(self, num_training_steps, optimizer=None):
            # Ours: the first step has a rate above 0.
            wanted = settings.optimizer

            def factor(step: int) -> float:
                return lr_factor(step, wanted.warmup_steps, total, wanted.schedule, wanted.min_lr_fraction)

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
            return self.lr_scheduler

    class Clock(TrainerCallback):
        start_s = start = 0.0

        def on_train_begin(self, args, state, control, **_):
            self.start_s = time.time() - started

        def on_step_begin(self, args, state, control, **_):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            step_s = time.perf_counter() - self.start
            steps.append({"step_s": step_s, **rates(trainer.sampled, trainer.sample_s, step_s)})
            print(f"step {state.global_step}: {steps[-1]}", file=sys.stderr, flush=True)

    def rates(sampled: Mapping[str, torch.Tensor], sample_s: float, step_s: float) -> dict[str, float]:
        phases_s = {"sample": sample_s, "train": step_s - sample_s}
        limit = roofline.metrics(groups_of(sampled, settings.env.repeats), phases_s, step_s)
        tokens = int(sampled["completion_mask"].sum())
        return {"limit_fraction": limit["limit_fraction"]} | {name: tokens / s for name, s in phases_s.items()}

    trainer = Timed(
        model=str(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": task.prompt(task.rows[i]), "row": i} for i in rows]),
        args=GRPOConfig(
            output_dir=str(folder),
            seed=seed,
            model_init_kwargs={"dtype": "float32"},
            bf16=harness.dtype_name() == "bf16",  # autocast
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=responses // batch,
            num_generations=settings.env.repeats,
            max_completion_length=settings.sampling.max_new_tokens,
            temperature=settings.sampling.temperature,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="grpo",
            epsilon=settings.loss.clip_low,
            epsilon_high=settings.loss.clip_high,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            max_grad_norm=optimizer.clip_grad_norm,
            max_steps=max_steps or min(args.trl_steps or total, total),
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no" if max_steps else "steps",
            save_steps=EVERY,
            save_only_model=True,
            report_to="none",
        ),
        callbacks=[clock := Clock()],
    )
    roofline = StepRoofline(trainer.model, settings.train.epochs, micro_batching(settings).skip_zero_advantage)
    trainer.train()
    return {"steps": steps, "start_s": clock.start_s}


def groups_of(sampled: Mapping[str, Any], size: int) -> list:
    """TRL's sampled step, [B, T], as our groups: each ``size`` responses in turn are one."""
    import torch

    from grpo_rl.data.group import Group

    groups = []
    for row in range(0, len(sampled["advantages"]), size):
        own = {name: sampled[name][row : row + size] for name in sampled if name != "num_items_in_batch"}
        ids = own["completion_ids"][own["completion_mask"].bool()]
        groups.append(
            Group(
                group_id=row,
                row=row,
                prompt_ids=own["prompt_ids"][0][own["prompt_mask"][0].bool()],
                response_ids=ids,
                log_probs=torch.zeros(len(ids)),
                versions=torch.zeros(len(ids), dtype=torch.long),
                trainable=torch.ones(len(ids), dtype=torch.bool),
                offsets=torch.cat([torch.zeros(1, dtype=torch.long), own["completion_mask"].sum(1).cumsum(0)]),
                rewards=own["advantages"],
                truncated=torch.zeros(size, dtype=torch.bool),
                advantages=own["advantages"],
            )
        )
    return groups


def evaluate_saved(seed: int, folder: Path, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Our evaluation, by its step, of the model before training and of those that TRL saved, which are removed."""
    from safetensors.torch import load_file

    from grpo_rl.assembly import training as build
    from grpo_rl.assembly.environment import eval_rows
    from grpo_rl.assembly.sync import make_engine
    from grpo_rl.engines.base import Sampling
    from grpo_rl.settings.devices import allocate
    from grpo_rl.training.evaluate import evaluate, row_scores
    from grpo_rl.weights.push import WeightSync

    settings, model, env = parts_of(seed, args)
    devices, rows = allocate(settings), eval_rows(settings, env)
    policy = build.make_policy(settings, model, devices)
    engine = make_engine(settings, model, devices)
    weights, greedy = WeightSync(policy.model, engine), Sampling(0.0, max_new_tokens=settings.sampling.max_new_tokens)
    saved = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*")}
    found = {}
    try:
        for step in [0, *sorted(saved)]:
            if step:
                # Its head is tied, and not in the file.
                left = policy.model.load_state_dict(load_file(saved[step] / "model.safetensors"), strict=False)
                assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left
            weights.push()
            evaluation = evaluate(env, engine, rows, greedy)
            right = row_scores(evaluation, None)["accuracy"]
            found[step] = evaluation.metrics() | {"eval/accuracy": statistics.mean(right)}
            print(f"step {step}: {found[step]}", file=sys.stderr, flush=True)
    finally:
        engine.close()
    for path in saved.values():
        shutil.rmtree(path)
    return found


def minutes_until(points: Sequence[Mapping[str, float]], target: float) -> float | None:
    """The minutes at which the line through the evaluations first reaches the target; None where it does not.

    >>> minutes_until([{"minutes": 1, "reward": 1.0}, {"minutes": 3, "reward": 2.0}], 1.5)
    2.0
    """
    if points[0]["reward"] >= target:
        return points[0]["minutes"]
    for before, after in itertools.pairwise(points):
        if after["reward"] >= target:
            share = (target - before["reward"]) / (after["reward"] - before["reward"])
            return before["minutes"] + share * (after["minutes"] - before["minutes"])
    return None


def over_seeds(values: Sequence[float | None]) -> str:
    """The mean over seeds with its 95 % interval; of one seed alone its value.

    >>> over_seeds([1.0, 2.0, 3.0]), over_seeds([1.0]), over_seeds([1.0, None])
    ('2.000 (95 % interval -0.484 to 4.484)', '1.000', 'not reached by 1 of 2')
    """
    if missing := sum(value is None for value in values):
        return f"not reached by {missing} of {len(values)}"
    return str(mean_interval(values)) if len(values) > 1 else f"{values[0]:.3f}"


def show(runs: Mapping[str, Mapping[int, Mapping]], target: float) -> dict[str, Any]:
    """The result of all runs: minutes until the target by seed, their ratio, and medians of the steps' rates."""
    until = {arm: {s: minutes_until(run["points"], target) for s, run in of.items()} for arm, of in runs.items()}
    ratios = [theirs / ours for seed, ours in until[OURS].items() if ours and (theirs := until[TRL].get(seed))]
    if not ratios:
        sys.exit(f"error: no seed has runs of both that reach {target:g}: {until}")
    ratio, table, lengths = statistics.mean(ratios), [], sorted({len(run["steps"]) for run in runs[TRL].values()})
    for arm, of_arm in runs.items():
        steps = [step for run in of_arm.values() for step in run["steps"]]
        ends = [run["points"][-1] for run in of_arm.values()]
        table.append(
            {
                "arm": arm,
                "seeds": len(of_arm),
                f"minutes until {target:g}": over_seeds(list(until[arm].values())),
                "steps": statistics.mean(len(run["steps"]) for run in of_arm.values()),
                "minutes in all": statistics.mean(end["minutes"] for end in ends),
                "held-out reward at the end": statistics.mean(end["reward"] for end in ends),
                "s a step": statistics.median(step["step_s"] for step in steps),
                "sampled tokens/s": statistics.median(step["sample"] for step in steps),
                "trained tokens/s": statistics.median(step["train"] for step in steps),
                "share of the limit": statistics.median(step["limit_fraction"] for step in steps),
            }
        )
    return {
        "shows": "The quickstart by ours and by TRL: the same prompts in the same order, group size, tokens, rewards, "
        f"loss, learning rate. Held-out greedy reward every {EVERY} steps by one evaluator. Minutes from the start of "
        "the process, without evaluating and saving; the figure is the mean over seeds of TRL's minutes until a reward "
        f"of {target:g} over ours, {over_seeds(ratios)}. TRL's runs have {' and '.join(map(str, lengths))} steps. "
        "Rates are medians over all steps.",
        "peer": f"GRPOTrainer, TRL {version('trl')}",
        "bars": [harness.bar(f"times ours until {target:g}, {len(ratios)} seeds", ratio, at_least=SLOWER_BAR)],
        "table": table,
        "plots": [],
        "pictures": [f"{NAME}.svg"],
        "minutes_until": until,
        "runs": runs,
        "figure": ratio,
    }


def draw(runs: Mapping[str, Mapping[int, Mapping]], out: Path) -> None:
    """The held-out reward against minutes and against steps: a line a seed, and their mean."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "grpo_rl"}
    figure, (by_minutes, by_step) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[2, 1], sharey=True)
    for i, (arm, of_arm) in enumerate(runs.items()):
        for axes, x in ((by_minutes, "minutes"), (by_step, "step")):
            lines = [[[p[x], p["reward"]] for p in run["points"]] for run in of_arm.values()]
            for line in lines:
                axes.plot(*zip(*line, strict=True), color=f"C{i}", linewidth=0.7, alpha=0.5)
            mean = np.mean([line[: min(map(len, lines))] for line in lines], axis=0)
            axes.plot(*mean.T, color=f"C{i}", marker="o", label={OURS: "grpo_rl", TRL: f"TRL {version('trl')}"}[arm])
    by_minutes.set(
        xlabel=f"minutes on {harness.machine()['cores']} CPU cores",
        ylabel="held-out reward (at most 3)",
        xlim=(0, None),
        ylim=(0, 3),
    )
    by_step.set(xlabel="step")
    by_minutes.legend(frameon=False)
    for axes in (by_minutes, by_step):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = harness.arguments(__doc__, steps=None)
    parser.add_argument("--runs", nargs="*", default=[], metavar="ARM:SEED", help=f"{OURS}:0 {TRL}:0 …")
    parser.add_argument("--folder", type=Path, default=Path("learning"), help="where runs are kept")
    parser.add_argument("--show", action="store_true", help="join the runs that the folder has")
    parser.add_argument("--trl-batch", type=harness.at_least_one, nargs="+", default=[16, 32, 64],
                        help="responses a forward, to try")  # fmt: skip
    parser.add_argument("--trl-steps", type=harness.at_least_one, help="TRL's first steps alone, of the same schedule")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of both")
    parser.add_argument("--target", type=float, default=TARGET, help="the held-out reward that minutes count to")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.runs:
        arm, seed = name.split(":")
        if not args.force:
            run_all.wait_for_quiet(run_all.PATIENCE_S)
        load = harness.require_quiet(args.force)
        folder = (args.folder / f"{arm}_{seed}").resolve()
        found = {OURS: run_ours, TRL: run_trl}[arm](int(seed), folder, args)
        facts = {"code": harness.code(*CODE), "machine": harness.machine(), **load}
        (args.folder / f"{arm}_{seed}.json").write_text(json.dumps(found | facts, indent=2) + "\n")
        print(f"{name}: minutes until {args.target:g}: {minutes_until(found['points'], args.target)}", flush=True)
    if args.show:
        kept = {arm: sorted(args.folder.glob(f"{arm}_*.json")) for arm in (OURS, TRL)}
        runs = {arm: {int(path.stem.rpartition("_")[2]): json.loads(path.read_text()) for path in paths}
                for arm, paths in kept.items()}  # fmt: skip
        result = show(runs, args.target)
        facts, *rest = [run for of_arm in runs.values() for run in of_arm.values()]
        of = {(run["code"]["digest"], json.dumps(run["machine"])) for run in (facts, *rest)}
        if len(of) > 1:
            sys.exit(f"error: the runs in {args.folder} are of other code or another machine than each other")
        result |= {name: facts[name] for name in ("code", "machine", "load_average", "forced")}
        out = args.out or args.folder / f"{NAME}.json"
        harness.finish(NAME, result.pop("figure"), result, out)
        draw(runs, out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
