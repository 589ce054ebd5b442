"""Deliveries beside the wheel: the image and the workflows, as their linters and the wheel's build see them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def program(name: str) -> str:
    """The path of a linter that the extra `dev` installs."""
    searched = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=searched)
    if found is None and sys.platform != "linux":
        pytest.skip(f"the extra `dev` has {name} for Linux alone")
    assert found, f"{name} is not installed; the extra `dev` has it"
    return found


def lint(*command: str | Path) -> None:
    done = subprocess.run([program(str(command[0])), *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_dockerfile_passes_hadolint():
    lint("hadolint", "Dockerfile")


@pytest.mark.slow
def test_the_workflows_pass_zizmor_and_their_schema():
    assert len(WORKFLOWS) == 3
    lint("zizmor", "--offline", "--no-progress", *WORKFLOWS)
    lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)


@pytest.mark.nightly
def test_what_docker_is_given_builds_the_same_wheel(tmp_path):
    def wheel(source: Path) -> set[str]:
        out = tmp_path / f"wheel_of_{source.name}"
        out.mkdir()
        code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
        (built,) = out.iterdir()
        with zipfile.ZipFile(built) as archive:
            return set(archive.namelist())

    checkout, given = tmp_path / "checkout", tmp_path / "given"
    given.mkdir()
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "outputs"))
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    for name in (line[1:] for line in lines if line.startswith("!")):
        source, copy = checkout / name, given / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy(source, copy)
    assert wheel(given) == wheel(checkout)


def test_only_the_job_that_publishes_can_get_a_token_and_it_waits_for_the_trial():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")


def test_the_image_and_the_release_install_what_the_documentation_says():
    command = re.compile(r"cpu\S* --extra-index-url https://download\.pytorch\.org/whl/cpu")
    for name in ("Dockerfile", ".github/workflows/release.yml", "docs/runs.md", "README.md"):
        assert command.search((ROOT / name).read_text()), name
