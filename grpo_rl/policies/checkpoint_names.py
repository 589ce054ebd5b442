"""A model's tensors by the names of its checkpoint: transformers stacks experts in memory, files do not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
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
