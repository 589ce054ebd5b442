"""The first lines that run inside a sandbox: they limit the process, and run a program, serve its functions or test it.

Sent as text to a bare interpreter: nothing but the standard library is there.
"""

import builtins
import collections.abc
import itertools
import json
import os
import sys

_PLAIN = (type(None), bool, int, float, str)
_NUMBERS = {"Fraction": "fractions", "Decimal": "decimal"}
"""Numbers of the standard library, by name, and their modules, which take time to import."""
_LONGEST = 10**6
_ENDS = (StopIteration, StopAsyncIteration)
"""Exceptions that a loop, `map` or `zip` takes for its end: a test whose loop they end compares nothing, and passes."""


def restrict(limits):
    """Gives up what the process may do beyond ``limits``: a user, bytes, seconds, numbers, and a seccomp filter."""
    import ctypes
    import resource

    if limits["user"]:
        os.setgroups([])
        os.setresgid(*[limits["user"]] * 3)
        os.setresuid(*[limits["user"]] * 3)
    for name, value in limits["resources"].items():
        resource.setrlimit(getattr(resource, name), tuple(value))
    if limits["filter"]:
        steps = bytes.fromhex(limits["filter"])

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]

        libc = ctypes.CDLL(None, use_errno=True)
        program = Program(len(steps) // 8, steps)
        no_new_privileges, seccomp, by_filter = 38, 22, 2
        if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, by_filter, ctypes.byref(program), 0, 0):
            os._exit(125)


def run(source, name="__main__"):
    """The names that a program defines, which is run as a script, or under another name as a module."""
    # Dataclasses look their module up.
    module = sys.modules[name] if name in sys.modules else sys.modules.setdefault(name, type(sys)(name))
    names = {"__name__": name, "__builtins__": builtins} if name == "__main__" else vars(module)
    exec(compile(source, "program.py", "exec", dont_inherit=True), names)
    return names


class Objects:
    """Values on their way to another process: plain ones as they are, others by a number, which ``give`` reads."""

    def __init__(self, give=None):
        self._give, self.known = give, []

    def written(self, value):
        """A value as JSON has it."""
        if type(value) in _PLAIN:
            return value
        walked = isinstance(value, collections.abc.Iterator) and type(value).__module__ in ("builtins", "itertools")
        if walked or isinstance(value, (range, collections.deque)):
            value = list(itertools.islice(value, _LONGEST))
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.written(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.written(key), self.written(item)] for key, item in value.items()]}
        if type(value) in (complex, bytes):
            return {type(value).__name__: repr(value)}
        if type(value).__name__ in _NUMBERS and _NUMBERS[type(value).__name__] == type(value).__module__:
            return {type(value).__name__: str(value)}
        if isinstance(value, Remote):
            return {"object": value._number}
        if self._give:
            raise TypeError("a value of type " + type(value).__name__ + " can't be handed to the program")
        self.known.append(value)
        return {"object": len(self.known) - 1}

    def read(self, value):
        """The value behind JSON that :meth:`written` wrote, or a program in its place; its type is Python's own."""
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "object":
            return self._give(content) if self._give else self.known[content]
        if kind == "dict":
            return {self.read(key): self.read(item) for key, item in content}
        if kind in _NUMBERS:
            return getattr(__import__(_NUMBERS[kind]), kind)(content)
        if kind in ("complex", "bytes"):
            import ast

            return complex(content) if kind == "complex" else ast.literal_eval(content)
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.read, content))


def serve(source, calls, results):
    """Runs a program, then its functions as requested on one handle, and writes the results to the other."""
    objects = Objects()
    objects.known.append(type("Names", (), dict(run(source, "program"))))
    with open(calls) as calls, open(results, "w") as results:
        for line in calls:
            number, name, arguments, keywords = json.loads(line)
            try:
                target = objects.read({"object": number})
                if arguments is None:
                    value = vars(target)[name] if number == 0 else getattr(target, name)
                else:
                    given = [objects.read(value) for value in arguments]
                    value = target(*given, **{key: objects.read(value) for key, value in keywords.items()})
                reply = {"value": objects.written(value)}
            except BaseException as error:
                reply = {"raised": [type(error).__name__, str(error)[:200]]}
            results.write(json.dumps(reply) + "\n")
            results.flush()


class Remote:
    """Something of the program's, in its own process: it can be called and asked for attributes, and equals nothing."""

    __slots__ = ("_ask", "_number")
    __hash__ = None  # as a class with __eq__ alone has it

    def __init__(self, ask, number):
        self._ask, self._number = ask, number

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(self._number, name, None, {})

    def __call__(self, *arguments, **keywords):
        return self._ask(self._number, "", arguments, keywords)

    def __eq__(self, other):
        raise TypeError("the program returned an object that is no plain value")

    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __eq__

    def __bool__(self):
        raise TypeError("the program returned an object that is no plain value")


class Program(dict):
    """The names of a test: its own, else Python's and the standard library's modules, else what the program defines.

    Args:
        names: names that are the program's though Python has them.
        only: the program is asked for no others.
    """

    def __init__(self, ask, names, only):
        super().__init__(__name__="test", __builtins__=builtins)
        self._ask, self._names, self._only = ask, names, only

    def __missing__(self, name):
        if name not in self._names:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in sys.stdlib_module_names:
                return __import__(name)
            if self._only:
                raise NameError(name)
        try:
            return self._ask(0, name, None, {})
        except KeyError:  # after which Python would take its own function of that name
            raise NameError(name) from None


def test(source, results, calls, verdicts):
    """Runs tests of a program that another process serves, and writes one line for each that it passes.

    What fails before the program was asked for anything would fail for any program, and is written as "broken". The
    source is the JSON of `Sandbox.test`'s arguments; the others are handles.
    """
    content = json.loads(source)
    calls, results = open(calls, "w"), open(results)  # noqa: SIM115  the process ends with them
    was_called = False

    def ask(number, name, arguments, keywords):
        nonlocal was_called
        was_called = True
        written = None if arguments is None else [objects.written(value) for value in arguments]
        line = [number, name, written, {key: objects.written(value) for key, value in keywords.items()}]
        calls.write(json.dumps(line) + "\n")
        calls.flush()
        reply = json.loads(results.readline() or '{"raised": ["RuntimeError", "the program has ended"]}')
        if "raised" in reply:
            kind = getattr(builtins, reply["raised"][0], RuntimeError)
            known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS)
            raise (kind if known else RuntimeError)(reply["raised"][1])
        return objects.read(reply["value"])

    objects = Objects(lambda number: Remote(ask, number))
    names = Program(ask, content["names"], content["only"])
    try:
        exec(compile(content["setup"], "setup", "exec", dont_inherit=True), names)
    except Exception:
        if not was_called:
            os.write(verdicts, b"broken\n")
        raise
    if content["entry_point"]:
        in_setup, was_called = was_called, True
        names["candidate"] = ask(0, content["entry_point"], None, {})
        was_called = in_setup
    for index, code in enumerate(content["tests"]):
        try:
            exec(compile(code, "test", "exec", dont_inherit=True), names)
        except Exception as error:
            print(index, type(error).__name__, str(error)[:200], file=sys.stderr)
            if not was_called:
                os.write(verdicts, b"broken\n")
            continue
        os.write(verdicts, b"%d\n" % index)


if __name__ == "__main__":
    what, source_handle, handles, settings = json.loads(sys.argv.pop())
    with open(source_handle, encoding="utf-8", errors="surrogateescape") as source:
        text = source.read()
    restrict(settings)
    if what == "run":
        run(text)
    elif what == "serve":
        serve(text, *handles)
    else:
        test(text, *handles)
