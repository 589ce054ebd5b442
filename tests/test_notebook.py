"""The notebook of the quickstart: all its cells run, with a tiny model; it is committed without outputs."""

import os
import shlex
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "quickstart.ipynb"


def cells(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def text_of(cell):
    return "".join(output.get("text", "") or output.get("data", {}).get("text/html", "") for output in cell.outputs)


@pytest.mark.nightly
def test_the_notebook_trains_and_shows_the_run(tiny_model, tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (install,), (parameters,) = cells(notebook, "install"), cells(notebook, "parameters")
    assert "grpo-rl[cpu]" in install.source
    notebook.cells.remove(install)
    settings = [
        f"model.name={tiny_model}", "inference_model.engine=transformers", "train_model.compile=false",
        "env.num_envs=2", "train.optim_batch_size=16", "train.total_dialog_turns=32", "evaluate.rows=2",
        "sampling.max_new_tokens=4",
    ]  # fmt: skip
    parameters.source += f"\nsettings = {shlex.join(settings)!r}"
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    after = {cell.id: text_of(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert (tmp_path / "runs" / "quickstart" / "report.html").exists()
    assert "held-out problems, greedy: 0.00 before, 0.00 after" in after["metrics"]  # a random model
    steps = [line[:8] for line in after["responses"].splitlines() if line.startswith("step ")]
    assert steps == ["step 1, "] * 2 + ["step 2, "] * 2
    assert "runs/quickstart/report.html" in after["report"]
    assert after["sample"]
