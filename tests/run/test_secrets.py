"""Secrets in the environment and in settings: no file of a run's folder, and nothing that it prints, holds one."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from tiny_runs import run_script

from grpo_rl.settings import compose
from grpo_rl.settings.config import main
from tests.report.runs import unpacked
from tests.run.test_sft import OF_GRPO

SCRIPTS = Path(__file__).parents[2] / "sota"
IN_ENVIRONMENT = {
    "WANDB_API_KEY": "planted-wandb-0123456789abcdef0123456789abcdef",
    "HF_TOKEN": "hf_plantedTokenOfTheHub",
    "OPENAI_API_KEY": "sk-planted-endpoint",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
    "RAY_AUTH_TOKEN": "plantedraytoken",
}
IN_SETTINGS = ("planted-api-key", "planted-password", "planted-in-url", "planted-credential", "planted-behind")


class Quiet:
    """A logger that takes secrets, writes nothing, and fails with an address in what it says."""

    def __init__(self, run_dir, config, last_step, **settings):
        Quiet.given = settings
        assert not any(secret in str(config) for secret in IN_SETTINGS)

    def log(self, step, metrics):
        raise ConnectionError(f"no answer from {self.given['uri']}")

    def table(self, step, rows): ...

    def close(self, exit_code=0):
        raise ConnectionError(f"can't reach {self.given['uri']}")


SETTINGS = [
    f"logger.backend={__name__}:Quiet",
    "+logger.settings.Quiet.api_key=planted-api-key",
    "+logger.settings.Quiet.db={user: me, password: planted-password planted-behind}",
    "+logger.settings.Quiet.uri='https://me:planted-in-url@host/db'",
    "+logger.settings.Quiet.credentials=[planted-credential, planted-behind]",
]


def contents(folder):
    """Each file with its bytes; of Parquet and pages, which are compressed, their content as well."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes()
        if path.suffix == ".parquet" and path.is_file():
            table = pq.read_table(path)
            yield path, f"{table.to_pylist()} {table.schema.metadata}".encode()
        if path.suffix == ".html":
            yield path, unpacked(path).encode()


def found_in(folder, *texts):
    secrets = [*IN_ENVIRONMENT.values(), *IN_SETTINGS]
    held = [(path.name, secret) for path, data in contents(folder) for secret in secrets if secret.encode() in data]
    return held + [("printed", secret) for text in texts for secret in secrets if secret in text]


OWN = {
    "grpo.py": ["train.lineage=true"],
    "sft.py": ["train.optim_batch_size=4", "train.epochs=1", "sampling.max_new_tokens=10"],
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("script", ["grpo.py", "sft.py"])
def test_no_byte_of_a_runs_folder_holds_a_secret_of_environment_or_settings(
    script, tiny_run, tmp_path, monkeypatch, own_cache, capfd
):
    for name, value in IN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    rest = [word for word in tiny_run if script == "grpo.py" or not word.startswith(OF_GRPO)]
    folder = run_script(SCRIPTS / script, [*rest, *OWN[script], "evaluate.rows=2", *SETTINGS], tmp_path / "run")
    printed = capfd.readouterr()
    assert found_in(folder, printed.out, printed.err) == []
    assert "".join(printed.out.split()).count("https://***@host/db") == 1  # of the first failure
    # They were there to be found, and reached the logger.
    assert Quiet.given["api_key"] == "planted-api-key" and Quiet.given["db"]["password"].startswith("planted-password")
    names = {path.name for path, _ in contents(folder)}
    assert {"config.yaml", "overrides.yaml", "summary.json", "report.html", "README.md"} <= names
    assert any(name.startswith("checkpoint_") for name in names)
    assert "***" in (folder / "config.yaml").read_text() and "***" in (folder / "overrides.yaml").read_text()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("words", "composed"),
    [
        (["env.num_envs=0"], True),
        (["logger.settings.wandb.api_key=planted-api-key"], False),  # lacks a plus
        (["+logger.settings.wandb.password=planted-pass(word"], False),
        (["+logger.settings.wandb.password='planted-password planted-behind"], False),
    ],
)
def test_a_start_that_is_refused_leaves_no_secret_behind(words, composed, tiny_run, tmp_path, own_cache, capfd):
    with pytest.raises(SystemExit, match="error") as refused:
        run_script(SCRIPTS / "grpo.py", [*tiny_run, *SETTINGS, *words], tmp_path / "run")
    printed = capfd.readouterr()
    assert not list(tmp_path.glob("run/*"))
    assert found_in(tmp_path, str(refused.value), printed.out, printed.err) == []
    assert composed or ("***" in str(refused.value) and "planted" not in str(refused.value))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["env.num_envs=0"], "env.num_envs"),
        (["loss=grpo,none_such"], "none_such"),  # by Hydra, before any job
    ],
)
def test_a_sweep_that_is_refused_leaves_no_secret_behind(words, refused, tiny_run, tmp_path, own_cache):
    words = ["--multirun", *tiny_run, *SETTINGS, *words]
    with pytest.raises(SystemExit, match=refused):
        run_script(SCRIPTS / "grpo.py", [*words, f"hydra.sweep.dir={tmp_path}"], tmp_path / "unused")
    assert "api_key: '***'" in (tmp_path / "multirun.yaml").read_text() and found_in(tmp_path) == []


def test_jobs_of_a_sweep_get_their_secret_and_values_and_multirun_yaml_has_no_secret(tmp_path, monkeypatch):
    got, name = [], f"{tmp_path.as_posix()}/conf=1"
    (tmp_path / "conf=1").mkdir()
    (tmp_path / "conf=1" / "mine.yaml").write_text("defaults: [grpo_gsm8k, _self_]\ntrain: {seed: 5}\n")
    own = ["--config-dir", name, "--config-name", "mine"]
    words = ["env.path=quickstart-train", "inference_model.engine=transformers", f"hydra.sweep.dir={tmp_path}"]
    words += [*SETTINGS, "+hydra.job.env_set.WANDB_API_KEY=planted-behind", "sampling.max_new_tokens=64,128"]
    monkeypatch.setattr("sys.argv", ["/runs/lr=1/grpo.py", "--multirun", *words, *own])
    GlobalHydra.instance().clear()

    def train(settings, folder):
        text = (tmp_path / "multirun.yaml").read_text()
        assert "planted" not in text and "***" in text
        got.append((settings.logger.settings["Quiet"]["api_key"], settings.sampling.max_new_tokens))
        assert compose.typed[:6] == ["python", "/runs/lr=1/grpo.py", *own] and settings.train.seed == 5
        given = compose.overrides()
        assert given[0] == words[0] and given[-1] == f"sampling.max_new_tokens={got[-1][1]}"

    main(config_name="grpo_gsm8k")(train)()
    assert got == [("planted-api-key", 64), ("planted-api-key", 128)]
    assert yaml.safe_load((tmp_path / "multirun.yaml").read_text())["sampling"]["max_new_tokens"] != "***"
