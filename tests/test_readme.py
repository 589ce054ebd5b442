"""The README is short, and the script that it points to runs as it is printed there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo_rl.testing import save_tiny_model

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "custom_script.md"


def test_the_readme_is_short_and_its_table_names_every_loss():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert {path.stem for path in (ROOT / "config" / "loss").glob("*.yaml")} <= set(re.findall(r"`([a-z_]+)`", text))


@pytest.mark.slow
def test_the_custom_script_runs(tmp_path, capsys):
    (block,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", SCRIPT.read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 40
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(4)))
    names: dict = {}
    exec(compile(block, str(SCRIPT), "exec"), names)  # our own page, not data
    names["train"](save_tiny_model(tmp_path / "model"), str(data))
    assert capsys.readouterr().out.count("reward") == 2
