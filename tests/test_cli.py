"""The command line: exit codes, errors of one line, and what it prints."""

import sys

import pytest
import yaml

import grpo_rl
from grpo_rl.cli import main
from grpo_rl.settings import compose


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sft"])
def test_train_runs_the_script_of_its_mode(mode, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["grpo-rl", "train", f"--{mode}", "mode=sync", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit, match=f"error: this script is of mode={mode}; run sota/.* or grpo-rl train"):
        main()


def test_train_passes_hydras_options_on(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo_countdown, _self_]\nenv:\n  repeats: 24\n")
    monkeypatch.setattr(sys, "argv", ["grpo-rl"])
    monkeypatch.chdir(tmp_path)
    main(["train", "--config-dir", ".", "--config-name", "mine", "--cfg", "job", "--package", "env", "env.num_envs=3"])
    env = yaml.safe_load(capsys.readouterr().out)
    assert (env["dataset"], env["repeats"], env["num_envs"]) == ("countdown", 24, 3)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.yaml"]


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"grpo-rl {grpo_rl.__version__}\n"


def test_no_command_at_all_shows_all_commands(capsys):
    assert main([]) == 2
    assert "check whether a model can be trained here" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_in_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_rl.run.status.status_of", interrupted)
    assert main(["status", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


@pytest.mark.parametrize("before", [["grpo-rl", "train", "--async"], ["python", "sota/grpo.py"], ["grpo-rl", "train"]])
def test_the_overrides_of_a_run_are_those_that_were_typed(before, monkeypatch):
    words = [*before, "loss=dapo", "--config-dir", "lr=1/conf", "optimizer.lr=1e-5", "hydra.run.dir=x"]
    monkeypatch.setattr(compose, "typed", words)
    assert compose.overrides() == ["loss=dapo", "optimizer.lr=1e-5"]


@pytest.mark.parametrize("words", ["status run", "export c f", "push-to-hub run me/m", "from-trl c.yaml"])
def test_a_command_without_overrides_refuses_one(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), "env.repeats=8"])
    assert f"{words.split()[0]} takes no overrides such as env.repeats=8" in capsys.readouterr().err
