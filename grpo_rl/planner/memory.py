"""Bytes that one device of each role holds at most, counted from a model's shape: no weights are read.

The trainer's are counted at the moments that can be the highest: the backward pass of the head, of a layer, and, where
the model is sharded, the reduction of what FSDP2 keeps together with the embedding and the head. Activations are those
of the layers' eager code, or of the kernels that `grpo_rl.policies.attention` makes of it.
`tests/planner/test_tracker.py` holds all this against PyTorch's own tracker.

Of a mixture all experts are held, and a token's activations are those of the experts that it visits, computed together
by transformers' `grouped_mm`, with the gate that most have: an activation of one factor, times the other. All of its
layers are taken for ones with experts, though a few may be dense.

Letters: T tokens of a micro-batch, H hidden size, I of the MLP, V vocabulary, L parameters of a layer, w bytes of a
number in the dtype that is computed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from grpo_rl.engines.sampling import batch_tokens, logits_bytes, sequences
from grpo_rl.perf.roofline import ModelSizes, experts_of_a_token
from grpo_rl.policies.head import CPU_TILE, GPU_TILE_LOGITS
from grpo_rl.policies.lora import LoRA, targeted
from grpo_rl.policies.mixers import mixers
from grpo_rl.policies.routing import stacked_experts
from grpo_rl.policies.supported import supported_calls

Kind = Literal["cuda", "cpu"]
DOWN = ("down_proj", "output_linear")
"""Names of an MLP's last product; it reads as many numbers as the MLP is wide."""
QUANTIZED_BYTES = {"nf4": 0.5 + 0.127 / 8, "fp4": 0.5 + 0.127 / 8, "int8": 1.0}
"""Bytes of a weight: 4 bits and 0.127 more of quantised scales (QLoRA, https://arxiv.org/abs/2305.14314, section 3)."""
CPU_CACHE_GIB = 2
"""The largest KV cache of vLLM on a CPU, where no share of the memory counts; see `grpo_rl.engines.vllm.cpu`."""
VLLM_BLOCK = 16
"""Tokens in a block of vLLM's KV cache."""


class NotPlannedError(ValueError):
    """A model that can be trained is of a kind whose memory is not counted, so that there is no plan; names it."""


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture; those of a dense model are none.

    Args:
        number: experts of a layer.
        chosen: experts that a token visits in a layer.
        intermediate: numbers between an expert's products.
        parameters: number in all experts of all layers.
    """

    number: int = 1
    chosen: int = 0
    intermediate: int = 0
    parameters: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> Experts:
        """The experts of a model, which may have no weights.

        Raises:
            NotPlannedError: its config does not say how many of them a token visits, or its layers have different ones.
        """
        layers = [weights for _, _, weights in stacked_experts(model)]
        if not layers:
            return cls()
        config, name = model.config.get_text_config(), type(model).__name__
        if not isinstance(chosen := experts_of_a_token(config), int):
            raise NotPlannedError(f"{name}'s config does not say how many experts a token visits, which its plan needs")
        numbers = {len(weight) for weights in layers for weight in weights}
        # The last product's weights, [I, H] or [H, I] of each expert, are the smallest: the others' have two factors.
        widths = {min(w.numel() // len(w) for w in weights) // config.hidden_size for weights in layers}
        if len(numbers) > 1 or len(widths) > 1:
            raise NotPlannedError(f"{name}'s layers have different experts; a plan needs equal ones")
        total = sum(weight.numel() for weights in layers for weight in weights)
        return cls(numbers.pop(), chosen, widths.pop(), total)

    def visited(self, tokens: int) -> float:
        """The share of a layer's experts that so many tokens visit together, each choosing by itself.

        >>> Experts(number=8, chosen=2).visited(1), Experts(number=8, chosen=2).visited(2), Experts().visited(9)
        (0.25, 0.4375, 0.0)
        """
        return 1 - (1 - self.chosen / self.number) ** tokens


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that memory depends on.

    Args:
        sizes: what a step's operations are counted from, in the dtype that is computed in.
        layer: parameters of the largest layer.
        root: parameters outside the layers: embedding, last norm, head.
        largest: parameters of a layer's largest tensor.
        intermediate: numbers between the products of the MLP; of a mixture's shared experts, which every token visits.
        norms: sum of the widths of a layer's norms.
        head_norms: the same of the norms of queries and keys, whose output no product reads.
        positions: tokens that the model was made for.
        adapters: parameters of the adapters, which alone are trained; 0: none.
    """

    sizes: ModelSizes
    itemsize: int
    parameters: int
    layer: int
    root: int
    largest: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norms: int
    head_norms: int
    tied: bool
    positions: int
    experts: Experts
    adapters: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, lora: LoRA | None = None) -> Shape:
        """The shape of a model, which may have no weights.

        Raises:
            ValueError: the model can't be trained here, or (NotPlannedError) is of a kind that is not planned.
        """
        supported_calls(model)
        config, name = model.config.get_text_config(), type(model).__name__
        if any(mixers(model)):
            raise NotPlannedError(f"{name} has layers that carry a state; plans are of attention alone")
        if getattr(config, "kv_lora_rank", None):
            raise NotPlannedError(f"{name} has latent attention (kv_lora_rank), whose memory is not planned")
        experts = Experts.of(model)
        layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        widths = {"q_norm": heads * head_dim, "k_norm": kv_heads * head_dim}
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        layer = layers[sizes.index(max(sizes))]
        parameters = sum(p.numel() for p in model.parameters())
        last = [m for name, m in layer.named_modules() if name.endswith(DOWN) and isinstance(m, torch.nn.Linear)]
        names = [name for name, m in layer.named_modules() if type(m).__name__.endswith("Norm")]
        norms = [name.rpartition(".")[2] for name in names]
        adapters = 0
        if lora and lora.rank:
            if lora.dora:
                raise NotPlannedError("train_model.lora.dora=true copies each adapted weight, which is not planned")
            targets = [model.get_submodule(name) for name in targeted(model, lora.targets)]
            adapters = sum(lora.rank * (m.in_features + m.out_features) for m in targets)
        return cls(
            sizes=ModelSizes.of(model),
            itemsize=model.dtype.itemsize,
            parameters=parameters,
            layer=max(sizes),
            root=parameters - sum(sizes),
            largest=max(p.numel() for p in layer.parameters()),
            layers=len(layers),
            intermediate=sum(m.in_features for m in last) if experts.chosen else config.intermediate_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norms=config.hidden_size * sum(name not in widths for name in norms),
            head_norms=sum(widths[name] for name in norms if name in widths),
            tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,  # pyrefly: ignore[missing-attribute]
            positions=config.max_position_embeddings,
            adapters=adapters,
            experts=experts,
        )

    def can_split_keys(self, size: int) -> bool:
        """True if so many devices can have equal parts of the key-value heads, each of them split or repeated."""
        return self.kv_heads % size == 0 or size % self.kv_heads == 0

    @property
    def table(self) -> int:
        """Parameters of the head."""
        return self.sizes.vocab * self.sizes.hidden

    def kept_per_token(self, fused: bool, kind: Kind) -> int:
        """Bytes of each token that a layer keeps for its backward pass.

        A norm keeps its input in fp32, the normalised numbers and its output, which is the next products' input; the
        attention queries, keys, values, its output (on CUDA laid out twice) and a log-sum-exp a head; the MLP both
        factors, the activation and their product. Fused kernels keep a norm's input and output, and make the MLP's
        activation again. Each expert of a token keeps its input and output on top of what an MLP does, which is never
        fused, four places in the order of tokens and of experts (int64) and two weights; a router its probabilities.
        """
        w, queries, keys = self.itemsize, self.sizes.attention, self.kv_heads * self.head_dim
        norms = self.norms * (2 * w if fused else 4 + 2 * w) + self.head_norms * (w if fused else 4 + w)
        attention = w * (2 * queries + 2 * keys) + 4 * self.heads + (w * queries if kind == "cuda" else 0)
        experts, hidden = self.experts, self.sizes.hidden
        routed = experts.chosen * (w * (4 * experts.intermediate + 2 * hidden) + 4 * 8 + 2 * 4)
        routed += 4 * experts.number * (experts.chosen > 0)
        return norms + attention + w * self.intermediate * (3 if fused else 4) + routed


@dataclass(frozen=True)
class Training:
    """The settings that the trainer's memory depends on.

    Args:
        masters: fp32 copies are stepped in the place of the weights.
        moments: numbers that the optimizer keeps of each parameter: 2 in AdamW, 0 in SGD.
        frozen_bytes: bytes of each frozen weight under adapters.
        offloaded: the trainer's state is in the host's memory.
    """

    masters: bool = True
    moments: int = 2
    checkpointing: bool = False
    fused: bool = False
    frozen_bytes: float = 2.0
    offloaded: bool = False


@dataclass(frozen=True)
class Footprint:
    """The bytes of one device at one moment, by what they are."""

    moment: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def kept_state(shape: Shape, training: Training, ranks: int) -> dict[str, float]:
    """Bytes that a training device holds from its first step on, gradients included.

    On one device there are weights and fp32 masters. Sharded by FSDP2 the masters are the parameters:
    weights in the dtype that is computed in exist only while they are gathered. Gradients and moments have the dtype of
    what is stepped.
    """
    w, trained = shape.itemsize, shape.adapters or shape.parameters
    stepped = 4 if training.masters else w
    # Only linear layers are quantised, and stacked experts are none.
    stacked = shape.experts.parameters
    frozen = (shape.parameters - stacked) * training.frozen_bytes + stacked * w if shape.adapters else 0.0
    return {
        "weights": (frozen + (0 if training.masters and ranks > 1 else w * trained)) / ranks,
        "fp32 masters": 4 * trained / ranks if training.masters else 0.0,
        "gradients": stepped * trained / ranks,
        "optimizer": training.moments * stepped * trained / ranks,
    }


def training_footprint(shape: Shape, training: Training, ranks: int, tokens: int, kind: Kind = "cuda") -> Footprint:
    """The peak of a training device, in any micro-batch of a step but the first.

    All ``tokens``, T, are taken to be scored, of which prompts are not.
    """
    return max(training_moments(shape, training, ranks, tokens, kind), key=lambda moment: moment.total)


def training_moments(shape: Shape, training: Training, ranks: int, tokens: int, kind: Kind = "cuda") -> list[Footprint]:
    """The moments that can be the highest, see :func:`training_footprint`."""
    w, hidden, sharded, trains_all = shape.itemsize, shape.sizes.hidden, ranks > 1, not shape.adapters
    stepped = 4 if training.masters else w
    state = {} if training.offloaded else kept_state(shape, training, ranks)

    def moment(name: str, gathered: float, gradients: float, per_token: float, logits: float = 0.0) -> Footprint:
        parts = {"gathered weights": gathered, "gradients on their way": gradients}
        return Footprint(name, state | parts | {"activations": tokens * per_token, "logits": logits})

    own = shape.kept_per_token(training.fused, kind)
    unit = w * hidden if training.checkpointing else own  # that a layer keeps until its turn
    kept = shape.layers * unit
    scored = ((4 + 2 * w) + w + (w if kind == "cuda" else 4 + w)) * hidden  # the last norm, its output, its gradient
    # Amid an MLP's backward pass there are two gradients of the stream, and three of its own.
    experts = shape.experts
    mlp = 3 * shape.intermediate + experts.chosen * (3 * experts.intermediate + 2 * hidden)
    working = (own if training.checkpointing else 0) + w * (2 * hidden + mlp)
    # A norm as it was kept, gradients of the stream and of three products, and fp32 numbers on the way.
    norm = ((4 + 2 * w) + 5 * w + 4 * 4) * hidden
    table, root = (shape.table, shape.root) if trains_all else (0, 0)
    largest = (w + (4 if training.masters else 0)) * (shape.largest if trains_all else 0)  # cast as it is made
    tile = logits_tile(shape, tokens, kind)
    head, layer = "the head's backward pass", "a layer's backward pass"
    if not sharded:
        product = w * table if kind == "cuda" else 0
        waiting = stepped * table if shape.tied else 0  # for the embedding's
        return [
            moment(head, 0, stepped * table + product, kept + scored, tile),
            moment(layer, 0, waiting + largest, kept + working),
            moment("the embedding's backward pass", 0, stepped * table, w * hidden),
        ]
    # Gathered weights get their gradients in the dtype of what is stepped; they are summed over the ranks in fp32.
    layer_grads = shape.layer if trains_all else shape.adapters // shape.layers
    gathered_root, gathered = w * shape.root, w * (shape.root + 2 * shape.layer)  # the next layer comes meanwhile
    waiting = stepped * table  # the head's is reduced together with the embedding's, at the end
    moments = [moment(head, gathered_root, waiting + w * table, kept + scored, tile)]
    # The last layer is the first; from the second on, gradients of the one before are on their way to other ranks.
    for done in (0, 1):
        grads, left = waiting + done * 4 * layer_grads, kept - done * unit
        moments += [
            moment(layer, gathered, grads + largest, left + working),
            moment("the end of a layer's backward pass", gathered, grads + stepped * layer_grads, left - unit + norm),
        ]
    return [*moments, moment("the reduction of the head's gradient", 0, (stepped + 4) * root, 0)]


def logits_tile(shape: Shape, tokens: int, kind: Kind) -> float:
    """Bytes of the logits that exist at the same time, see `grpo_rl.policies.head`."""
    if kind == "cuda":
        return shape.itemsize * min(GPU_TILE_LOGITS, tokens * shape.sizes.vocab)
    return 3 * 4 * min(CPU_TILE[0], tokens) * min(CPU_TILE[1], shape.sizes.vocab)


def reference_activations(shape: Shape, tokens: int, kind: Kind = "cuda") -> dict[str, float]:
    """Bytes that a reference on a device of its own needs in addition to its weights."""
    w, hidden = shape.itemsize, shape.sizes.hidden
    # The widest place of a layer: the stream, a norm in fp32, and three vectors of the MLP.
    # Of each expert its input, both factors, activation and product; or its input, output, and that weighted, twice.
    experts = shape.experts
    working = (2 * w + 8) * hidden + 3 * w * shape.intermediate
    working += experts.chosen * w * max(hidden + 4 * experts.intermediate, 4 * hidden)
    return {"activations": tokens * working, "logits": logits_tile(shape, tokens, kind)}


@dataclass(frozen=True)
class EngineMemory:
    """The bytes of an engine on each of its devices, and what they hold.

    ``sequences`` are responses that it computes at the same time, as far as its cache has room.
    """

    budget: float
    weights: float
    work: float
    kv_per_token: float
    sequences: int = 256

    @property
    def cache(self) -> float:
        """Bytes that are left for the KV cache; less than 0 where not even the weights fit."""
        return self.budget - self.weights - self.work

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, in whole blocks."""
        return max(0, int(self.cache // (self.kv_per_token * VLLM_BLOCK))) * VLLM_BLOCK


def engine_memory(
    shape: Shape,
    tensor_parallel_size: int,
    memory: float,
    utilization: float,
    kind: Kind = "cuda",
    responses: int = 256,
    max_num_seqs: int | None = None,
) -> EngineMemory:
    """The division that vLLM makes of a device's memory.

    Each of ``tensor_parallel_size`` devices has an equal part of the weights, and of the key-value heads one at least.

    Args:
        utilization: the share of it that vLLM may take; on a CPU :data:`CPU_CACHE_GIB` at most, and these are counted.
        responses: number that is sent to it at a time.
    """
    size, w = tensor_parallel_size, shape.itemsize
    vocab, share = shape.sizes.vocab, memory * utilization if kind == "cuda" else None
    at_once = max_num_seqs or sequences(responses, vocab, share)
    # Of each token both factors of the MLP and their product, and a few of the stream; of each response fp32 logits.
    hidden, experts = shape.sizes.hidden, shape.experts
    stream = 4 * w * hidden + 3 * w * shape.intermediate / size
    # Two buffers of vLLM's kernel (`TritonExperts.workspace_shapes`): each is used for vectors of both widths.
    inner = experts.intermediate / size
    stream += experts.chosen * w * (max(inner, hidden) + max(2 * inner, hidden))
    weights, work = w * shape.parameters / size, batch_tokens(memory) * stream + at_once * logits_bytes(vocab)
    return EngineMemory(
        budget=memory * utilization if kind == "cuda" else weights + work + CPU_CACHE_GIB * 2**30,
        weights=weights,
        work=work,
        kv_per_token=2 * w * shape.layers * max(1, shape.kv_heads // size) * shape.head_dim,
        sequences=at_once,
    )
