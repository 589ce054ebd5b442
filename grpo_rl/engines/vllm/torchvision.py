"""vLLM's models of text that share a file with models of images, where torchvision is not installed. For vLLM 0.32.

Such files import the image processors of transformers, which import torchvision. With a torch for CPUs the wheels of
torchvision can't be imported, and text needs none of it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers import logging
from transformers.utils import is_torchvision_available
from vllm.model_executor.models import registry


@functools.cache
def load_models_without_torchvision() -> None:
    """Has vLLM load its models' files in this process, and without torchvision if that is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    lazy: Any = registry._LazyRegisteredModel
    load = lazy.load_model_cls

    def load_model_cls(self: Any) -> type:
        with torchvision_stands_in():
            return load(self)

    lazy.load_model_cls = load_model_cls
    # Not in a process of its own, which spares a GPU's memory and here would know nothing of the stand-in.
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())


@contextmanager
def torchvision_stands_in() -> Iterator[None]:
    """A context in which torchvision can be imported, but nothing in it used."""
    is_torchvision_available()  # transformers keeps the result: it shall stay what it is outside
    finder, verbosity = _Finder(), logging.get_verbosity()
    hidden = sys.modules.get("torchvision", finder) is None  # by grpo_rl itself, as it can't be imported
    if hidden:
        del sys.modules["torchvision"]
    sys.meta_path.insert(0, finder)
    logging.set_verbosity_error()  # transformers would recommend to install it
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
        if hidden:
            sys.modules["torchvision"] = None


class _StandIn(ModuleType):
    """A module all of whose names are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
