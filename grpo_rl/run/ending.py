"""How a run ends: its exported model, summary, report, and last words in the terminal."""

from __future__ import annotations

from pathlib import Path

from grpo_rl.monitor.progress import summary_panel
from grpo_rl.monitor.report import versions
from grpo_rl.run.claim import MODEL
from grpo_rl.run.export import export
from grpo_rl.run.logs import RunLogs
from grpo_rl.run.parts import Parts
from grpo_rl.run.summary import write_report_or_say, write_summary


def end_run(logs: RunLogs, parts: Parts, summary: dict[str, object], checkpoint: Path, adapters: str) -> None:
    """Exports the model, writes summary and report, and has the logs show where they are once they close.

    Args:
        summary: what the run adds to versions and paths.
        adapters: what becomes of a model's adapters: ``merged`` or ``adapter``.
    """
    model = logs.folder / MODEL
    export(parts.policy.model, parts.tokenizer, model, adapters, parts.policy.peers)
    report = write_end(logs, summary, checkpoint)
    logs.last_words = summary_panel(summary, checkpoint=checkpoint, model=model, report=report)


def write_end(logs: RunLogs, summary: dict[str, object], checkpoint: Path) -> Path | None:
    """Writes the summary, completed in place, and the report; returns the report's path, None where it failed."""
    summary |= {"versions": versions(), "checkpoint": str(checkpoint)}
    write_summary(logs.folder, summary)
    return write_report_or_say(logs.folder, logs.note)
