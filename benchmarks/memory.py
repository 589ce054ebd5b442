"""Growth of peak memory with the vocabulary and the responses, over what has to grow: `python benchmarks/memory.py`.

One training forward and backward of a group of 8 equal responses, by a random Llama with SmolLM2's hidden size, tied
embeddings and few layers, in `harness.dtype`, without gradient checkpointing. Every point has a process of its own,
which builds the model, makes a tiny step, and reports by how much its memory's peak rises in the first full-size step;
the model's weights are added to that. So weights, gradients and what the step allocates are counted, and the
optimizer's state in no arm: our fp32 masters of bf16 weights are there before the step, and no arm steps Adam. Swept:
the vocabulary V, and the responses' tokens T.

- ours: `TrainPolicy.score`, `GRPOLoss`, gradients summed in fp32 as our optimizer keeps them;
- TRL: the real `GRPOTrainer`'s `_compute_loss` with its fused head, all responses in a forward;
- TorchRL: `GRPOLoss` over `TransformersWrapper`, without entropy and KL terms;
- trunk: our model's layers alone, without head and loss.

What has to grow: with each entry of the vocabulary, a row of the weight and of its fp32 gradient; with each token,
what the trunk alone needs, and a row of hidden states and of their fp32 gradient. The figure is the larger of our two
slopes over these.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import harness
import torch

NAME = "memory"
OURS, TRUNK = "grpo_rl", "trunk"
HIDDEN, LAYERS = 576, 6
PROMPT, RESPONSES = 64, 8
VOCABS = (32768, 65536, 98304, 151936)
TOKENS = (256, 1024, 2048, 4096)
VOCAB, RESPONSE = 49152, 256
"""The value of each axis during the sweep over the other."""
REPEATS = 3
"""Processes of each of our points, of which the median counts: where an allocator finds room is partly chance."""
CHANCE = 0.03
"""The share by which a slope still moves from call to call: points vary by some 10 MiB."""
GRADIENT_BYTES = 4
"""Bytes of a number of a gradient: they are summed in fp32."""

Step = tuple[Callable[[list], None], Callable[[], object]]
"""Two functions: one makes the gradients of groups, the other frees them."""


def make_model(vocab: int):
    """A random Llama, in `harness.dtype`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(harness.dtype())


def make_groups(vocab: int, response: int) -> list:
    """One group whose responses have ``response`` tokens in all, and advantages that are not zero."""
    from grpo_rl.testing import random_group

    group = random_group(PROMPT, [max(1, response // RESPONSES)] * RESPONSES, vocab)
    return [group.with_advantages(torch.tensor([1.0, -1.0] * (RESPONSES // 2)))]


def make_tokenizer(folder: Path):
    """Any tokenizer: the peers ask for one, and find nothing in it but the padding token."""
    from transformers import AutoTokenizer

    from grpo_rl.testing import save_tiny_model

    return AutoTokenizer.from_pretrained(save_tiny_model(folder))


def our_step(model, folder: Path) -> Step:
    """Score, loss, backward."""
    from grpo_rl.data.batching import MicroBatching
    from grpo_rl.losses.grpo import GRPOLoss
    from grpo_rl.policies.before_loading import keep_freed_memory
    from grpo_rl.policies.policy import TrainPolicy
    from grpo_rl.training.micro_batches import scored_micro_batches
    from grpo_rl.training.optimizer import PolicyOptimizer

    keep_freed_memory()
    policy, loss = TrainPolicy(model.train()), GRPOLoss()
    optimizer = PolicyOptimizer(model, name="sgd", lr=0.0)  # for the gradients that it keeps

    def step(groups: list) -> None:
        for tokens in scored_micro_batches(policy, groups, MicroBatching(sys.maxsize)):
            loss(tokens)["loss_objective"].backward()

    return step, optimizer.step


def trunk_step(model, folder: Path) -> Step:
    """The layers, and a gradient from nowhere."""
    from grpo_rl.policies.attention import forward_hidden
    from grpo_rl.policies.before_loading import keep_freed_memory
    from grpo_rl.policies.head import Lookups
    from grpo_rl.policies.packing import pack
    from grpo_rl.policies.policy import TrainPolicy
    from grpo_rl.training.optimizer import PolicyOptimizer

    keep_freed_memory()
    TrainPolicy(model.train())
    optimizer = PolicyOptimizer(model, name="sgd", lr=0.0)

    def step(groups: list) -> None:
        with Lookups(model.get_input_embeddings().weight):
            hidden = forward_hidden(model, pack(groups))
        hidden.backward(torch.ones_like(hidden))

    return step, optimizer.step


def trl_step(model, folder: Path) -> Step:
    """TRL's loss on the padded batch."""
    import peers

    tokenizer = make_tokenizer(folder / "tokenizer")
    trainer = peers.trl_trainer(model, tokenizer, RESPONSES, batch=RESPONSES, folder=folder)

    def step(groups: list) -> None:
        peers.trl_backward(trainer, peers.trl_batches(groups, RESPONSES, tokenizer.pad_token_id))

    return step, model.zero_grad


def torchrl_step(model, folder: Path) -> Step:
    """TorchRL's loss; its docs say to keep the model in evaluation mode."""
    import peers

    loss = peers.torchrl_loss(model.eval(), make_tokenizer(folder / "tokenizer"))

    def step(groups: list) -> None:
        loss(peers.torchrl_batch(groups)).loss_objective.backward()

    return step, model.zero_grad


STEPS = {OURS: our_step, "trl": trl_step, "torchrl": torchrl_step, TRUNK: trunk_step}


def arm(steps: harness.Steps, name: str, vocab: int, response: int) -> None:
    """Tells the peak of one step: weights and what the step needs."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(vocab)
        step, release = STEPS[name](model, Path(folder))
        step(make_groups(vocab, RESPONSES))
        release()
        groups = make_groups(vocab, response)
        weights = sum(p.nbytes for p in model.parameters())
        if steps.wait():
            rise = harness.peak_above(functools.partial(step, groups))
            steps.done(peak_mib=(weights + rise) / 2**20, rise_mib=rise / 2**20)


def sweep(names: Sequence[str], points: Mapping[int, tuple[int, int]], failed: dict[str, str]) -> dict[str, list]:
    """For every arm, [[x, peak in bytes], ...]; a point that fails is left out and named in ``failed``.

    Args:
        points: of each x, the vocabulary and the response tokens.
    """
    peaks: dict[str, list] = {name: [] for name in names}
    for (x, (vocab, response)), name in itertools.product(points.items(), names):
        label = f"{name} V={vocab} T={response}"
        peaks_mib = []
        try:
            for _ in range(REPEATS if name in (OURS, TRUNK) else 1):
                with contextlib.closing(harness.Arm(label, arm, name, vocab, response)) as process:
                    peaks_mib.append(process.step()["peak_mib"])
        except harness.ArmError as error:
            failed[label] = str(error).splitlines()[-1]
            print(f"{label} is left out: {failed[label]}", file=sys.stderr, flush=True)
        else:
            peaks[name].append([x, statistics.median(peaks_mib) * 2**20])
            print(f"{label}: {' '.join(f'{mib:.0f}' for mib in peaks_mib)} MiB", file=sys.stderr, flush=True)
    return peaks


def over_allowance(slopes: Mapping[str, Mapping[str, float]], itemsize: int) -> dict[str, tuple[float, float]]:
    """For V and T: what our memory grows with one more over what it has to, and what it has to, in bytes.

    An entry of the vocabulary has to have its row of the weight, and of the gradient as it is kept; a response token
    the trunk's bytes, and those of what goes from the trunk to the head and back.

    Args:
        itemsize: bytes of a number of the weights and hidden states.

    >>> over_allowance({"V": {"grpo_rl": 6912.0}, "T": {"grpo_rl": 5484.0, "trunk": 200.0}}, itemsize=2)
    {'V': (2.0, 3456), 'T': (1.5, 3656.0)}
    """
    row = HIDDEN * (itemsize + GRADIENT_BYTES)
    allowed = {"V": row, "T": slopes["T"][TRUNK] + row}
    return {axis: (slopes[axis][OURS] / allowed[axis], allowed[axis]) for axis in slopes}


def main() -> None:
    args = parse()
    load = harness.require_quiet(args.force)
    failed: dict[str, str] = {}
    names = [OURS, *args.peers]
    series = {
        "V": sweep(names, {vocab: (vocab, args.response) for vocab in args.vocabs}, failed),
        "T": sweep([*names, TRUNK], {tokens: (args.vocab, tokens) for tokens in args.tokens}, failed),
    }
    slopes = {
        axis: {name: harness.slope(points) for name, points in arms.items() if len(points) > 1}
        for axis, arms in series.items()
    }
    if OURS not in slopes["V"] or not {OURS, TRUNK} <= slopes["T"].keys():
        sys.exit(f"error: too few points of {OURS} and {TRUNK}: {failed}")
    over = over_allowance(slopes, harness.dtype().itemsize)
    words = {"V": "vocabulary", "T": "response tokens"}
    result = {
        "shows": "Peak memory of a training forward and backward, weights included, against the vocabulary and against "
        "the responses' tokens; the figure is our larger slope over what has to grow. It counts weights, gradients and "
        "what the step allocates; the optimizer's state (fp32 masters of bf16 weights, Adam's moments) is in no arm's "
        "peak.",
        "peer": ", ".join(f"{name} {version(name)}" for name in args.peers),
        "bars": [
            harness.bar(
                f"growth with {words[axis]} over {allowed / 1024:.1f} KiB for each (1, within {CHANCE:.0%})",
                ratio,
                at_most=1 + CHANCE,
            )
            for axis, (ratio, allowed) in over.items()
        ],
        "table": [
            {"swept": words[axis], "arm": name, "KiB for each": slope / 1024, "over what has to be": slope / allowed}
            for axis, (_, allowed) in over.items()
            for name, slope in slopes[axis].items()
        ],
        "plots": [
            {
                "title": f"peak memory against {words[axis]}",
                "x": words[axis],
                "y": "MiB",
                "series": {name: [[x, y / 2**20] for x, y in points] for name, points in arms.items()},
            }
            for axis, arms in series.items()
        ],
        "failed": failed,
        "model": {"hidden": HIDDEN, "layers": LAYERS, "prompt": PROMPT, "responses": RESPONSES},
        "swept": {"vocabs": args.vocabs, "at_response": args.response, "tokens": args.tokens, "at_vocab": args.vocab},
        "code": harness.code("grpo_rl/losses", "grpo_rl/policies", "grpo_rl/training"),
        "machine": harness.machine(),
        **load,
    }
    harness.finish(NAME, max(ratio for ratio, _ in over.values()), result, args.out)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, steps=None)
    number = harness.at_least_one
    parser.add_argument("--vocabs", type=number, nargs="+", default=list(VOCABS), help="to sweep")
    parser.add_argument("--tokens", type=number, nargs="+", default=list(TOKENS), help="of all responses, to sweep")
    parser.add_argument("--vocab", type=number, default=VOCAB, help="while tokens are swept")
    parser.add_argument("--response", type=number, default=RESPONSE, help="tokens, while vocabularies are swept")
    parser.add_argument("--peers", nargs="*", choices=("trl", "torchrl"), default=["trl", "torchrl"])
    args = parser.parse_args()
    for name in ("vocabs", "tokens"):
        if len(getattr(args, name)) < 2:
            parser.error(f"--{name} needs at least two, for a slope")
    return args


if __name__ == "__main__":
    main()
