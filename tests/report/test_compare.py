import json
import os
import socket
from pathlib import Path

import yaml

from grpo_rl import cli
from grpo_rl.intervals import paired_gain
from grpo_rl.monitor.metrics import MetricsLog
from grpo_rl.report import command, compare, page


def run_of(folder: Path, lr: float, rewards: list[float], gain: tuple[float, ...] = (), **env) -> Path:
    """A finished run with this learning rate, held-out rewards, and gain with its interval."""
    MetricsLog(folder).log(1, {"reward/mean": 0.5})
    config = {"optimizer": {"lr": lr}, "env": {"dataset": "gsm8k"} | env}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "evaluation.json").write_text(json.dumps({"step": 1, "rewards": rewards}))
    summary = {"finished": True, "steps": 1}
    if gain:
        summary |= {"eval_before": 0.0, "eval_after": gain[0], "eval_gain": gain[0], "eval_gain_ci95": gain[1:]}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_runs_are_compared_row_by_row(tmp_path):
    a = run_of(tmp_path / "a", 1e-5, [0.0, 1.0, 0.0, 1.0])
    b = run_of(tmp_path / "b", 2e-5, [1.0, 1.0, 0.0, 2.0])
    first, second = compare.compared([a, b])
    expected = paired_gain([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 2.0])
    assert second["difference"] == {"gain": 0.5, "low": expected.low, "high": expected.high} and second["rows"] == 4
    assert "difference" not in first and "gain" not in first  # one step is too few to say
    assert compare.build([a, b])["settings"] == {"optimizer.lr": ["1e-05", "2e-05"]}
    other = run_of(tmp_path / "other", 1e-5, [1.0, 1.0, 0.0, 2.0], dataset="math")
    longer = run_of(tmp_path / "longer", 1e-5, [1.0, 1.0, 1.0, 1.0, 1.0])
    _, other, longer = compare.compared([a, other, longer])
    assert other["unpaired"] == "other env.dataset" and "difference" not in other
    assert longer["unpaired"].startswith("4 rewards before and 5 after")


def test_runs_of_sft_are_compared_by_their_held_out_loss_which_is_better_when_lower(tmp_path):
    def imitation(name, lr, losses, **env):
        folder = run_of(tmp_path / name, lr, [], **env)
        (folder / "metrics.jsonl").unlink()
        for step, loss in enumerate(losses):
            MetricsLog(folder).log(step, {"loss/sft": 2.0, "eval/loss": loss})
        (folder / "evaluation.json").unlink()
        return folder

    a, b = imitation("a", 1e-5, [2.0, 1.5]), imitation("b", 2e-5, [2.0, 1.75, 1.25])
    (a / "summary.json").write_text(json.dumps({"finished": True, "eval_loss_before": 2.0, "eval_loss_after": 1.5}))
    first, second = compare.compared([a, b])
    assert (first["loss"], second["loss"]) == ({"before": 2.0, "after": 1.5}, {"before": 2.0, "after": 1.25})
    assert "gain" not in second and "unpaired" not in second
    head = compare.head([a, b])
    assert head["headline"] == "2 runs; run b has the lowest held-out loss of 2: 1.250, 2.000 before training."
    assert "interval" not in head["note"]
    other = imitation("c", 1e-5, [3.0, 0.1], dataset="math")
    assert "so their losses don't compare" in compare.head([a, other])["headline"]


def test_the_best_run_is_named_with_what_its_interval_allows_where_gains_are_of_the_same_thing(tmp_path):
    low = run_of(tmp_path / "0", 1e-5, [0.0, 1.0], (0.1, 0.0, 0.2))
    high = run_of(tmp_path / "1", 2e-5, [0.0, 1.0], (0.9, 0.8, 1.0))
    near = run_of(tmp_path / "2", 4e-5, [0.0, 1.0], (0.85, 0.7, 0.95))
    assert compare.head([low, high])["headline"] == (
        "2 runs; run lr=2e-05 gained most of 2 in held-out reward: +0.900, 95 % interval +0.800 to +1.000, above every "
        "other run's interval."
    )
    assert compare.head([low, high, near])["headline"].endswith(", others reach into it.")
    (panel,) = compare.sweep([high, low, near])["panels"]
    assert panel["key"] == "optimizer.lr" and [run["value"] for run in panel["runs"]] == ["1e-05", "2e-05", "4e-05"]

    short = run_of(tmp_path / "b", 2e-5, [])
    other = run_of(tmp_path / "c", 2e-5, [0.0, 1.0], (0.9, 0.8, 1.0), dataset="math")
    assert "run 0 alone is long enough to say what it gained" in compare.head([low, short])["headline"]
    assert "differs (env.dataset), so their gains don't compare" in compare.head([low, other])["headline"]


def test_the_jobs_of_a_sweep_are_named_by_their_settings_and_by_their_folders_where_these_are_many(tmp_path):
    jobs = [run_of(tmp_path / str(i), 1e-5, [], prompt=f"a\n{i}", depth=1, **{"eval": {"prompt": i}}) for i in (0, 1)]
    assert compare.names_of(jobs) == [f"env.eval.prompt={i}, env.prompt=a {i}" for i in (0, 1)]
    bare = tmp_path / "2"
    MetricsLog(bare).log(1, {"reward/mean": 0.5})
    assert compare.names_of([*jobs, bare]) == ["0", "1", "2"]


def test_a_comparison_of_stopped_runs_is_not_live(tmp_path):
    runs = [run_of(tmp_path / name, 1e-5, []) for name in "ab"]
    assert compare.head(runs)["state"] == "ended"
    (runs[1] / "summary.json").write_text("{}")
    assert compare.head(runs)["state"] == "stopped" and "or were stopped: 1." in compare.head(runs)["note"]
    (runs[1] / ".lock").write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert compare.head(runs)["state"] == "running" and compare.head(runs)["note"].endswith("Runs that go on: 1.")


def test_a_comparison_shows_no_secret(tmp_path):
    a = run_of(tmp_path / "a", 1e-5, [0.0, 1.0], (0.1, 0.0, 0.2), api_key="hunter2")
    b = run_of(tmp_path / "b", 2e-5, [0.0, 1.0], (0.1, 0.0, 0.2))
    (b / "config.yaml").write_text((a / "config.yaml").read_text().replace("hunter2", "hunter3"))
    found = page.build(compare.SECTIONS, [a, b], compare.SUMMARY)
    assert json.loads(found["comparison"])["settings"] == {"env.api_key": ["***", "***"]}
    assert "hunter" not in str(found)


def test_a_sweeps_folder_stands_for_its_runs_in_their_order(tmp_path):
    (tmp_path / "multirun.yaml").touch()
    for name in ("10", "2", "0"):
        run_of(tmp_path / name, 1e-5, [])
    (tmp_path / "notes").mkdir()
    assert [run.name for run in compare.run_folders([tmp_path])] == ["0", "2", "10"]
    assert compare.run_folders([tmp_path / "2"]) == [tmp_path / "2"]
    assert cli.main(["report", str(tmp_path / "notes")]) == 2 and not list((tmp_path / "notes").iterdir())


def test_the_command_writes_one_page_for_a_sweep_and_for_several_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "sweep").mkdir()
    runs = [run_of(tmp_path / "sweep" / str(i), 1e-5 * i, [0.0, 1.0]) for i in (1, 2)]
    assert cli.main(["report", str(tmp_path / "sweep")]) == 0
    assert "Comparison of 2 runs" in (tmp_path / "sweep" / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *map(str, runs)]) == 0
    assert "Comparison of 2 runs" in (tmp_path / "comparison.html").read_text()
    assert capsys.readouterr().out.split() == [str(tmp_path / "sweep" / "report.html"), "comparison.html"]


def test_the_recorded_run_is_small_and_has_every_section_of_a_synchronous_run(tmp_path):
    assert command.RECORDED.stat().st_size < 300_000
    found = page.build(page.SECTIONS, command.unpack(tmp_path))
    for name in ("summary.json", "config.yaml", "overrides.yaml", "metrics.jsonl"):
        text = (tmp_path / command.NAME / name).read_text()
        assert not any(place in text for place in ("/tmp", "/root", "/home"))
    assert {section.id for section in page.SECTIONS} - found.keys() <= {"advisories"}  # nothing went wrong in it
    assert not any("left_out" in json.loads(text) for text in found.values())
