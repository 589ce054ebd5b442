"""Inputs made to break readers of text and files: hostile fragments, and mutations of a corpus from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import TypeVar

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text(encoding="utf-8"))
"""Texts that each target takes, and those that once broke it, by the target's name."""
CANARY = "GRPO_RL_FUZZ_CANARY"
"""The environment variable and the file that no text may read, write or name the value of."""
MAX_CHARS = 8192
LONG_EVERY = 5000
"""One of so many mutated texts has a line of a megabyte."""

CODE = (
    f"__import__('os').system('touch {CANARY}')",
    f'__import__("subprocess").run(["touch", "{CANARY}"])',
    f"open('{CANARY}', 'w').write('x')",
    "().__class__.__bases__[0].__subclasses__()",
    f"__import__('os').environ['{CANARY}']",
    "__import__('socket').create_connection(('127.0.0.1', 9))",
    "exec('x = 1')",
    "eval('1+1')",
    "lambda: 0",
    "breakpoint()",
    "{0.__class__.__init__.__globals__}",
    "%(x)s",
    "%n",
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY} ;",
    f"| touch {CANARY}",
    "&&",
    "../../../etc/passwd",
    f"{{{{ cycler.__init__.__globals__.os.popen('touch {CANARY}').read() }}}}",
    "{% for i in range(9) %}x{% endfor %}",
    "{{ 1/0 }}",
    "{{ messages[9].content }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    f"\\input{{{CANARY}}}",
    f"\\write18{{touch {CANARY}}}",
    "\\csname end\\endcsname",
)
DATA = (
    f"${{oc.env:{CANARY}}}",
    "_target_: os.system",
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    "!!timestamp 2020-13-45",
    "&a [*a, *a]",
    "<<: *a",
    "? [complex, key]\n: v",
    "--- a\n--- b",
    "0x_",
    "1e999",
    "-.inf",
    "1_000",
    "[[[[[[[[[[[[[[[[",
    "{",
    "}",
    "]",
    "'",
    '"',
    "null",
    "true",
    "[]",
    "{}",
    "[1,2]",
    "\t",
    "\n",
    ": ",
    "- ",
    "#",
    "\\",
    ",",
    "NaN",
    "Infinity",
    "1e400",
    '{"step": 1',
    '"\\ud800"',
    '{"a": {"a": {"a": 1}}}',
)
ARITHMETIC = (
    "99**98**97",
    "9**9**9**9",
    "1e308*1e308",
    "1/0",
    "0**-1",
    "(-8)**(1/3)",
    "2**0.5",
    "1//0",
    "0/0",
    "1e-400",
    "((((",
    "))))",
    "+" * 50,
    "-" * 50,
    "1." * 20,
    "1,2,3",
    "1,000,000",
    "0x10",
    "1_0",
    "１２",
    "٣",
    "½",
    "²",
    "1e",
    "e1",
    "e",
    "10**1023",
    "(" * 40 + "1" + ")" * 40,
    "**",
    "//",
    "×",
    "÷",
    "−",
    "=",
    "% of",
    "1e5",
    "1E+5",
    "1j",
    "1 if 1 else 2",
    "True",
    "...",
    "9" * 300,
    "0." + "3" * 300,
)
MATHS = (
    "\\boxed{",
    "\\boxed{1}",
    "\\fbox{2}",
    "\\frac{1}{0}",
    "\\frac",
    "\\sqrt",
    "9^{9^{9^{9}}}",
    "(10^{9})!",
    "\\left(",
    "\\right)",
    "\\text{",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
    "\\sum_{i=1}^{\\infty}",
    "x^{x^x}",
    "\\infty",
    "\\%",
    "\\pi",
    "_2",
    "|",
    "\\{1,2\\}",
    "[0,1)",
    "\\cup",
    "=",
    "\\le",
    "\\pm",
    "1{,}000",
    "1\\,000",
    "\\circ",
    "}",
    "{",
    "$",
)
MARKUP = (
    "<answer>",
    "</answer>",
    "<answer>1</answer>",
    "<think>",
    "</think>",
    "####",
    "#### 7",
    "answer is",
    "Answer:",
    "Calculator:",
    "Calculator: 1+1\n",
    "Search: x\n",
    "<tool_call>",
    "</tool_call>",
    "<calculator>",
    "[calculator]",
    '{"name": "calculator", "arguments": {"expression": "1+1"}}',
    '{"name":',
    "\\u0000",
    "\\ud800",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "-->",
    "]]>",
    "javascript:alert(1)",
    "&lt;",
    "'><svg onload=alert(1)>",
    "<|im_end|>",
    "<|endoftext|>",
    "<s>",
    "\u2028",
    "```json\n",
    "P.S.",
    "***",
    "<<x>>",
    "* a\n",
    "[x]",
    "SECTION 1",
    "******",
    '"',
    "---\nlicense: mit\n---\n",
    "[a](javascript:alert(1))",
    "| a | b |",
)
SIGNS = (
    "\0",
    "\x1b[2J",
    "\x1b]0;t\x07",
    "\r",
    "\r\n",
    "\x7f",
    "\x85",
    "\u00a0",
    "\u200b",
    "\u202e",
    "\u2066",
    "\ufeff",
    "\ud800",
    "\udfff",
    "\udcff",
    "\uffff",
    "\U0010ffff",
    "é" * 9,
    "e\u0301" * 9,
    "ﷺ",
    "İ",
    "ß",
    "ſ",
    "ı",
    "答",
    "العربية",
    "👩‍👩‍👧",
)
SLOW = (
    "a" * 400 + "!",
    "(a+)+$" * 20,
    " " * 1000 + "x",
    "*" * 1000,
    "\n" * 1000,
    "[" * 1000,
    "{" * 1000,
    "<answer>" * 200,
    "(" * 1000,
    "\\boxed{" * 200,
    "1 " * 500,
    "1,111" * 200,
    "=" * 500,
    "-" * 500,
    ". " * 500,
    "\\" * 999,
    "'" * 500,
    '"' * 501,
    "1" * 5000,
    "x1" * 500,
    "_" * 500,
    "<" * 500,
    "Calculator:" * 100,
    "\t \t" * 300,
    "P. S. " * 100,
    "a.b." * 300,
    "&a" * 300,
)
FRAGMENTS = (*CODE, *DATA, *ARITHMETIC, *MATHS, *MARKUP, *SIGNS, *SLOW)

Data = TypeVar("Data", str, bytes)


def mutated(rng: Random, seeds: list[Data]) -> Data:
    """A seed after one to six changes: fragments put in, parts taken out, repeated, or changed for another seed's."""
    data = rng.choice(seeds)
    for _ in range(rng.randint(1, 6)):
        data = _changed(rng, data, seeds)[:MAX_CHARS] if isinstance(data, str) else _changed(rng, data, seeds)
    if isinstance(data, str) and rng.randrange(LONG_EVERY) == 0:
        piece = rng.choice(FRAGMENTS)
        at = rng.randint(0, len(data))
        data = data[:at] + piece * (2**20 // len(piece)) + data[at:]
    return data


def _changed(rng: Random, data: Data, seeds: list[Data]) -> Data:
    at = rng.randint(0, len(data))
    to = min(len(data), at + rng.choice((1, 2, 4, 16, 64)))
    kind = rng.randrange(6)
    if kind <= 1:
        return data[:at] + _piece(rng, data) + data[at:]
    if kind == 2:
        return data[:at] + _piece(rng, data) + data[to:]
    if kind == 3:
        return data[:at] + data[to:]
    if kind == 4:
        return data[:to] + data[at:to] * rng.choice((1, 2, 8)) + data[to:]
    other = rng.choice(seeds)
    return data[:at] + other[rng.randint(0, len(other)) :]


def _piece(rng: Random, like: Data) -> Data:
    if isinstance(like, bytes):
        if rng.randrange(2):
            return rng.randbytes(rng.choice((1, 1, 2, 4, 8)))
        return as_bytes(rng.choice(FRAGMENTS))
    if rng.randrange(4):
        return rng.choice(FRAGMENTS)
    return chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))


def as_bytes(text: str) -> bytes:
    """The text as UTF-8; a lone surrogate becomes bytes that are none."""
    return text.encode("utf-8", "surrogatepass")
