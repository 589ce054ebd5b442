"""A checkpoint's sharded tensors: each rank writes its part, and any number of ranks reads them back.

They lie in a folder of torch.distributed.checkpoint's beside the checkpoint's own file, which is written when they are
safe: where there is a file, its tensors are whole.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GenerationConfig

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from grpo_rl.parallel import Ranks

# torch.distributed.checkpoint is imported where it is used: it takes long, and most runs have nothing sharded.

SHARDS = "shards"
"""The entry of a checkpoint's state that says which tensors lie in the folder, and the folder's suffix."""
ABANDONED = ".abandoned"
"""Of a checkpoint's file that is set aside."""
Place = list[str | int]
"""Keys on the way to an entry of nested mappings."""


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint's sharded tensors; one that is set aside has a folder of its own.

    >>> folder_of(Path("checkpoint_000002.pt")).name, folder_of(Path("checkpoint_000002.abandoned")).name
    ('checkpoint_000002.shards', 'checkpoint_000002.abandoned.shards')
    """
    return path.with_name(f"{path.name.removesuffix('.pt')}.{SHARDS}")


def save_shards(path: Path, state: Mapping, ranks: Ranks) -> dict:
    """Writes the sharded tensors of a state to disk; the state without them. Every rank has to call it.

    Args:
        path: of the checkpoint's file.
    """
    tensors: dict[str, Tensor] = {}
    places: list[Place] = []
    rest = _without_sharded(state, [], places, tensors)
    if tensors:
        import torch.distributed.checkpoint as dcp

        if ranks.rank == 0:
            # What a killed write left, or a run that was resumed before here. A file needs its tensors.
            path.unlink(missing_ok=True)
            shutil.rmtree(folder_of(path), ignore_errors=True)
        ranks.wait()
        dcp.save(tensors, checkpoint_id=folder_of(path))
        rest[SHARDS] = places
    return rest


def _without_sharded(state: Mapping, way: Place, places: list[Place], tensors: dict[str, Tensor]) -> dict:
    rest = {}
    for key, value in state.items():
        here = [*way, key]
        if isinstance(value, DTensor):
            places.append(here)
            tensors[_name(here)] = value
            value = None
        rest[key] = _without_sharded(value, here, places, tensors) if isinstance(value, Mapping) else value
    return rest


def load_shards(path: Path, state: dict, ranks: Ranks | None = None) -> dict:
    """The state with its sharded tensors on the CPU: whole, or with ``ranks`` each rank's part.

    Raises:
        ValueError: the folder beside the file is missing or broken.
    """
    places = state.pop(SHARDS, [])
    if not places:
        return state
    import torch.distributed.checkpoint as dcp

    shapes = _metadata(path)
    mesh = ranks.cpu_mesh if ranks else None
    tensors = {_name(place): _empty(shapes[_name(place)], mesh) for place in places}
    dcp.load(tensors, checkpoint_id=folder_of(path), no_dist=mesh is None)
    for place in places:
        entry: Any = state
        for key in place[:-1]:
            entry = entry[key]
        entry[place[-1]] = tensors[_name(place)]
    return state


def _name(place: Sequence[str | int]) -> str:
    return "/".join(map(str, place))


def _metadata(path: Path) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(folder_of(path)).read_metadata().state_dict_metadata  # pyright: ignore
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} has no sharded tensors beside it in {folder_of(path).name}: {error}") from error


def _empty(of: TensorStorageMetadata, mesh: Any) -> Tensor:
    """A tensor to read into: whole, or this rank's part of its first dimension."""
    size, dtype = of.size, of.properties.dtype
    if mesh is None:
        return torch.empty(size, dtype=dtype)
    rows = math.ceil(size[0] / mesh.size())
    mine = max(0, min(size[0], rows * (mesh.get_local_rank() + 1)) - rows * mesh.get_local_rank())
    part = torch.empty((mine, *size[1:]), dtype=dtype)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)


def set_aside(path: Path) -> None:
    """Renames a checkpoint to ``.abandoned``, its file first: what is left of a cut renaming is no checkpoint."""
    aside = path.with_suffix(ABANDONED)
    shutil.rmtree(folder_of(aside), ignore_errors=True)  # of one that was set aside before
    path.rename(aside)
    if folder_of(path).exists():
        folder_of(path).rename(folder_of(aside))


def remove_orphans(folder: Path) -> None:
    """Removes tensors without a file, which killed writes left."""
    kept = {folder_of(path) for path in [*folder.glob("checkpoint_*.pt"), *folder.glob(f"checkpoint_*{ABANDONED}")]}
    for shards in set(folder.glob(f"checkpoint_*.{SHARDS}")) - kept:
        shutil.rmtree(shards)


def remove(path: Path) -> None:
    """Removes a checkpoint, its file first: what is left of a cut removal is no checkpoint."""
    path.unlink()
    shutil.rmtree(folder_of(path), ignore_errors=True)


def export_model(
    state: Mapping[str, Tensor],
    config: Any,
    folder: Path,
    dtype: torch.dtype,
    generation_config: GenerationConfig | None = None,
) -> None:
    """Writes whole weights as a model that ``from_pretrained`` reads.

    Args:
        state: of a model without adapters, by the names of its parameters; tied weights once.
        config: of the model.
        generation_config: how it is sampled from where nothing else is asked; None: as its class has it.
    """
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if generation_config is not None:
        plain.generation_config = generation_config
    plain.save_pretrained(folder, state_dict={name: weight.to("cpu", dtype) for name, weight in state.items()})
