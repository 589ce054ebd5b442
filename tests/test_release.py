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


STUB = """#!/usr/bin/env bash
# Stands for Python: makes an environment whose uv resolves two packages, and whose pip-audit finds something in them.
mkdir -p "$3/bin"
printf '#!/usr/bin/env bash\\n' | tee "$3/bin/python" "$3/bin/uv" "$3/bin/pip-audit" >/dev/null
echo 'echo "$*" >&2; printf "jinja2==3.1.6\\ntorch==2.13.0+cpu\\n" >"${@: -1}"' >>"$3/bin/uv"
echo 'cat "$2"; echo "$*"; exit 1' >>"$3/bin/pip-audit"
chmod +x "$3"/bin/*
"""


def test_the_audit_asks_for_what_the_extra_cpu_resolves_to_and_fails_where_something_is_found(tmp_path):
    (python := tmp_path / "python").write_text(STUB)
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "TMPDIR": str(tmp_path)}
    environment.pop("MAKEFLAGS", None)  # of the make that runs the tests
    environment.pop("MAKELEVEL", None)
    done = subprocess.run(
        ["make", "audit", f"PYTHON={python}", "ARGS=--strict"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode != 0 and "pip compile setup.py --extra cpu " in done.stderr
    assert done.stdout.startswith("2 packages\njinja2==3.1.6\ntorch==2.13.0\n") and "off --strict" in done.stdout
    assert list(tmp_path.iterdir()) == [python]


def test_the_audit_runs_weekly_and_where_requirements_change():
    on = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())[True]  # YAML 1.1 reads `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", on["schedule"][0]["cron"])
    assert all("setup.py" in on[event]["paths"] for event in ("push", "pull_request"))


def test_only_the_job_that_publishes_can_get_a_token_and_it_waits_for_the_trial():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")


def test_the_image_and_the_release_install_what_the_documentation_says():
    command = re.compile(r"cpu\S* --extra-index-url https://download\.pytorch\.org/whl/cpu")
    for name in ("Dockerfile", ".github/workflows/release.yml", "docs/runs.md", "README.md"):
        assert command.search((ROOT / name).read_text()), name
