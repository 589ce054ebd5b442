from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from grpo_rl.monitor.wandb import WandbLog


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """No key of whoever runs the tests is found, and nothing is written to his home."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))


def offline_runs(run_dir: Path) -> list[bytes]:
    """The uncompressed records of each offline run of the folder, oldest first."""
    paths = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))  # the folders are named by time
    return [path.read_bytes() for path in paths]


def own_children() -> list[str]:
    """The commands of the processes that this one has started, and that have not ended."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ") for pid in pids]


@pytest.mark.nightly
def test_an_offline_run_keeps_its_points_in_the_run_folder_and_its_id_over_a_resume(tmp_path):
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    log = WandbLog(run_dir, {"optimizer": {"lr": 1e-5}}, project="p", mode="offline")
    log.log(1, {"reward/mean": 0.25, "total/sampled_tokens": 77.0})
    log.table(1, [{"completion": "4", "reward": 2.0}])
    assert any("wandb-core" in command for command in own_children())
    log.close()
    assert not any("wandb-core" in command for command in own_children()), "it may still be writing the file"
    run_id = (run_dir / "wandb_id").read_text()
    [first] = offline_runs(run_dir)
    assert b"reward/mean" in first and b"0.25" in first
    assert b"a_overview/reward" in first and b"77" in first
    [table] = run_dir.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["completion", "reward"], "data": [["4", 2.0]]}
    assert not log.needs_history

    time.sleep(1.1)  # W&B names the folder by the second
    resumed = WandbLog(run_dir, {}, 1, project="p", mode="offline")
    resumed.log(1, {"reward/mean": 0.75})
    resumed.close()
    assert resumed.needs_history  # the earlier file is set aside, and a run logs it again
    assert (run_dir / "wandb_id").read_text() == run_id
    assert all(run_id.strip() in p.name for p in run_dir.glob("wandb/*offline-run-*"))
    [second] = offline_runs(run_dir)
    assert b"0.75" in second and len(list(run_dir.glob("wandb/abandoned-offline-run-*"))) == 1

    [file] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    file.with_name(f"{file.name}.synced").touch()  # as `wandb sync` leaves it: neither set aside nor logged again
    time.sleep(1.1)
    uploaded = WandbLog(run_dir, {}, 1, mode="offline")
    uploaded.close()
    assert not uploaded.needs_history and len(offline_runs(run_dir)) == 2


@pytest.mark.slow
def test_online_without_a_key_says_how_to_go_on_without_one(tmp_path):
    pytest.importorskip("wandb")
    with pytest.raises(ValueError, match="logger.mode=offline or logger.backend=none"):
        WandbLog(tmp_path, {}, mode="online")
    assert not (tmp_path / "wandb_id").exists()
