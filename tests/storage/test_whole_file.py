"""Files and folders that readers see whole: what a kill leaves is removed by the next process."""

from __future__ import annotations

from grpo_rl.storage.whole_file import put_back, remove_left


def test_what_a_killed_write_left_is_removed_and_what_others_wrote_stays(tmp_path):
    for name in ("metrics.jsonl", ".metrics.jsonl.tmp", ".theirs.tmp"):
        (tmp_path / name).write_text(name)
    remove_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".theirs.tmp", "metrics.jsonl"]


def test_the_folder_of_before_is_put_back_and_half_of_another_is_removed(tmp_path):
    for name in ("model.old", "model.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "of").write_text(name)
    put_back(tmp_path / "model")
    assert [(path.parent.name, path.read_text()) for path in tmp_path.rglob("of")] == [("model", "model.old")]
    (tmp_path / "model.old").mkdir()  # killed before it was removed
    put_back(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
