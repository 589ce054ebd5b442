"""What docs/batches.md and docs/lineage.md show is what the commands print."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from grpo_rl.cli import main

DOCS = Path(__file__).parent.parent / "docs"


def texts(path):
    return [text.strip() for text in ET.parse(path).getroot().itertext() if text.strip()]


def test_commands_of_the_page_on_batches_print_what_it_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    blocks = re.findall(r"```\n\$ grpo-rl ([^\n]*)\n(.*?)```", (DOCS / "batches.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for command, shown in blocks:
        main(command.split())
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        lines = shown.rstrip().splitlines()  # the page leaves out the end
        assert printed[: len(lines)] == lines


def test_the_picture_is_what_its_command_draws(tmp_path, monkeypatch):
    (command,) = re.findall(r"`grpo-rl (batches .*--svg docs/batches\.svg)`", (DOCS / "batches.md").read_text())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert main(command.split()) == 0
    assert texts(tmp_path / "docs" / "batches.svg") == texts(DOCS / "batches.svg")


def test_every_column_of_the_lineage_is_explained():
    from grpo_rl.monitor.lineage import MASK_REASONS, SCHEMA

    named = set(re.findall(r"`([a-z_]+)`", (DOCS / "lineage.md").read_text()))
    assert {*SCHEMA.names, *MASK_REASONS} <= named
