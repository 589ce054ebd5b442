"""A torchvision that can't be imported beside torch: hidden from transformers, replaced for vLLM's models."""

import importlib
import importlib.util
import sys

import pytest

import grpo_rl


def test_vllms_models_get_the_stand_in_and_not_the_hidden_package(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("grpo_rl.engines.vllm.cpu")
    for name in [name for name in sys.modules if name.partition(".")[0] in grpo_rl.CUDA_BUILDS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, version in (("torch", "2.13.0+cpu"), ("torchvision", "0.28.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('operator {name}::nms does not exist')")
        (info := tmp_path / f"{name}-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    grpo_rl._hide_cuda_builds()
    with torchvision.torchvision_stands_in():
        assert importlib.import_module("torchvision.transforms").Compose is None
    assert importlib.util.find_spec("torchvision") is None
    with pytest.raises(ImportError):
        importlib.import_module("torchvision.transforms")
    for name in grpo_rl.CUDA_BUILDS:
        sys.modules.pop(name, None)
