"""A checkpoint's sharded tensors: each rank writes its rows, and any number of ranks reads them back.

They lie in a folder next to the checkpoint's own file, a file for each rank, with all of the rank's tensors. The
checkpoint's own file is written when they are safe, and lists them with their digests: where there is a file, its
tensors are whole, and any other is found out.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_rl.distributed.ranks import Ranks, agreed
from grpo_rl.policies.lora import saved_buffers
from grpo_rl.storage import checkpoint_file
from grpo_rl.storage.whole_file import make_folder

SHARDS = "shards"
"""The entry of a checkpoint's state that lists the tensors in the folder, and the folder's suffix."""
ABANDONED = ".abandoned"
"""Suffix of a checkpoint's file that is set aside."""
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

    What the folder holds already stays, as a checkpoint of this step may need it until it is replaced by this one.

    Args:
        path: of the checkpoint's file.
    """
    tensors: dict[str, Tensor] = {}
    index: list[dict[str, Any]] = []
    rest = _without_sharded(state, [], index, tensors)
    if tensors:
        folder = folder_of(path)

        def next_number() -> int:
            make_folder(folder)
            return 1 + max((_number(file) for file in folder.glob("save_*")), default=-1)

        number = agreed(ranks, lambda: next_number() if ranks.rank == 0 else 0)
        file = folder / f"save_{ranks.broadcast(number)}_rank_{ranks.rank}.pt"
        digest = agreed(ranks, lambda: checkpoint_file.write(file, tensors))
        rest[SHARDS] = {"files": ranks.gather([file.name, digest]), "tensors": index}
    return rest


def _number(file: Path) -> int:
    number = file.name.split("_")[1]
    return int(number) if number.isdecimal() else 0


def _without_sharded(state: Mapping, way: Place, index: list[dict[str, Any]], tensors: dict[str, Tensor]) -> dict:
    rest = {}
    for key, value in state.items():
        here = [*way, key]
        if isinstance(value, DTensor):
            assert value.placements == (Shard(0),), f"{here} is sharded in another way: {value.placements}"
            index.append({"place": here, "size": list(value.shape)})
            part = value.to_local().detach()
            # A rank's part may be a view into memory that holds more, all of which would be written.
            tensors[_name(here)] = part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
            value = None
        rest[key] = _without_sharded(value, here, index, tensors) if isinstance(value, Mapping) else value
    return rest


def remove_stale(path: Path, state: Mapping) -> None:
    """Removes what earlier and cut writes of the same step left, which the state does not list."""
    if SHARDS not in state:
        shutil.rmtree(folder_of(path), ignore_errors=True)
        return
    needed = {name for name, _ in state[SHARDS]["files"]}
    for file in folder_of(path).iterdir():
        if file.name not in needed:
            file.unlink()


def check_shards(path: Path, state: Mapping, rank: int = 0, size: int = 1) -> None:
    """Compares the files of a checkpoint's sharded tensors with their digests, each on one of the ranks.

    Raises:
        ValueError: one is missing or damaged, or all are of a form that isn't read any more.
    """
    shards = state.get(SHARDS)
    for name, digest in shards["files"][rank::size] if shards else []:
        try:
            found = checkpoint_file.check(_shard(path, name))
        except FileNotFoundError:
            raise ValueError(f"it has no sharded tensors next to it in {folder_of(path).name}/{name}") from None
        except ValueError as error:
            raise ValueError(f"{folder_of(path).name}/{name} is damaged: {error}") from error
        if found != digest:
            raise ValueError(f"{folder_of(path).name}/{name} is of another checkpoint (another SHA-256)")


def _shard(path: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"its sharded tensors are not in its own folder, but in {name!r}")
    return folder_of(path) / name


def load_shards(path: Path, state: dict, ranks: Ranks | None = None) -> dict:
    """The state with its sharded tensors on the CPU: whole, or with ``ranks`` each rank's part.

    Raises:
        ValueError: the file's description of its tensors is wrong.
    """
    shards = state.pop(SHARDS, None)
    if not shards:
        return state
    files = [checkpoint_file.read(_shard(path, name)) for name, _ in shards["files"]]
    mesh = ranks.cpu_mesh if ranks else None
    for tensor in shards["tensors"]:
        place, size = tensor["place"], torch.Size(tensor["size"])
        entry: Any = state
        for key in place[:-1]:
            entry = entry[key]
        parts = [file[_name(place)] for file in files]
        if sum(map(len, parts)) != size[0] or any(part.shape[1:] != size[1:] for part in parts):
            raise ValueError(f"the parts of {_name(place)} don't make up its size {list(size)}")
        entry[place[-1]] = _rows(parts, size, mesh)
    return state


def _name(place: Sequence[str | int]) -> str:
    return "/".join(map(str, place))


def _rows(parts: Sequence[Tensor], size: torch.Size, mesh: Any) -> Tensor:
    """The tensor of parts that follow each other: whole, or this rank's part of its first dimension."""
    if mesh is None:
        return torch.cat(list(parts))
    rows = math.ceil(size[0] / mesh.size())
    first = min(rows * mesh.get_local_rank(), size[0])
    last = min(first + rows, size[0])
    mine, start = [], 0
    for part in parts:
        mine.append(part[max(first - start, 0) : max(last - start, 0)])
        start += len(part)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(torch.cat(mine), mesh, [Shard(0)], run_check=False, shape=size, stride=stride)


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
        state: of a model without adapters, by the names of its parameters and saved buffers; tied weights once.
    """
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if generation_config is not None:
        plain.generation_config = generation_config
    buffers = saved_buffers(plain)
    # transformers would write the file without them, and fill them in when it is read.
    missing = {*dict(plain.named_parameters()), *buffers} - state.keys()
    assert not missing, f"the model's {sorted(missing)[:3]} are not among the weights to be written"
    weights = {name: weight.cpu() if name in buffers else weight.to("cpu", dtype) for name, weight in state.items()}
    plain.save_pretrained(folder, state_dict=weights)
