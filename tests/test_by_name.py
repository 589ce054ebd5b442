from __future__ import annotations

import inspect
import re
import sys

import pytest

from grpo_rl.by_name import object_by_name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which is not on the path yet; modules written there are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_module_of_the_current_folder_is_found_and_stays_findable(folder):
    (folder / "own_parts.py").write_text("def longer(): return 7\n")
    (folder / "own_package").mkdir()
    (folder / "own_package" / "inner.py").write_text("class Outer:\n    class Task: pass\n")
    assert object_by_name("own_parts:longer", "env.reward")() == 7
    assert inspect.isclass(object_by_name("own_package.inner:Outer.Task", "env.dataset"))
    assert sys.path[-1] == str(folder) and sys.path.count(str(folder)) == 1


def test_a_file_of_the_current_folder_replaces_no_library(folder):
    (folder / "json.py").write_text("dumps = None\n")
    assert object_by_name("json:dumps", "env.reward")([1]) == "[1]"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward_len", "is no package.module:name"),
        ("own_parts:lenght", "own_parts ({folder}/own_parts.py) has no lenght; did you mean length?"),
        ("needs_more:reward", "importing needs_more failed: ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "broken_module:reward",
            "importing broken_module failed: ZeroDivisionError: division by zero ({folder}/broken_module.py, line 2)",
        ),
    ],
)
def test_what_cannot_be_had_is_named_with_the_reason(folder, name, message):
    (folder / "own_parts.py").write_text(
        "from json import dumps\nWEIGHT = 2\ndef length(): ...\ndef broken(): ...\ndef _own(): ...\n"
    )
    (folder / "needs_more.py").write_text("import no_such_module\n")
    (folder / "broken_module.py").write_text("\n1 / 0\n")
    with pytest.raises(ValueError, match=re.escape(message.format(folder=folder))) as error:
        object_by_name(name, "env.reward")
    assert str(error.value).startswith(f"env.reward={name}") and "\n" not in str(error.value)
