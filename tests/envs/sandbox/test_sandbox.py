"""The sandbox: programs run under their limits, and nothing starts where they could not be kept in."""

import platform
import time

import pytest

from grpo_rl.envs.sandbox import jails as jails_module
from grpo_rl.envs.sandbox import sandbox as sandbox_module
from grpo_rl.envs.sandbox.jails import Jail, jails, no_jail
from grpo_rl.envs.sandbox.sandbox import DENIED, UNPROTECTED, Limits, Sandbox, filter_of

SETUP = "import math\nfrom decimal import Decimal\nfrom fractions import Fraction"
needs_sandbox = pytest.mark.skipif(not jails(), reason="needs bubblewrap: apt-get install bubblewrap")
in_each = pytest.mark.parametrize("kind", [UNPROTECTED, pytest.param("bubblewrap", marks=needs_sandbox)])


@pytest.fixture
def fresh(monkeypatch):
    """Forgets which jails were found to hold on this machine."""
    monkeypatch.setattr(sandbox_module, "_checked_jail", sandbox_module._checked_jail.__wrapped__)


def test_a_run_without_a_sandbox_is_refused_with_the_remedy(fresh, monkeypatch):
    monkeypatch.setattr(jails_module.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"bwrap not found.*apt-get install bubblewrap.*i_accept_no_sandbox"):
        Sandbox("bubblewrap")


def test_a_sandbox_that_keeps_nothing_out_is_refused_by_what_its_probe_could_do(fresh, monkeypatch):
    # `env` starts the interpreter and protects nothing: only limits and the seccomp filter are left.
    open_jail = Jail(("/usr/bin/env",), no_jail().python)
    monkeypatch.setattr(Jail, "command", lambda self: [*self.words, self.python])
    monkeypatch.setattr(sandbox_module, "jails", lambda: [open_jail])
    with pytest.raises(ValueError, match=r"a program could see /tmp/.*see .*sandbox.py, see /etc/passwd"):
        Sandbox("bubblewrap")


def test_limits_hold_without_a_sandbox_too():
    sandbox = Sandbox(UNPROTECTED, Limits(memory_mib=256, cpu_s=1, output_kib=4))
    assert sandbox.run("print(input()[::-1])", "abc").stdout == "cba\n"
    assert "MemoryError" in sandbox.run("bytearray(2**30)").stderr
    assert "File too large" in sandbox.run("import os; os.write(1, b'x' * 4096); os.write(1, b'x')").stderr
    for program in ("import os; os.fork()", "import socket; socket.socket()", "import os; os.kill(os.getppid(), 0)"):
        assert "PermissionError" in sandbox.run(program).stderr
    assert (
        sandbox.run("import threading as t; a = t.Thread(target=print, args=[1]); a.start(); a.join()").stdout == "1\n"
    )


@pytest.mark.slow
@in_each
def test_a_program_that_computes_or_sleeps_too_long_is_stopped_and_said_to_be(kind):
    start = time.monotonic()
    sandbox = Sandbox(kind, Limits(cpu_s=1, wall_s=0.0))
    assert sandbox.run("while True: pass").timed_out
    assert sandbox.run("import time; time.sleep(1000)", within_s=1).timed_out
    assert not sandbox.run("1 / 0").timed_out
    assert time.monotonic() - start < 60


@in_each
@pytest.mark.nightly
def test_a_program_that_ignores_the_signal_at_its_cpu_limit_is_said_to_have_run_out_of_time(kind):
    outcome = Sandbox(kind, Limits(cpu_s=1, wall_s=200)).run(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert outcome.timed_out and outcome.exit_code in (-9, 128 + 9)


@in_each
def test_functions_and_classes_are_tested_from_another_process_by_their_values_alone(kind):
    program = (
        "class Counter:\n    def __init__(self, start): self.n = start\n    def up(self): self.n += 1; return self.n\n"
        "def pair(a, *, b): return {(a, b): [1.5, None, {2}, b'x', 1j]}\n"
        "def bad(x): raise KeyError(x)\n"
        "def sum(a, b): return a * b\n"
        "class Same(int):\n    def __eq__(self, other): return True\n"
        "def same(): return Same(3)\n"
        "def thing(): return Counter(1)\n"
        "def up_to(n): yield from range(n)\n"
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "def half(x): return {x / 2: [Decimal('1.50'), 1j]}\n"
        "class Alike(Fraction):\n    def __eq__(self, other): return True\n"
        "def alike(): return Alike(1, 2)\n"
        "def posing(): return type('Fraction', (Alike,), {'__module__': 'fractions'})(1, 2)\n"
        "class Nowhere(Counter):\n    __module__ = None\n"
        "def nowhere(): return Nowhere(7)\n"
    )
    tests = {
        "c = Counter(3)\nassert c.up() == 4 and c.up() == 5 and c.n == 5": True,
        "assert pair(1, b='y') == {(1, 'y'): [1.5, None, {2}, b'x', 1j]}": True,
        "try:\n    bad(1)\nexcept KeyError:\n    pass\nelse:\n    assert False": True,
        "assert sum(3, 4) == 12": True,  # a name of Python's that is the program's here
        "assert max([1, 2]) == 2": True,
        "assert up_to(2) == [0, 1] and list(up_to(3)) == [0, 1, 2]": True,
        "assert same() == 4": False,  # in the program's own process it would equal
        "assert half(Fraction(1)) == {Fraction(1, 2): [Decimal('1.5'), 1j]}": True,
        "assert half(Fraction(1)) == {Fraction(1, 2): [Decimal('1.51'), 1j]}": False,
        "assert alike() == 4": False,
        "assert posing() == 4": False,
        "assert type(posing()) is Fraction and posing() == 0.5": True,  # it is what it says, and no more
        "assert thing() == 1": False,
        "assert nowhere().up() == 8": True,  # a reference, whatever its class says that it is of
        "assert thing()": False,
        "assert missing(1)": False,
        "assert len(twice([1, 2])) == 2": False,
        "assert math.isclose(pair(1, b=2)[1, 2][0], 1.5)": True,
    }
    passed, outcome = Sandbox(kind).test(program, list(tests), SETUP, names=["sum"])
    assert dict(zip(tests, passed, strict=True)) == tests, outcome.stderr


@in_each
def test_an_exception_that_ends_a_loop_arrives_as_another(kind):
    program = (
        "def stop(*a): raise StopIteration\nclass Own(StopIteration): pass\ndef own(*a): raise Own\n"
        "def leave(*a): raise GeneratorExit\ndef stop_async(*a): raise StopAsyncIteration\n"
    )
    swallowed = [  # each compares no value once the first call says that there are no more
        "assert all(map({0}, [1, 2]))",
        "for got, wanted in zip(map({0}, [1, 2]), [1, 4]):\n    assert got == wanted",
        "assert not any(x != y for x, y in zip(map({0}, [1]), [1]))",
        "assert sum(1 for got in map({0}, [1, 2]) if got != 3) == 0",
        "assert next(map({0}, [1]), None) is None",
    ]
    names = ("stop", "own", "leave", "stop_async")
    tests = [test.format(name) for name in names for test in swallowed]
    tests += [f"try:\n    {name}(1)\nexcept RuntimeError:\n    pass" for name in names]
    passed, outcome = Sandbox(kind).test(program, tests)
    assert passed == [False] * 20 + [True] * 4, outcome.stderr


def test_the_filter_knows_the_calls_of_both_machines_by_their_numbers():
    assert len(filter_of("aarch64")) < len(filter_of("x86_64"))  # it has neither fork nor vfork
    for _machine, column in (("x86_64", 0), ("aarch64", 1)):
        numbers = [pair[column] for pair in DENIED.values() if pair[column] is not None]
        assert len(numbers) == len(set(numbers))
    with pytest.raises(ValueError, match="no seccomp filter for riscv64, only for x86_64 and aarch64"):
        filter_of("riscv64")
    assert platform.machine() not in ("x86_64", "aarch64") or filter_of()
