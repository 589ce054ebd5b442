import inspect
import sys

from grpo_rl.by_name import object_by_name


def test_a_module_of_the_current_folder_is_found_and_stays_findable(current_folder):
    (current_folder / "own_parts.py").write_text("def longer(): return 7\n")
    (current_folder / "own_package").mkdir()
    (current_folder / "own_package" / "inner.py").write_text("class Outer:\n    class Task: pass\n")
    assert object_by_name("own_parts:longer", "env.reward")() == 7
    assert inspect.isclass(object_by_name("own_package.inner:Outer.Task", "env.dataset"))
    assert sys.path[-1] == str(current_folder) and sys.path.count(str(current_folder)) == 1


def test_a_file_of_the_current_folder_replaces_no_library(current_folder):
    (current_folder / "json.py").write_text("dumps = None\n")
    assert object_by_name("json:dumps", "env.reward")([1]) == "[1]"
