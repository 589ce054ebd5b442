"""The README's script runs as it is printed there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from grpo_rl.testing import save_tiny_model

README = Path(__file__).parent.parent / "README.md"


def test_the_custom_script_of_the_readme_runs(tmp_path, capsys):
    (block,) = re.findall(r"<!-- script -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 40
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(4)))
    names: dict = {}
    exec(compile(block, str(README), "exec"), names)  # our own README, not data
    names["train"](save_tiny_model(tmp_path / "model"), str(data))
    assert capsys.readouterr().out.count("reward") == 2
