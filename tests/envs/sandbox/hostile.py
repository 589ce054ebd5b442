"""Programs that try to get out of a sandbox, to stay in it for ever, or to pass without solving anything."""

# ruff: noqa: E501  a program stays in its line

import base64
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from random import Random

_SYSCALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
"""
_EACH = """
import os
def each(*actions):
    for action in actions:
        try:
            print(action())
        except BaseException as error:
            print(type(error).__name__)
"""
TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        if {n} % 2: break",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=({n},), daemon=True).start()",
        "import multiprocessing\nfor _ in range({n}): multiprocessing.Process(target=print).start()",
        "import subprocess\nfor _ in range({n}): subprocess.Popen(['/python/bin/python3', '-c', 'while 1: pass'])",
        _SYSCALL + "while True:\n    if call(56, {flags}, 0, 0, 0, 0) < 0: break\n    call(57)\n    call(58)",
        _SYSCALL + "args = (ctypes.c_long * 11)({flags})\nfor _ in range({n}): call(435, ctypes.byref(args), 88)",
    ),
    "memory": (
        "x = bytearray({gib} * 2**30)\nprint(len(x))",
        "x = []\nwhile True: x.append(' ' * ({n} * 2**20))",
        "import mmap\nm = [mmap.mmap(-1, {n} * 2**20) for _ in range(10000)]",
        "x = [0]\nwhile True: x += x",
        "import os\nfds = []\nwhile True:\n    fds.append(os.memfd_create('x'))\n    os.ftruncate(fds[-1], 2**33)",
        _SYSCALL + "for k in range({n}): print(call(29, k, 2**30, 0o1666))",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return [0] * {n} + f(n + 1)\nf(0)",
        "x = 9 ** 9 ** 9 ** {n}",
    ),
    "delete": (
        _EACH + "import shutil\neach(lambda: shutil.rmtree({canary!r}), lambda: shutil.rmtree('/'), lambda: os.listdir('/'))",
        _EACH + "each(*[lambda p=p: os.remove(p) for p in ({file!r}, {grader!r}, '/python/lib', '/etc/passwd')])",
        _EACH + "each(lambda: open({file!r}, 'w').write('x'), lambda: os.truncate({file!r}, {n}))",
        _EACH + "each(lambda: os.system('rm -rf {canary} ~ /'), lambda: os.rename({canary!r}, '/tmp/x'))",
        _EACH + "each(lambda: os.chmod({file!r}, 0), lambda: os.chown({file!r}, 1, 1), lambda: os.utime({file!r}, (1, 1)))",
    ),
    "network": (
        _EACH + "import socket\neach(lambda: socket.create_connection(('127.0.0.1', {port})).send(b'x'))",
        _EACH + "import urllib.request\neach(lambda: urllib.request.urlopen('http://127.0.0.1:{port}/').read())",
        _EACH + "import socket\neach(lambda: socket.socket(socket.AF_UNIX).connect({canary!r} + '/socket'))",
        _EACH + "import socket\neach(lambda: socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port})))",
        _SYSCALL + "fd = call(41, 2, 1, 0)\nprint(fd, call(42, fd, b'\\x02\\x00' + ({port}).to_bytes(2, 'big') + b'\\x7f\\0\\0\\1', 16))",
        _SYSCALL + "p = (ctypes.c_char * 240)()\nfd = call(425, 8, p)\nprint(fd, call(426, fd, 1, 1, 1, 0, 0))",
        _SYSCALL + "print(call(41, 16, 3, 0), call(41, 17, 3, 0), call(41, 40, 1, 0))",
        "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
    ),
    "links": (
        _EACH + "each(*[lambda d=d: (os.symlink({file!r}, d + '/l'), open(d + '/l').read()) for d in ('/', '/tmp', '/dev', '/python')])",
        _EACH + "each(lambda: os.link({file!r}, '/l'), lambda: open('/proc/self/root' + {file!r}).read())",
        _EACH + "each(lambda: open('/proc/{n}/root' + {file!r}).read(), lambda: open('../' * {n} + {file!r}).read())",
        _EACH + "each(*[lambda n=n: open(f'/proc/self/fd/{{n}}').read() for n in range(64)])",
        _EACH + "each(lambda: os.mkfifo('/p'), lambda: os.mknod('/dev/sda', 0o60666, os.makedev(8, {n} % 16)))",
    ),
    "other processes": (
        _SYSCALL + "for p in range(1, {n} * 10): print(call(101, 16, p, 0, 0))",
        _SYSCALL + "b = ctypes.create_string_buffer(64)\nv = (ctypes.c_void_p * 2)(ctypes.addressof(b), 64)\nprint([call(310, p, v, 1, v, 1, 0) for p in range(1, 99)])",
        _EACH + "each(*[lambda p=p: open(f'/proc/{{p}}/mem', 'rb+') for p in range(1, {n})], lambda: os.listdir('/proc'))",
        _SYSCALL + "print([call(434, p, 0) for p in range(1, {n})], [call(438, p, 0, 0) for p in range(9)])",
        _EACH + "each(*[lambda p=p: open(f'/proc/{{p}}/environ').read() for p in (1, 2, os.getppid())])",
    ),
    "read the grader": (
        _EACH + "each(lambda: open({grader!r}).read(), lambda: open({file!r}).read(), lambda: os.listdir({canary!r}))",
        "import glob\nprint(glob.glob('/**/*.py', recursive=True)[-{n}:], glob.glob('/**/*token*', recursive=True))",
        "import sys, gc\nprint([o for o in gc.get_objects() if type(o) is dict and 'wanted' in o], sys.orig_argv, sys.argv)",
        "import sys\nf = sys._getframe()\nwhile f:\n    print(f.f_locals, f.f_globals)\n    f = f.f_back",
        "import grpo_rl.envs.code\nprint(grpo_rl)",
        "import __main__\nprint(vars(__main__))\nprint(__main__.text)",
        "import os\nprint(dict(os.environ), os.getcwd(), os.listdir('/'), os.uname())",
        _EACH + "each(*[lambda n=n: os.pread(n, 10**6, 0) for n in range(64)])",
    ),
    "signals": (
        _EACH + "each(lambda: os.kill(-1, {signal}), lambda: os.killpg(0, {signal}), lambda: os.kill(os.getppid(), {signal}))",
        _EACH + "each(*[lambda p=p: os.kill(p, {signal}) for p in (1, 2, 3, {victim})])",
        _SYSCALL + "print([call(n, {victim}, {signal}) for n in (62, 200)], call(234, {victim}, {victim}, {signal}))",
        _SYSCALL + "print(call(424, call(434, {victim}, 0), {signal}, 0, 0), call(129, {victim}, {signal}, 0))",
        _EACH + "import fcntl\neach(*[lambda n=n: (fcntl.fcntl(n, 8, {victim}), fcntl.fcntl(n, 4, 0o20000)) for n in range(9)])",
        _EACH + "import fcntl, termios\neach(*[lambda n=n: fcntl.ioctl(n, termios.TIOCSTI, b'x') for n in range(9)])",
    ),
    "disk": (
        _EACH + "each(*[lambda d=d: open(d + '/f', 'wb').write(b'x' * 2**30) for d in ('/', '/tmp', '/dev', '/dev/shm', '/python', '.')])",
        _EACH + "each(*[lambda n=n: os.write(n, b'x' * 2**27) for n in range(16)])",
        _EACH + "each(*[lambda n=n: os.ftruncate(n, 2**40) for n in range(16)])",
        _EACH + "each(*[lambda n=n: os.posix_fallocate(n, 0, 2**3{d}) for n in range(16)])",
        _EACH + "each(*[lambda n=n: os.pwrite(n, b'x', 2**4{d}) for n in range(16)])",
        "import tempfile\nf = tempfile.TemporaryFile()\nwhile True: f.write(b'x' * 2**{d}0)",
    ),
    "endless output": (
        "while True: print('x' * {n})",
        "import os\nwhile True: os.write({out}, b'x' * 65536)",
        "import sys, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwhile True:\n    try:\n        sys.stdout.write('x' * 10**6)\n    except OSError:\n        pass",
        "import sys\nsys.stderr = sys.stdout\nraise SystemExit('x' * 10**8)",
        "print('\\x00\\x1b]0;{n}\\x07\\ud800' * 10**5)",
    ),
    "no end": (
        "while True: pass",
        "import time\nwhile True: time.sleep({n})",
        "import signal\nfor s in range(1, 64):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\nwhile True: pass",
        "import re\nre.match('(a+)+$', 'a' * {n}00 + 'b')",
        "import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()",
        "import os\nr, w = os.pipe()\nos.read(r, 1)",
        "import atexit, time\natexit.register(time.sleep, 10**6)",
        "class A:\n    def __del__(self):\n        while True: pass\na = A()\na.a = a",
        "sum(range(10**{n}0))",
    ),
    "more rights": (
        _SYSCALL + "print([call(272, f) for f in (0x10000000, 0x20000, 0x40000000, 0x7e020000)], [call(308, n, 0) for n in range(9)])",
        _SYSCALL + "print(call(165, b'none', b'/', b'tmpfs', 0, 0), call(166, b'/', 2), call(161, b'/'), call(155, b'/', b'/'))",
        _EACH + "each(lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.setgid(0))",
        _SYSCALL + "print(call(321, 0, 0, 0), call(250, 0, 0), call(298, 0, 0, -1, -1, 0), call(323, 0), call(135, 0xffffffff))",
        _SYSCALL + "print(call(157, 38, 0, 0, 0, 0), call(157, 22, 0), call(317, 0, 0, 0), call(1073741863))",
        _EACH + "import resource\neach(*[lambda r=r: resource.setrlimit(r, (-1, -1)) for r in range(16)])\nx = bytearray({gib} * 2**30)",
        _EACH + "each(lambda: os.execv('/python/bin/python3', ['p', '-c', 'import os; os.fork()']), lambda: os.execv('/bin/sh', ['sh']))",
        _EACH + "each(lambda: os.nice(-{n}), lambda: os.sched_setaffinity({victim}, [0]), lambda: os.setpgid(0, {victim}))",
    ),
    "crash": (
        "import ctypes\nctypes.string_at({n})",
        "import os\nos.abort()",
        "import ctypes\nctypes.memset(id(print), {n}, 4096)\nprint(1)",
        "eval('(' * {n}000 + ')' * {n}000)",
        "import os\nfor n in range(64):\n    try:\n        os.close(n)\n    except OSError:\n        pass",
        "exec(type((lambda: 0).__code__)(0, 0, 0, 0, 0, 0, b'd\\x00' * {n}, (), (), (), '', '', '', 0, b'', b'', (), ()))",
        "import faulthandler, sys\nsys.setrecursionlimit(10**8)\ndef f(): f()\nf()",
    ),
    "forged pass": (
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError",
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'0\\n1\\n2\\n')\n    except OSError:\n        pass",
        "class Same:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __gt__ = lambda self, other: False\n    def __hash__(self): return {n}\n    def __bool__(self): return True\ndef solve(*a): return Same()",
        "class N(int):\n    def __eq__(self, other): return True\ndef solve(*a): return N({n})",
        "class S(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\ndef solve(*a): return S('{n}')",
        "import fractions\nclass F(fractions.Fraction):\n    def __eq__(self, other): return True\ndef solve(*a): return F({n}, 7)",
        "import json, os\ndef solve(*a):\n    said = json.dumps({{'value': {{'Fraction': {{'object': 0}}, 'Decimal': 'Infinity'}}}}) + '\\n'\n    for fd in range(3, 64):\n        try:\n            os.write(fd, said.encode())\n        except OSError:\n            pass",
        "import decimal\ndef solve(*a): return type('Decimal', (), {{'__module__': 'decimal', '__str__': lambda self: 'NaN', '__eq__': lambda *a: True}})()",
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda *a: int\ndef solve(*a): return print",
        "import sys\ndef solve(*a):\n    f = sys._getframe(1)\n    while f:\n        f.f_globals['solve'] = lambda *a: True\n        f = f.f_back\n    raise StopIteration",
        "import json, sys\njson.dumps = lambda value: '{{\"value\": true}}'\ndef solve(*a): return {n}",
        "def solve(*a): raise AssertionError\ndef check(*a): return True\n_result = _is = check",
        "import os\ndef solve(*a):\n    for fd in range(3, 64):\n        try:\n            os.write(fd, b'{{\"value\": {{\"object\": 0}}}}\\n' * {n})\n        except OSError:\n            pass\n    os._exit(0)",
        "import os\ndef solve(*a):\n    for fd in range(3, 64):\n        try:\n            os.write(fd, b'[' * 10**5 + b'\\n')\n        except OSError:\n            pass",
        "def solve(*a):\n    x = []\n    x.append(x)\n    return x",
        "def solve(*a): return {{'object': 0}}",
        "class math:\n    isclose = lambda *a: True\ndef solve(*a): return {n}\nsorted = max = lambda *a: True",
        "print('PASSED', 'ok', 0, sep='\\n')\ndef solve(*a): return None",
        "import unittest, sys\nsys.modules['__main__'].test = lambda *a: None\nsys.settrace(lambda *a: None)\ndef solve(*a): return NotImplemented",
    ),
}  # fmt: skip
"""Kinds of attacks, each with programs that try it."""


def hostile_programs(count: int, seed: int, names: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The kind and the text of programs: the templates in turn, with other numbers and in another dress each time.

    Args:
        names: what they attack: ``canary``, a folder, ``file``, ``grader``, ``port`` and ``victim``, a process.
    """
    rounds = zip_longest(*([(kind, template) for template in templates] for kind, templates in TEMPLATES.items()))
    flat = [pair for one_of_each in rounds for pair in one_of_each if pair]
    random = Random(seed)
    for index in range(count):
        kind, template = flat[index % len(flat)]
        numbers = {
            "n": random.randint(2, 60), "gib": random.randint(2, 64), "d": random.randint(1, 3),
            "out": random.randint(1, 2), "signal": random.choice([1, 2, 9, 10, 15, 19]),
            "flags": random.choice([0x11, 0x4111, 0x10000000, 0x3D0F00 & ~0x10000, 0x7E020011]),
        }  # fmt: skip
        yield kind, dressed(template.format(**numbers, **names), index // len(flat), random)


def dressed(program: str, dress: int, random: Random) -> str:
    """The program as it is, or in another form that does the same."""
    indented = "".join(f"    {line}\n" for line in program.split("\n"))
    forms = (
        program,
        f"import base64\nexec(base64.b64decode({base64.b64encode(program.encode()).decode()!r}))",
        f"import atexit\nsource = {program!r}\natexit.register(lambda: exec(source, dict(__name__='x')))",
        f"import threading\nsource = {program!r}\n"
        "threading.Thread(target=lambda: exec(source, dict(__name__='x'))).start()",
        f"source = {program!r}\nfor _ in range({random.randint(2, 9)}):\n    try:\n        exec(source, globals())\n"
        "    except BaseException:\n        pass",
        f"def solve(*a):\n{indented}    return 0",
    )
    return forms[dress % len(forms)]
