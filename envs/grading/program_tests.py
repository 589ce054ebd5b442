"""Tests of programs as published data sets have them, the program in a response, and the comparison of outputs."""

import ast
import builtins
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_FENCE = re.compile("```+[^`]*")
_NAMED = re.compile(r"`+[\w+#-]+")  # which opens a block, and closes none
_DECIMAL = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?|[+-]?\d+\.?([eE][+-]?\d+)")
_TOLERANCE = 1e-6
_CALLED = """
inf, nan = float("inf"), float("nan")

def _result(*arguments):
    try:
        function = {name}
    except NameError:
        function = Solution().{name}
    return function(*arguments)

def _lists(value):
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value

def _is(result, wanted):
    result = _lists(result)
    return result == wanted or [result] == wanted
"""


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row.

    Args:
        pairs: inputs of a script, each with the output that it should have.
        code: tests of a script's functions, in Python.
        setup: code before these.
        entry_point: name of the function that they call ``candidate``.
        names: names that are the program's in them, though Python has them.
        only: no other names are.
        call: a call of the program's function, without what it should return, for the prompt; None: none is known.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    code: tuple[str, ...] = ()
    setup: str = ""
    entry_point: str | None = None
    names: tuple[str, ...] = ()
    call: str | None = None
    only: bool = False

    def __len__(self) -> int:
        return len(self.pairs) + len(self.code)


def read_tests(row: Mapping[str, Any], most: int | None = None) -> ProgramTests:
    """The tests of a row, in the first of the columns that it has.

    ``tests``: a list of ``{input, output}`` or of Python code, or JSON of it. ``input_output``, as APPS and TACO have
    it: ``inputs``, ``outputs``, and ``fn_name`` where a function is called. ``test_list``, with ``test_setup_code`` and
    ``test_imports``, as MBPP has it. ``test`` and ``entry_point``, as HumanEval has it.

    Args:
        most: the number of tests that are taken, at equal distances; None takes all.

    Raises:
        ValueError: there are no tests, or they have another form.

    >>> read_tests({"input_output": '{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}'}).pairs
    (('1 2', '3'), ('3 4', '7'))
    """
    for column in ("tests", "input_output", "test_list", "test"):
        if row.get(column):
            found = _of_column(row, column)
            break
    else:
        raise ValueError("it has no tests; give them in a column tests, input_output, test_list or test")
    if not len(found):
        raise ValueError(f"{column} holds no test")
    if most is None or len(found) <= most:
        return found
    step = len(found) / most
    kept = [int(index * step) for index in range(most)]
    pairs = tuple(found.pairs[index] for index in kept) if found.pairs else ()
    code = tuple(found.code[index] for index in kept) if found.code else ()
    return replace(found, pairs=pairs, code=code)


def _of_column(row: Mapping[str, Any], column: str) -> ProgramTests:
    value = row[column]
    if isinstance(value, str) and column != "test":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value] if column == "tests" else value
    if isinstance(value, Mapping):
        return _of_lists(value, column)
    if column == "test" and isinstance(value, str):
        value = [f"{value}\n\ncheck(candidate)" if re.search(r"^def check\(", value, re.MULTILINE) else value]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{column} is {value!r:.80}; it must be a list of tests, or inputs and outputs")
    if all(isinstance(test, str) for test in value):
        imports = row.get("test_imports") or []
        setup = "\n".join([*(imports if isinstance(imports, list) else [imports]), row.get("test_setup_code") or ""])
        for code in (setup, *value):
            _refuse_syntax(code, column)
        entry_point, solution = row.get("entry_point"), row.get("solution")
        solved = _tree(solution if isinstance(solution, str) else "")
        given = row.get("prompt") if entry_point and isinstance(row.get("prompt"), str) else ""
        setup = "\n".join([_surroundings(solved, given, entry_point), setup])
        names = tuple(dict.fromkeys([*([entry_point] if entry_point else ()), *_defined(solved, imported=False)]))
        only = bool(names)
        if not only:  # a module is not called: the program has a function of this name
            names = tuple(name for test in value for name in _called(_tree(test)) if name in sys.stdlib_module_names)
        call = None if entry_point else _call(value[0], names if only else None, setup)
        return ProgramTests((), tuple(value), setup, entry_point, names, call, only)
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in value):
        return ProgramTests(tuple((_text(test["input"]), _text(test["output"])) for test in value))
    raise ValueError(f"{column} holds {value[0]!r:.80}; a test is Python code, or has an input and an output")


def _of_lists(value: Mapping[str, Any], column: str) -> ProgramTests:
    inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"{column} is {str(value)!r:.80}; it must have as many inputs as outputs")
    if not name:
        return ProgramTests(tuple((_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True)))
    if not isinstance(name, str) or not name.isidentifier() or not all(isinstance(given, list) for given in inputs):
        raise ValueError(f"{column} calls {name!r:.80}; a function has a name, and each input is a list of arguments")
    calls = [f"assert _is(_result(*{given!r}), {wanted!r})" for given, wanted in zip(inputs, outputs, strict=True)]
    call = f"{name}({', '.join(map(repr, inputs[0]))})" if inputs else None
    return ProgramTests((), tuple(calls), _CALLED.format(name=name), names=(name, "Solution"), call=call, only=True)


def _text(value: Any) -> str:
    """An input or output as text; some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _defined(tree: ast.Module, imported: bool = True) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        elif imported and isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return names


def _surroundings(solution: ast.Module, given: str, entry_point: str | None) -> str:
    """The code that tests may use and that is not theirs: a solution's imports, and the functions that a prompt gives.

    The program is not asked for these, or it could say that its results are right.
    """
    modules = [
        node
        for node in solution.body
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in sys.stdlib_module_names)
        or (isinstance(node, ast.Import) and all(a.name.split(".")[0] in sys.stdlib_module_names for a in node.names))
    ]
    helpers = [node for node in _tree(given).body if getattr(node, "name", None) != entry_point]
    return "\n".join(ast.unparse(node) for node in [*modules, *helpers])


def _called(tree: ast.AST) -> list[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]


def _call(test: str, names: Sequence[str] | None, setup: str = "") -> str | None:
    """The call of the program's function in a test that compares what it returns; None: the test has another form.

    A call around another is none: it may compare what the inner one returns with what it should. Without ``names`` of
    the program all that are neither Python's nor the setup's may be.

    >>> _call("assert set(shared((3, 4), (4, 5))) == {4}", None)
    'shared((3, 4), (4, 5))'
    """
    statements = _tree(test).body
    if len(statements) != 1 or not isinstance(statements[0], ast.Assert):
        return None
    asked = statements[0].test
    if isinstance(asked, ast.Compare):  # what is on its right is what should be returned
        asked = asked.left
    others = _defined(_tree(setup))
    for node in ast.walk(asked):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        name = node.func.id
        if name not in names if names is not None else hasattr(builtins, name) or name in others:
            continue
        inner = [name for name in _called(node)[1:] if not hasattr(builtins, name)]
        return None if inner else ast.unparse(node)
    return None


def _refuse_syntax(code: str, column: str) -> None:
    try:
        compile(code, column, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{column} holds {code!r:.80}, which is no Python code: {error}") from error


def _tree(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def program_of(response: str) -> str | None:
    """The content of the last fenced block that is closed, without the fence's indent; None if it is empty, or none is.

    >>> program_of("First:\\n```python\\nprint(1)\\n```\\nBetter:\\n```python\\nprint(2)\\n```")
    'print(2)'
    """
    found, block, indent = None, None, ""
    for line in response.split("\n"):
        text = line.strip()
        if not _FENCE.fullmatch(text):
            if block is not None:
                block.append(line.removeprefix(indent))
        elif block is None or _NAMED.fullmatch(text):  # a block that is never closed is dropped
            block, indent = [], line[: -len(line.lstrip())]
        else:
            found, block = "\n".join(block), None
    return found if found and found.strip() else None


def equal_outputs(output: str, wanted: str) -> bool:
    r"""True if two outputs have the same words, however they are spaced.

    Where a decimal is wanted, it may differ by 1e-6 of itself.

    >>> equal_outputs("1 2\n", "1\n2"), equal_outputs("0.33333333", "0.3333333"), equal_outputs("3", "4")
    (True, True, False)
    """
    words, wanted_words = output.split(), wanted.split()
    return len(words) == len(wanted_words) and all(map(_equal_words, words, wanted_words))


def _equal_words(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not _DECIMAL.fullmatch(wanted) or len(word) > 50:
        return False
    try:
        abs_tol = 0.0 if float(wanted) else _TOLERANCE
        return math.isclose(float(word), float(wanted), rel_tol=_TOLERANCE, abs_tol=abs_tol)
    except ValueError:
        return False
