"""The model card, and the command that uploads it with the model."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from grpo_rl.cli import main
from grpo_rl.envs import sources
from grpo_rl.run.model_card import base_license, model_card
from grpo_rl.run.origin import command, origin, revisions
from grpo_rl.settings.compose import compose_config
from grpo_rl.settings.schema import Settings

SUMMARY = {
    "steps": 100, "seconds": 754,
    "eval_before": 0.25, "eval_after": 0.5, "eval_gain": 0.25, "eval_gain_ci95": [0.125, 0.375],
    "grpo_rl": "0.1.0", "git_commit": "abc123", "config_hash": "0123456789ab",
    "versions": {"grpo_rl": "0.1.0", "torch": "2.13.0"},
    "command": "python /home/me/sota/grpo.py model.name=/data/models/m",
}  # fmt: skip


def card(*overrides: str) -> ModelCard:
    settings = Settings.read(compose_config("grpo_gsm8k", list(overrides)))
    return ModelCard(model_card(json.loads(settings.as_json()), SUMMARY))


def test_the_card_has_front_matter_for_the_hub_the_result_and_how_to_make_it_again():
    found = card("model.name=org/Base-1B", "optimizer.lr=2e-5", "+env.rewards.length=0.5")
    data, text = found.data.to_dict(), found.text
    assert data["base_model"] == "org/Base-1B" and data["datasets"] == ["openai/gsm8k"]
    assert data["library_name"] == "transformers" and "grpo" in data["tags"] and "license" not in data
    assert "licence is not known here" in text and "org/Base-1B, whose commit is not known" in text
    assert "a gain of +0.250 (95 % interval +0.125 to +0.375)" in text and "100 steps in 12:34" in text
    assert "| `optimizer.lr` | 2e-05 |" in text and "plus `length`" in text
    assert "commit abc123" in text and "torch 2.13.0" in text


def test_the_commits_that_the_hubs_cache_names_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ours, main, branch, read = (digit * 40 for digit in "abcd")
    for name, commit in (("models--org--M", ours), ("datasets--openai--gsm8k", main)):
        (tmp_path / name / "refs").mkdir(parents=True)
        (tmp_path / name / "refs" / "main").write_text(commit)

    def load_dataset(name, subset, *, split, revision):
        # Offline `datasets` reads the newest copy of its own cache, whatever the hub's cache has as the main branch.
        commit = {None: read, "dev": branch}.get(revision, revision)
        files = [{"filename": str(tmp_path / "datasets" / commit / f"rows-{split}.arrow")}]
        return SimpleNamespace(
            cache_files=files, column_names=["q"], select_columns=lambda names: Dataset.from_list([])
        )

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("grpo_rl.envs.sources.LOADED", {})
    monkeypatch.setattr("grpo_rl.run.origin.LOADED", sources.LOADED)
    for source in ("openai/gsm8k:main", "DigitalLearningGmbH/MATH-lighteval", "hf:org/rows"):
        sources.read(sources.Source(source), "train", list)
    sources.read(sources.Source("hf:org/rows", revision="dev"), "train", list)
    model = tmp_path / "models--org--M" / "snapshots" / ours
    model.mkdir(parents=True)
    for name, content in (("config.json", "{}"), ("model.safetensors", "")):
        (model / name).write_text(content)
    loaded = Path(snapshot_download("org/M", local_files_only=True)).resolve()  # as a run finds it, without a network
    own = {"path": None, "dataset": "gsm8k", "revision": None}
    assert revisions(loaded, own) == {"model_revision": ours, "data_revision": read}
    assert revisions(loaded, own, {"model_revision": "d" * 40})["model_revision"] == "d" * 40  # it goes on from there
    for changes, commit in (
        ({"path": "hf:org/rows", "revision": "dev"}, branch),
        ({"path": "hf:org/others"}, None),
        ({"path": "rows.jsonl"}, None),
        ({"dataset": "countdown"}, None),
        ({"dataset": "math"}, read),
    ):
        assert revisions(tmp_path, own | changes) == {"model_revision": None, "data_revision": commit}, changes


@pytest.mark.parametrize(
    ("words", "repository"),
    [
        (["env.path=hf:org/rows:main"], "org/rows"),
        (["env.dataset=math"], "DigitalLearningGmbH/MATH-lighteval"),
        (["env.path=org/rows"], "org/rows"),
    ],
)
def test_the_card_names_the_repository_and_commit_of_the_data(words, repository):
    settings = json.loads(Settings.read(compose_config("grpo_gsm8k", words)).as_json())
    settings["model"]["name"] = "org/Base-1B"
    text = model_card(settings, SUMMARY | {"model_revision": "a" * 40, "data_revision": "b" * 40})
    assert "**Base model**: org/Base-1B at commit " + "a" * 40 in text
    assert f"**Data**: {repository} at commit " + "b" * 40 in text and f"datasets:\n- {repository}\n" in text
    unknown = model_card(settings, SUMMARY | {"data_revision": None})
    mine = words == ["env.path=org/rows"]  # without hf: and a commit it may be a folder
    assert ("**Data**: data of its own" in unknown and repository not in unknown) is mine


def test_no_local_path_and_no_setting_of_a_logger_is_in_the_card(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base")
    assert base_license(str(tmp_path)) == "apache-2.0"
    words = [f"model.name={tmp_path}", f"env.path={tmp_path}/secret.jsonl", "logger.backend=mlflow"]
    found = card(*words, "+logger.settings.mlflow.tracking_uri='http://me:password@host'")
    assert found.data.to_dict()["license"] == "apache-2.0"
    assert "base_model" not in found.data.to_dict() and "datasets" not in found.data.to_dict()
    assert str(tmp_path) not in found.content and "password" not in found.content and "/home/me" not in found.content


def test_the_command_has_no_setting_of_a_logger_and_no_secret():
    words = ["logger={settings: {wandb: {key: k}}}", "+logger.name=k", "++logger=k", "~logger.name", "env.api_key=k"]
    told = command(["grpo-rl", "train", *words, "train.seed=1"])
    assert told == "grpo-rl train 'env.api_key=***' train.seed=1"


def test_a_resumed_run_has_the_command_of_what_it_is_now_and_that_of_its_start_where_it_is_another(monkeypatch):
    def type_in(*words):
        monkeypatch.setattr("grpo_rl.run.origin.typed", list(words))

    type_in("grpo-rl", "train", "train.seed=1")
    first = origin({})
    type_in("grpo-rl", "train", "train.seed=1", "resume=x")
    assert origin({}, first) == first
    type_in("grpo-rl", "train", "train.seed=1", "train.total_dialog_turns=64", "+resume=x")
    second = origin({}, first)
    now = "grpo-rl train train.seed=1 train.total_dialog_turns=64"
    assert second == first | {"command": now, "command_of_start": "grpo-rl train train.seed=1"}
    assert origin({}, second) == second


@pytest.fixture
def run_folder(tmp_path) -> Path:
    model, checkpoints = tmp_path / "model", tmp_path / "checkpoints"
    for folder in (model, checkpoints):
        folder.mkdir()
    (checkpoints / "checkpoint_000002.pt").write_bytes(b"x" * 100)
    (model / "model.safetensors").write_bytes(b"x" * 2_000_000)
    (model / "config.json").write_text("{}")
    (model / "README.md").write_text("# card")
    return tmp_path


def test_the_upload_is_of_the_models_files_alone_into_a_repository_as_private_as_asked(run_folder, monkeypatch, capsys):
    api = MagicMock()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    assert main(["push-to-hub", str(run_folder), "org/name", "--dry-run"]) == 0
    assert "2.00 MB  model.safetensors" in capsys.readouterr().out and not api.mock_calls
    assert main(["push-to-hub", str(run_folder), "org/name", "--private"]) == 0
    api.create_repo.assert_called_once_with("org/name", private=True, exist_ok=True)
    sent = api.upload_folder.call_args.kwargs
    assert sent["folder_path"] == run_folder / "model"
    assert sent["allow_patterns"] == ["README.md", "config.json", "model.safetensors"]


def test_a_public_repository_is_not_taken_for_a_private_one(run_folder, monkeypatch, capsys):
    api = MagicMock()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    api.repo_info.return_value.private = False
    assert main(["push-to-hub", str(run_folder), "org/name", "--private"]) == 2
    assert "org/name is there already, and public" in capsys.readouterr().err
    api.create_repo.assert_not_called()
    api.upload_folder.assert_not_called()
    api.repo_info.side_effect = RepositoryNotFoundError("404", response=MagicMock())
    assert main(["push-to-hub", str(run_folder), "org/name", "--private"]) == 0
    assert api.create_repo.call_args.kwargs["private"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("optimizer.pt", "x", "optimizer.pt is no file of a model, and is not uploaded"),
        (".env", "x", ".env is no file of a model"),
        ("notes.txt", "hf_" + "a" * 34, "notes.txt holds what looks like a key"),
    ],
)
def test_what_is_no_models_file_and_what_looks_like_a_key_is_refused(run_folder, capsys, name, content, message):
    (run_folder / "model" / name).write_text(content)
    assert main(["push-to-hub", str(run_folder), "org/name", "--dry-run"]) == 2
    assert message in capsys.readouterr().err
