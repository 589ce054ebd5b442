"""The installed files: every source and data file once, and a wheel that trains."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tiny_runs import tiny_run

from grpo_rl.monitor.metrics import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the project's tracked kinds of files, with its three links; by the hook that pip calls."""
    copy, out = tmp_path_factory.mktemp("checkout") / "grpo_rl", tmp_path_factory.mktemp("wheel")
    copy.mkdir()
    for name in ("grpo_rl", "envs", "config", "sota", "benchmarks", "docs", "tests", "tools"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def expected() -> Counter[str]:
    """Every file of the four folders, of sota/ the Python files, at the place where it is imported from."""
    files = Counter()
    for folder in ("grpo_rl", "envs", "config", "sota"):
        mounted = folder if folder == "grpo_rl" else f"grpo_rl/{folder}"
        for path in (ROOT / folder).rglob("*.py" if folder == "sota" else "*"):  # which follows no links
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"{mounted}/{path.relative_to(ROOT / folder).as_posix()}"] += 1
    return files


def test_the_wheel_holds_every_file_of_the_four_folders_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert Counter(name for name in archive.namelist() if ".dist-info/" not in name) == expected()


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment's folder of programs: grpo_rl from the wheel, what it requires from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, but its own .pth files, such as an editable install's, are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.mark.nightly
def test_an_installed_wheel_trains_from_any_folder(environment, tmp_path):
    one_step = [*tiny_run(tmp_path), "train.total_dialog_turns=16", "train.checkpoint_frequency=0"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("defaults: [grpo_gsm8k, _self_]\nsampling: {temperature: 0.9}\n")
    command = [environment / "grpo-rl", "train", "--config-dir", "configs", "--config-name", "mine", *one_step]
    names = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the checkout is on no path
    done = subprocess.run(command, cwd=tmp_path, env=names, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.glob("outputs/*/*")
    assert [row["step"] for row in read_metrics(run) if "loss/total" in row] == [1]
    assert yaml.safe_load((run / "config.yaml").read_text())["sampling"]["temperature"] == 0.9
    assert (run / "report.html").exists() and (run / "model").is_dir()
