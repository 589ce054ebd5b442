"""A model from a local folder: with its weights, quantised weights, or only names and shapes.

Of a checkpoint of several models in one, such as text and vision, the text part is trained and sampled alone.
Parameters in memory have other names and forms than in files: transformers stacks experts, and ranks hold shards
(DTensors, split along their first dimension).
"""

import copy
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from grpo_rl.policies.before_loading import LoRA, Quantization
from grpo_rl.policies.generation import generation_config, leave_out_ignored
from grpo_rl.policies.hub import weight_names
from grpo_rl.policies.lora import check_readable, last_names, targeted
from grpo_rl.policies.probe import measured_logits
from grpo_rl.policies.routing import check_replay
from grpo_rl.policies.supported import supported_calls

HEAD = "lm_head."
RENAMED = {
    r"^language_model\.lm_head\.": HEAD,
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Beginnings of the text part's weights in such checkpoints -> in a checkpoint of it alone."""
OF_THE_WHOLE = ("dtype", "quantization_config", "eos_token_id")
"""Settings that the whole's config gives for its text part too."""


def check_model(folder: str | Path, lora: LoRA | None = None, router_replay: bool = False) -> None:
    """Checks that `TrainPolicy.load` can train the folder's model, without reading its weights.

    Args:
        lora: adapters that are trained instead of the model, if their rank is more than 0.
        router_replay: its routers have to take the experts that a sampler chose.

    Raises:
        ValueError: the model would be scored wrongly, the adapters' targets do not fit it, peft could not read
            their folder, or its routers can't replay.
    """
    model = skeleton(folder)
    supported_calls(model)
    if lora and lora.rank:
        names = targeted(model, lora.targets)
        if lora.export == "adapter":
            check_readable(model, names)
    if router_replay:
        check_replay(model)


def check_written(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Writes the folder's model without its weights to a temporary folder, as a finished run writes its own.

    Returns:
        Entries of the generation config that transformers ignores, and that are not written.

    Raises:
        ValueError: transformers refuses to write one of them, which is named, with the reason.
    """
    sampled = generation_config(folder)
    ignored = leave_out_ignored(sampled)
    parts = {"config.json": model_config(folder), "generation_config.json": sampled, "tokenizer.json": tokenizer}
    with tempfile.TemporaryDirectory() as place:
        for file, part in parts.items():
            try:
                part.save_pretrained(place)
            except Exception as error:  # the libraries raise errors of any kind
                why = " ".join(str(error).split())
                raise ValueError(f"{Path(folder) / file} could not be written with the trained model: {why}") from error
    return ignored


def skeleton(folder: str | Path) -> PreTrainedModel:
    """The folder's model, or the text part of several, on the meta device: names and shapes without weights.

    Raises:
        ValueError: the folder holds several models, and the text can't be taken out of them.
    """
    config = model_config(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def target_names(folder: str | Path, lora: LoRA) -> list[str]:
    """Last names of the layers that the adapters target in the folder's model, without reading its weights.

    Raises:
        ValueError: a target selects none; lists the choices.
    """
    return last_names(targeted(skeleton(folder), lora.targets))


def load_whole(folder: str | Path, **settings: Any) -> PreTrainedModel:
    """The folder's model, or the text part of several, with all of its weights.

    transformers alone would fill missing ones with random numbers; ``settings`` are those of its ``from_pretrained``.

    Raises:
        ValueError: the folder lacks weights, or they have other shapes than in its config; names them.
    """
    model, found = from_folder(folder, output_loading_info=True, ignore_mismatched_sizes=True, **settings)
    if wrong := sorted(found["mismatched_keys"]):
        name, held, expected = wrong[0]
        raise ValueError(
            f"{folder} holds {name} with shape {list(held)}, and its config.json asks for {list(expected)} "
            f"({len(wrong)} such weights): they are not of the same model; fetch or copy it again"
        )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{folder} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}{more}: fetch or copy it again"
        )
    leave_out_ignored(model.generation_config)
    return model


def load_quantized(
    folder: str | Path, quantization: Quantization, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """The folder's model with its linear layers, except for the head, in 4 or 8 bits, other weights in ``dtype``.

    Source of nf4 and of quantised scales: QLoRA, https://arxiv.org/abs/2305.14314, section 3; of int8 (whose inputs
    are rounded to 8 bits too): LLM.int8(), https://arxiv.org/abs/2208.07339.

    Raises:
        ValueError: the folder lacks weights.
    """
    settings = (
        BitsAndBytesConfig(load_in_8bit=True)
        if quantization == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
        )
    )
    return load_whole(folder, dtype=dtype, quantization_config=settings, device_map={"": torch.device(device)})


def model_config(folder: str | Path) -> PreTrainedConfig:
    """The config of the model that is trained from the folder, which for several models in one is that of the text.

    Args:
        folder: a local folder, or a name on the hub whose config is there.

    Raises:
        ValueError: the folder holds several models, and the text can't be taken out of them.
    """
    return text_part(folder) or AutoConfig.from_pretrained(folder)


def text_part(folder: str | Path) -> PreTrainedConfig | None:
    """The config of the causal language model inside several models in one; None for a checkpoint of one model."""
    whole = AutoConfig.from_pretrained(folder)
    if (found := whole.get_text_config()) is whole:
        return None
    several = f"{folder} holds several models in one ({', '.join(whole.sub_configs)})"
    if type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{several}, and transformers has no causal language model of a {type(found).__name__} alone")
    text: Any = copy.deepcopy(found)
    try:
        text.architectures, tied = _check_inside(whole, text)
    except ValueError as error:
        raise ValueError(f"{several}, and its text can't be taken out of it: {error}") from error
    # With a head among its weights, such a checkpoint is not tied, whatever the defaults of its config say.
    text.tie_word_embeddings = tied and not any((text_name(n) or "").startswith(HEAD) for n in weight_names(folder))
    for name in OF_THE_WHOLE:
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    return text


def text_name(name: str) -> str | None:
    """The name that a weight of several models in one has in a checkpoint of the text alone; None for others' weights.

    >>> [text_name(name) for name in ("model.language_model.norm.weight", "lm_head.weight", "model.visual.norm.weight")]
    ['model.norm.weight', 'lm_head.weight', None]
    """
    for beginning, alone in RENAMED.items():
        renamed, found = re.subn(beginning, alone, name)
        if found:
            return renamed
    return name if name.startswith(HEAD) else None


def from_folder(folder: str | Path, **settings: Any) -> Any:
    """The result of ``AutoModelForCausalLM.from_pretrained``, for the text part alone where there are several models.

    Other parts' weights are not read.
    """
    text = text_part(folder)
    if text is None:
        return AutoModelForCausalLM.from_pretrained(folder, **settings)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would report each weight of the other parts
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, config=text, key_mapping=RENAMED, **settings)
    finally:
        logging.set_verbosity(verbosity)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    del model._weight_conversions  # with which `save_pretrained` would give the weights the whole's names again
    return loaded


def _check_inside(whole: PreTrainedConfig, text: PreTrainedConfig) -> tuple[list[str], bool]:
    """The text model's class, if the whole computes text as that does, and whether the whole ties its head."""
    with torch.device("meta"):
        alone = AutoModelForCausalLM.from_config(text)
        try:
            model: Any = AutoModelForMultimodalLM.from_config(copy.deepcopy(whole))
        except Exception as error:  # the model's own code may fail in any way
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"transformers can't build it ({what})") from error
    layers = type(alone.base_model)
    if (count := sum(type(module) is layers for module in model.modules())) != 1:
        raise ValueError(f"{type(model).__name__} has {count} {layers.__name__}, not one")
    if (head := model.get_output_embeddings()) is None:
        raise ValueError(f"{type(model).__name__} has no head")
    if not torch.equal(measured_logits(model), measured_logits(alone)):
        raise ValueError(f"{type(model).__name__} and {type(alone).__name__} make different logits of hidden states")
    return [type(alone).__name__], head.weight is model.get_input_embeddings().weight


class CheckpointNames:
    """The checkpoint's names for a model's parameters, and the part of a parameter that each of them stands for.

    A parameter that was made from several tensors of the checkpoint is given as views of it, one for each; any other as
    it is. Where views can't undo how a parameter was made, it keeps the model's own name and form.

    Args:
        model: of transformers; any other module's names are its checkpoint's.

    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    >>> config = Qwen3MoeConfig(**sizes, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=4)
    >>> names = CheckpointNames(Qwen3MoeForCausalLM(config))
    >>> for name, view in names.views("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(2, 8, 8)):
    ...     print(name, list(view.shape))
    model.layers.0.mlp.experts.0.gate_proj.weight [4, 8]
    model.layers.0.mlp.experts.1.gate_proj.weight [4, 8]
    model.layers.0.mlp.experts.0.up_proj.weight [4, 8]
    model.layers.0.mlp.experts.1.up_proj.weight [4, 8]
    """

    def __init__(self, model: torch.nn.Module) -> None:
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None and hasattr(model, "config"):
            # As transformers saves it: one that was read from no file has no prefix to put back.
            conversions = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
        back = [conversion.reverse_transform() for conversion in reversed(conversions or [])]
        self._renamings = [entry for entry in back if isinstance(entry, WeightRenaming)]
        converters = (entry for entry in back if isinstance(entry, WeightConverter))
        self._converters = [entry for entry in converters if _is_undone_by_views(entry)]

    def views(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensor of the model's ``name``, or its parts, under the checkpoint's names."""
        if not self._renamings and not self._converters:
            yield name, tensor
            return
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
        if pattern is None:
            yield renamed, tensor
            return
        converter = next(entry for entry in self._converters if pattern in entry.source_patterns)
        parts = {target: tensor for target in converter.target_patterns}
        for operation in converter.operations:
            parts = dict(_undone(operation, parts))
        # The name has the first of the targets, with an expert's number left open.
        first = converter.target_patterns[0]
        prefix, found, suffix = renamed.partition(first)
        assert found, (renamed, first)
        for target, view in parts.items():
            yield prefix + target + suffix, view


def _is_undone_by_views(converter: WeightConverter) -> bool:
    operations = converter.operations
    return len(converter.source_patterns) == 1 and all(
        (isinstance(op, Chunk) and op.num_shards_attribute is None)
        or (isinstance(op, SplitModulelist) and op.dim == 0)
        or (isinstance(op, Transpose) and not op.check_dims)
        for op in operations
    )


def _undone(operation: Chunk | SplitModulelist | Transpose, parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for i, (target, tensor) in enumerate(parts.items()):
        if isinstance(operation, Chunk):
            yield target, tensor.chunk(len(parts), operation.dim)[i]
        elif isinstance(operation, Transpose):
            yield target, tensor.transpose(operation.dim0, operation.dim1)
        else:
            for number, expert in enumerate(tensor.unbind(0)):
                yield target.replace("*", str(number)), expert


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, a collective call of all ranks; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; a plain tensor as it is.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, source: Tensor) -> None:
    """Writes ``source`` into ``target``, or this rank's part of it.

    Args:
        source: whole, or sharded like ``target``, on any device.

    >>> weight = torch.zeros(2)
    >>> assign(weight, torch.tensor([1.0, 2.0])); weight
    tensor([1., 2.])
    """
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        mesh = target.device_mesh
        parts, rank = source.chunk(mesh.size()), mesh.get_local_rank()
        # With fewer rows than ranks the last ranks have none.
        source = parts[rank] if rank < len(parts) else source[:0]
    there, part = local(target), local(source)
    assert there.shape == part.shape, f"a source of {list(part.shape)} for a target of {list(there.shape)}"
    there.copy_(part)  # alone it would broadcast a single row


def placed_like(source: Tensor, like: Tensor) -> Tensor:
    """``source`` sharded like ``like``; unchanged if that is a plain tensor."""
    if not isinstance(like, DTensor):
        return source
    out = torch.empty_like(like, dtype=source.dtype, requires_grad=False)
    assign(out, source)
    return out
