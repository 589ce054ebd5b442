"""Speedup of one GRPO step over TRL's on the same work: `python benchmarks/step_vs_trl.py --data FILE`.

A step is generation, training, and whatever it takes for the next generation to use the new weights. The work: the
default model, 4 GSM8K prompts x 8 responses of exactly 96 tokens, one optimizer step over all of them, rewards that
alternate inside each group, so that no group can be skipped. Both sides step fused
AdamW at a clipped gradient norm of 1, with no KL term; ours runs at the project's default config, with fp32 master
weights, and reports the fraction of the machine's limit that it reached (`grpo_rl.perf.roofline`).

The peer is TRL 1.16's `GRPOTrainer` at its best settings, without gradient checkpointing. Settings are tried alone, one
kind after the other: with bf16 weights the batch of a forward, then fp32 weights under bf16 autocast, then, where
`--trl-generation` names them, other ways of generating. On a CPU without bfloat16 both sides work in fp32, and no
setting of TRL has autocast. The fastest goes on to the rounds, in which both sides take turns: more arms would not fit
into 24 GiB. Where it does not fit next to ours, the next one does, and the figure is the smaller of the ratio in the
rounds and the one by its time alone. All times are recorded.

Two of TRL's settings are recorded next to it, and are not the headline's peer, as TRL has no setting for them:
- `--our-allocator`: in a process whose allocator is set up as ours is (`grpo_rl.policies.before_loading`).
- `--trl-generation vllm` on CPU. As it ships that fails: vLLM's CPU layers repack their weights after loading and drop
  the parameters' loaders, so that `VLLMGeneration.sync_weights`, which calls `model.load_weights`, ends with
  "'Parameter' object has no attribute 'weight_loader'". With that one method replaced it works.

`--trl-generation batching`, transformers' continuous batching, does not keep to `min_new_tokens`, so it fails here.
Rates are measured around each step, outside its time, and the highest so far count; `limit_fraction_beside_step` goes
by those of the moment, as a shared machine's pace changes within minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import harness
import torch

from grpo_rl.policies.before_loading import keep_freed_memory
from grpo_rl.settings.devices import default_dtype

NAME = "step_vs_trl"
OURS = "grpo_rl"
SPEED_BAR, LIMIT_BAR = 3.5, 0.5
WARMUP_STEPS = 2
"""Warm-up steps, until compiled kernels, caches and the allocator's memory have settled."""
CODE = (
    "config",
    *(
        f"grpo_rl/{name}"
        for name in ("assembly", "collectors", "data", "engines", "losses", "policies", "training", "weights")
    ),
)
"""The parts of a step, and the settings that it runs at."""


@dataclass(frozen=True)
class Work:
    """The work of one step: every prompt, as chat messages, gets ``repeats`` responses of ``response`` tokens."""

    model: str
    prompts: tuple[list[dict[str, str]], ...]
    prompt_tokens: tuple[int, ...]
    repeats: int
    response: int
    engine_share: float | None = None
    """The part of a GPU's memory that the engine of each arm takes; None: each arm's default."""

    @property
    def responses(self) -> int:
        return len(self.prompts) * self.repeats


@dataclass(frozen=True)
class TRLSetting:
    """A way to run TRL: dtype of the weights, responses a forward, generation, allocator, Liger.

    >>> TRLSetting("fp32", 16).name, TRLSetting("bf16", 8, our_allocator=True, liger=True).name
    ('trl_fp32_generate_batch16', 'trl_bf16_generate_batch8_our_allocator_liger')
    """

    weights: str
    """bf16 or fp32; under autocast if products have another dtype, see `harness.dtype`."""
    batch: int
    generation: str = "generate"  # generate | batching | vllm
    our_allocator: bool = False
    liger: bool = False
    """Liger's kernels in the layers, which need a GPU. The head stays TRL's fused one: TRL refuses Liger's."""

    @property
    def name(self) -> str:
        generation = f"{self.generation}{'_patched' * self.patched}"
        rest = "_our_allocator" * self.our_allocator + "_liger" * self.liger
        return f"trl_{self.weights}_{generation}_batch{self.batch}{rest}"

    @property
    def patched(self) -> bool:
        """True where TRL's code has to be changed for it to run: vLLM on CPU."""
        return self.generation == "vllm" and not torch.cuda.is_available()

    @property
    def as_shipped(self) -> bool:
        """True if a user of TRL can have it by TRL's settings alone."""
        return not (self.patched or self.our_allocator)


def our_arm(steps: harness.Steps, work: Work, overrides: Sequence[str]) -> None:
    """The loop of sota/grpo.py over the same parts, without its logs."""
    from grpo_rl.assembly import training as build
    from grpo_rl.assembly.sync import make_engine
    from grpo_rl.collectors.engine_policy import EnginePolicy
    from grpo_rl.collectors.sync import SyncCollector
    from grpo_rl.engines.base import Sampling
    from grpo_rl.envs.base import LLMEnv, Reward, Task
    from grpo_rl.perf.roofline import StepRoofline, measure_rates
    from grpo_rl.policies.generation import load_tokenizer
    from grpo_rl.settings.compose import compose_config
    from grpo_rl.settings.derived import micro_batching
    from grpo_rl.settings.devices import allocate
    from grpo_rl.settings.schema import Settings
    from grpo_rl.training.micro_batches import scored_micro_batches
    from grpo_rl.weights.push import WeightSync

    class Alternating(Task):
        rows = [{"prompt": prompt} for prompt in work.prompts]
        reward_parts = ("alternating",)
        turn = itertools.count()

        def prompt(self, row):
            return row["prompt"]

        def score(self, row, response):
            return Reward({"alternating": float(next(self.turn) % 2)})

    settings = [
        "mode=sync",
        f"env.num_envs={len(work.prompts)}",
        f"env.repeats={work.repeats}",
        f"train.optim_batch_size={work.responses}",
        f"sampling.max_new_tokens={work.response}",
        f"inference_model.max_model_len={max(work.prompt_tokens) + work.response}",
        f"train_model.dtype={default_dtype()}",  # TRL's, too
        *([f"inference_model.gpu_memory_utilization={work.engine_share}"] if work.engine_share else []),
        *overrides,
    ]
    cfg = Settings.read(compose_config("grpo_gsm8k", settings))
    folder, devices = Path(work.model), allocate(cfg)
    env = LLMEnv(Alternating(), load_tokenizer(folder), len(work.prompts), work.repeats)
    policy = build.make_policy(cfg, folder, devices)
    optimizer = build.make_optimizer(cfg, policy)
    engine = make_engine(cfg, folder, devices)
    loss, buffer = build.make_loss(cfg), build.make_buffer(cfg)
    compute_advantages = build.make_advantages(cfg)
    weights = WeightSync(policy.model, engine)
    sampling = Sampling(max_new_tokens=work.response, min_new_tokens=work.response)
    collector = SyncCollector(env, EnginePolicy(engine, sampling), total_dialog_turns=sys.maxsize)
    skips = micro_batching(cfg).skip_zero_advantage
    best = None
    try:
        while steps.wait():
            rates = measure_rates(policy.model.dtype, policy.device, seconds=2 if policy.device.type == "cpu" else 0.2)
            best = rates.best(best) if best else rates
            start = time.perf_counter()
            groups = collector.collect()
            assert all(group.lengths.eq(work.response).all() for group in groups), "not the same work"
            sampled = time.perf_counter()
            buffer.extend(compute_advantages(groups))
            for batch in buffer.batches():
                for tokens in scored_micro_batches(policy, batch, micro_batching(cfg)):
                    losses = loss(tokens)
                    losses["loss"].backward()
                optimizer.step()
            groups = buffer.drain()
            harness.synchronize(str(policy.device))
            trained = time.perf_counter()
            weights.push()
            harness.synchronize(str(policy.device))
            end = time.perf_counter()
            phases_s = {"sample": sampled - start, "train": trained - sampled, "sync": end - trained}
            steps.release_gpu()
            limit, beside = (StepRoofline(policy.model, cfg.train.epochs, skips, rates=r) for r in (best, rates))
            steps.done(
                step_s=end - start,
                **{f"{phase}_s": seconds for phase, seconds in phases_s.items()},
                **limit.metrics(groups, phases_s, end - start),
                limit_fraction_beside_step=beside.metrics(groups, phases_s, end - start)["limit_fraction"],
                gemm_gflops_per_s=rates.gemm_flops_per_s / 1e9,
                memory_gb_per_s=rates.bytes_per_s / 1e9,
            )
    finally:
        engine.close()


def trl_arm(steps: harness.Steps, work: Work, setting: TRLSetting) -> None:
    """TRL's ``GRPOTrainer``; what it is asked to do in a step is all in its config."""
    if setting.generation == "vllm":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # TRL's choice of executor asks for it
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB, and ours has no more
    if setting.our_allocator:
        keep_freed_memory()
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def alternating(completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths = {len(ids) for ids in completion_ids}
        assert lengths == {work.response}, f"responses of {lengths} tokens, not {work.response}: not the same work"
        return [float(i % 2) for i in range(len(completion_ids))]

    device = "cuda" if torch.cuda.is_available() else "cpu"

    class TakeTurns(TrainerCallback):
        start = 0.0

        def on_train_begin(self, args, state, control, **_):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            harness.synchronize(device)  # the optimizer's last kernels still run
            step_s = time.perf_counter() - self.start
            steps.release_gpu()
            steps.done(step_s=step_s)
            control.should_training_stop = not steps.wait()
            self.start = time.perf_counter()

    minimum = "min_tokens" if setting.generation == "vllm" else "min_new_tokens"
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=alternating,
            # Its sampler takes the rows in order: every step has the same prompts, as ours.
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.prompts] * 1000),
            args=GRPOConfig(
                output_dir=folder,
                model_init_kwargs={"dtype": {"bf16": "bfloat16", "fp32": "float32"}[setting.weights]},
                bf16=setting.weights != harness.dtype_name(),  # autocast
                use_cpu=not torch.cuda.is_available(),
                optim="adamw_torch_fused",
                use_liger_kernel=setting.liger,
                gradient_checkpointing=False,
                per_device_train_batch_size=setting.batch,
                gradient_accumulation_steps=work.responses // setting.batch,
                num_generations=work.repeats,
                max_completion_length=work.response,
                generation_kwargs={minimum: work.response},
                use_transformers_continuous_batching=setting.generation == "batching",
                # Its default, half of the memory, is no faster and crowds out the other arms.
                transformers_continuous_batching_config={"max_memory_percent": 0.1},
                use_vllm=setting.generation == "vllm",
                vllm_mode="colocate",
                vllm_max_model_length=max(work.prompt_tokens) + work.response,
                vllm_importance_sampling_correction=False,  # one forward less
                **({"vllm_gpu_memory_utilization": work.engine_share} if work.engine_share else {}),
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                beta=0.0,
                num_iterations=1,
                loss_type="grpo",
                epsilon=0.2,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                max_steps=1000,
                shuffle_dataset=False,
                dataloader_pin_memory=False,
                disable_tqdm=True,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
            ),
            callbacks=[TakeTurns()],
        )
        if setting.patched:
            _repair_weight_sync(trainer.vllm_generation)
        if steps.wait():
            trainer.train()


def _repair_weight_sync(generation) -> None:
    """Lets TRL's in-process vLLM take weights on CPU, where TRL's own way of loading them fails."""

    def sync_weights() -> None:
        runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=generation._iter_named_params())
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def try_alone(setting: TRLSetting, work: Work, tried: dict[str, float | str]) -> None:
    """Notes the shorter of two steps after the warm-up, in seconds, or why there was none."""
    if setting.name in tried:
        return
    print(f"trying {setting.name}", file=sys.stderr, flush=True)
    try:
        with contextlib.closing(harness.Arm(setting.name, trl_arm, work, setting)) as arm:
            times = [arm.step(alone=True)["step_s"] for _ in range(WARMUP_STEPS + 2)]
            tried[setting.name] = min(times[WARMUP_STEPS:])
    except harness.ArmError as error:
        tried[setting.name] = str(error).splitlines()[-1]
    print(f"  {tried[setting.name]}", file=sys.stderr, flush=True)


def by_speed(settings: Sequence[TRLSetting], tried: Mapping[str, float | str]) -> list[TRLSetting]:
    """Those that ran as TRL ships, the one with the shortest step first.

    >>> settings = [TRLSetting("bf16", 8), TRLSetting("bf16", 16), TRLSetting("bf16", 16, our_allocator=True)]
    >>> [s.batch for s in by_speed(settings, dict(zip([s.name for s in settings], [60.0, "killed", 50.0])))]
    [8]

    Raises:
        ValueError: none ran.
    """
    times = {s: seconds for s in settings if s.as_shipped and isinstance(seconds := tried.get(s.name), float)}
    if not times:
        raise ValueError(f"TRL ran at none of its settings: {dict(tried)}")
    return sorted(times, key=times.__getitem__)


def explore(work: Work, batches: Sequence[int], args: argparse.Namespace) -> tuple[list[TRLSetting], dict]:
    """The settings that ran as TRL ships, the fastest first, and what was tried; one that stands alone is not tried.

    Raises:
        ValueError: none ran.
    """
    weights = harness.dtype_name()
    changes = [{"weights": "fp32"}] * (args.trl_fp32 and weights == "bf16")
    changes += [{"generation": generation} for generation in args.trl_generation]
    changes += [{"our_allocator": True}] * args.our_allocator
    settings = [TRLSetting(weights, batch) for batch in batches]
    tried: dict[str, float | str] = {}
    if len(settings) == 1 and not changes:
        return settings, tried
    for setting in settings:
        try_alone(setting, work, tried)
    for change in changes:
        settings.append(replace(by_speed(settings, tried)[0], **change))
        try_alone(settings[-1], work, tried)
    return by_speed(settings, tried), tried


def first_that_runs(
    stack: contextlib.ExitStack, work: Work, settings: Sequence[TRLSetting], failed: dict[str, str]
) -> tuple[harness.Arm, TRLSetting] | None:
    """TRL's arm at the first setting that fits next to ours, warmed up; None where none does.

    Args:
        stack: closes the arm.
        failed: where the settings that fail are noted, each with the reason.
    """
    for setting in settings:
        arm = None
        try:
            arm = harness.Arm(setting.name, trl_arm, work, setting)
            for _ in range(WARMUP_STEPS):
                arm.step()
        except harness.ArmError as error:
            if arm is not None:
                arm.close()
            failed[setting.name] = str(error).splitlines()[-1]
            print(f"{setting.name} is left out: {failed[setting.name]}", file=sys.stderr, flush=True)
        else:
            stack.enter_context(contextlib.closing(arm))
            return arm, setting
    return None


def asked_work(args: argparse.Namespace) -> Work:
    """The work that the options ask for.

    Raises:
        ValueError: see :func:`make_work`.
    """
    return make_work(args.model, str(args.data), args.prompts, args.repeats, args.response)


def make_work(
    model: str,
    data: str,
    count: int,
    repeats: int,
    response: int,
    engine_share: float | None = None,
) -> Work:
    """The prompts and sizes of a step: the first questions of the data.

    Raises:
        ValueError: too few rows.
    """
    from grpo_rl.envs.gsm8k import GSM8K, load_rows
    from grpo_rl.policies.generation import load_tokenizer
    from grpo_rl.policies.hub import resolve_model

    folder = resolve_model(model)
    tokenizer = load_tokenizer(folder)
    rows = list(load_rows(data, "train"))
    if len(rows) < count:
        raise ValueError(f"{data} has {len(rows)} rows, and {count} prompts need as many")
    task = GSM8K(rows)

    def tokens(prompt: list[dict[str, str]]) -> int:
        return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))

    prompts = [task.prompt(row) for row in rows[:count]]
    return Work(str(folder), tuple(prompts), tuple(map(tokens, prompts)), repeats, response, engine_share)


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    try:
        work = asked_work(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    batches = [batch for batch in args.trl_batch if work.responses % batch == 0]
    if not batches:
        sys.exit(f"error: none of --trl-batch {args.trl_batch} divides {work.responses} responses")

    try:
        with contextlib.closing(harness.Arm(OURS, our_arm, work, args.ours)) as arm:
            arm.step(alone=True)  # before the minutes that TRL's settings take
        settings, tried = explore(work, batches, args)
    except (ValueError, harness.ArmError) as error:
        sys.exit(f"error: {error}")

    with contextlib.ExitStack() as stack:
        arms = {OURS: stack.enter_context(contextlib.closing(harness.Arm(OURS, our_arm, work, args.ours)))}
        for _ in range(WARMUP_STEPS):
            arms[OURS].step()
        # The fastest may fit into memory alone, and not next to ours.
        failed: dict[str, str] = {}
        if (fits := first_that_runs(stack, work, settings, failed)) is None:
            sys.exit(f"error: no setting of TRL fits next to ours: {failed}")
        arm, best = fits
        arms[best.name] = arm
        results = harness.rounds({name: arm.step for name, arm in arms.items()}, args.steps, warmup=0)

    summary = {name: harness.summarize(reports) | {"threads": arms[name].threads} for name, reports in results.items()}
    ours_s = summary[OURS]["median"]["step_s"]
    trl_s = summary[best.name]["median"]["step_s"]
    # A setting that was faster alone and did not fit next to ours counts by its time alone.
    alone = {name: seconds / ours_s for name in failed if isinstance(seconds := tried.get(name), float)}
    ratio = min([trl_s / ours_s, *alone.values()])
    print(f"{best.name}: {trl_s:.2f} s, {trl_s / ours_s:.2f} times ours ({ours_s:.2f} s)  {alone or ''}")
    ours = summary[OURS]["median"]
    limits = {name: value for name, value in ours.items() if name.startswith("limit_fraction")}
    print("of the machine's limit: " + "  ".join(f"{name} {value:.2f}" for name, value in limits.items()))
    bars = [
        harness.bar("times faster than TRL's best as it ships", ratio, at_least=SPEED_BAR),
        harness.bar("limit_fraction of our step", limits["limit_fraction"], at_least=LIMIT_BAR),
    ]
    tokens = " to ".join(map(str, sorted({min(work.prompt_tokens), max(work.prompt_tokens)})))
    result = {
        "shows": "One GRPO step, from generation to new weights in the engine: "
        f"{len(work.prompts)} prompts of {tokens} tokens, {work.repeats} responses of {work.response} tokens to each.",
        "peer": f"{best.name}, TRL {version('trl')}",
        "bars": bars,
        "limits": limits,
        "ratios": {best.name: trl_s / ours_s, **{f"{name}, alone": value for name, value in alone.items()}},
        "failed": failed,
        "arms": summary,
        "tried_alone_s": tried,
        "work": asdict(work) | {"model": args.model},
        "overrides_of_ours": args.ours,
        "code": harness.code(*CODE),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, ratio, result, args.out)


def parser(description: str) -> argparse.ArgumentParser:
    """Options of the work, and of ours."""
    parser = harness.arguments(description)
    number = harness.at_least_one
    data = os.environ.get("GRPO_RL_DATA")
    parser.add_argument(
        "--data", type=Path, default=Path(data, "gsm8k", "train.jsonl") if data else None,
        help="JSONL with `question` and `answer` (default: gsm8k/train.jsonl under $GRPO_RL_DATA)",
    )  # fmt: skip
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a local folder or a hub name")
    parser.add_argument("--prompts", type=number, default=4, help="prompts a step")
    parser.add_argument("--repeats", type=number, default=8, help="responses to each, an even number")
    parser.add_argument("--response", type=number, default=96, help="tokens of each response")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="config overrides for our arm")
    return parser


def checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options as they were given; ends the program where they make no work."""
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data FILE, or set GRPO_RL_DATA")
    if args.repeats % 2:
        parser.error(f"--repeats {args.repeats} is odd: rewards alternate inside each group")
    return args


def parse() -> argparse.Namespace:
    options = parser(__doc__)
    number = harness.at_least_one
    options.add_argument("--trl-batch", type=number, nargs="+", default=[8, 16, 32], help="responses a forward, to try")
    options.add_argument("--trl-fp32", action=argparse.BooleanOptionalAction, default=True,
                         help="try fp32 weights under autocast as well as bf16")  # fmt: skip
    options.add_argument("--trl-generation", nargs="*", choices=("batching", "vllm"), default=[],
                         help="ways to generate, to try as well as `generate`")  # fmt: skip
    options.add_argument("--our-allocator", action=argparse.BooleanOptionalAction, default=True,
                         help="try TRL with our allocator setting too")  # fmt: skip
    return checked(options)


if __name__ == "__main__":
    main()
