"""Files and folders that readers see whole: what a kill leaves is removed by the next process."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

from grpo_rl.run.summary import best_kept
from grpo_rl.storage.whole_file import remove_left, whole_folder


def test_what_a_killed_write_left_is_removed_and_what_others_wrote_stays(tmp_path):
    for name in ("metrics.jsonl", ".metrics.jsonl.tmp", ".theirs.tmp"):
        (tmp_path / name).write_text(name)
    remove_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".theirs.tmp", "metrics.jsonl"]


def test_a_kill_while_the_best_model_is_replaced_leaves_one_with_its_step(tmp_path, monkeypatch):
    def write(step):
        with whole_folder(tmp_path / "best_model") as partial:
            partial.mkdir()
            (partial / "best.json").write_text(json.dumps({"step": step}))

    write(1)
    for number in (1, 2):  # the old one is renamed, the new one is
        renamed = itertools.count(1)

        def rename(path, target, stop=number, renamed=renamed, real=Path.rename):
            if next(renamed) == stop:
                raise KeyboardInterrupt
            return real(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            with pytest.raises(KeyboardInterrupt):
                write(2)
        assert best_kept(tmp_path) == 1 and [path.name for path in tmp_path.iterdir()] == ["best_model"]
    write(3)
    shutil.copytree(tmp_path / "best_model", tmp_path / "best_model.old")  # killed before it was removed
    assert best_kept(tmp_path) == 3 and [path.name for path in tmp_path.iterdir()] == ["best_model"]
