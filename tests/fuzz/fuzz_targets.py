"""The targets: each reader of foreign text or files, the error that it documents, and what holds of its result."""

import copy
import dis
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import canaries
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from fuzz_inputs import CORPUS, as_bytes

import grpo_rl
from grpo_rl.envs.rewards.json_client import EndpointError

CHEAP_S, DEAR_S = 2.0, 10.0
"""CPU seconds that one call may take. Most take milliseconds; the square of a long text's length takes minutes."""
BESIDE_S = 20.0
"""Seconds by the clock where another process does the work: its deadline, again alone, and the start of another."""
OURS = f"{Path(grpo_rl.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class Target:
    """A reader under test.

    Args:
        prepare: makes the argument of ``read`` from the input, as by writing it into a file; not watched.
        read: the reader under test; it may run no code of the input, write no file and open no socket.
        seeds: inputs that it takes; bytes for files that are not text.
        check: asserts what must hold of the result.
        error: the one error that it documents; None: no input makes it raise.
        examples: in ``make test-all``.
        watched: False: another process does the work and watches it, and this one may start it anew.
        clock: seconds of the work; other processes have no part in this thread's CPU time.
    """

    name: str
    prepare: Callable[[Any, Path], Any]
    read: Callable[[Any], Any]
    seeds: Callable[[Path], Sequence[Any]]
    check: Callable[[Any], None] = lambda result: None
    error: type[Exception] | None = ValueError
    deadline_s: float = CHEAP_S
    examples: int = 100
    watched: bool = True
    clock: Callable[[], float] = time.thread_time


class Broken(AssertionError):
    """A property does not hold for an input."""


def raised_by_us(error: Exception) -> bool:
    """True if a raise statement of this project made the error; another's names neither file nor remedy."""
    at = error.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    code = at.tb_frame.f_code
    return code.co_filename.startswith(OURS) and code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def run(target: Target, data: Any, folder: Path) -> None:
    """One input through a target."""
    argument, error, result = target.prepare(data, folder), None, None
    begun = target.clock()
    with canaries.watched() if target.watched else nullcontext([]) as seen:
        try:
            result = target.read(argument)
        except Exception as caught:
            error = caught
    seconds = target.clock() - begun
    if seen:
        raise Broken(f"it did {seen[:3]}")
    known = target.error is not None and isinstance(error, target.error)
    if error is not None and not (known and raised_by_us(error) and str(error).strip()):
        raise Broken(f"it raised {type(error).__name__}: {str(error)[:300]!r}") from error
    if seconds > target.deadline_s:
        raise Broken(f"it took {seconds:.1f} s")
    if canaries.VALUE in (repr(result) if error is None else str(error)):
        raise Broken("it tells the value of an environment variable")
    if error is None:
        target.check(result)


def seeds_read_once(target: Target, folder: Path) -> list:
    """The seeds, read unwatched: imports that a reader makes at its first call are no evaluation of its input."""
    seeds = list(target.seeds(folder))
    for data in seeds:
        try:
            target.read(target.prepare(data, folder))
        except Exception:
            continue
    return seeds


def _as_is(data: Any, folder: Path) -> Any:
    return data


def _corpus(name: str) -> Callable[[Path], Sequence[Any]]:
    return lambda folder: CORPUS[name]


def _file(name: str) -> Callable[[Any, Path], Path]:
    def write(data: Any, folder: Path) -> Path:
        path = folder / name
        path.write_bytes(as_bytes(data) if isinstance(data, str) else data)
        return path

    return write


# ---- the text of a model ----


def _lazily(module: str, name: str) -> Callable[..., Any]:
    @cache
    def found() -> Any:
        return getattr(importlib.import_module(f"grpo_rl.{module}"), name)

    return lambda *arguments, **named: found()(*arguments, **named)


_calculate, _verdict = _lazily("envs.tools.arithmetic", "calculate"), _lazily("envs.rewards.judge", "verdict")


def _in_range(result: float) -> None:
    assert isinstance(result, float) and 0 <= result <= 10, result


def _short_text(result: str) -> None:
    assert isinstance(result, str) and len(result) < 200, result


@cache
def _tasks() -> dict[str, tuple[Any, dict]]:
    from grpo_rl.envs.calculator import Calculator
    from grpo_rl.envs.countdown import Countdown
    from grpo_rl.envs.gsm8k import GSM8K
    from grpo_rl.envs.search_qa import SearchQA
    from grpo_rl.envs.tools.search_index import Document, SearchIndex

    sums, puzzle = {"question": "3 + 4?", "answer": "#### 7"}, {"numbers": [3, 7, 50], "target": 47}
    question = {"question": "Who wrote Turandot?", "answer": "Puccini", "documents": ["Turandot"]}
    index = SearchIndex([Document("Turandot", "An opera by Puccini."), Document("Emma", "A novel.")])
    return {
        "gsm8k": (GSM8K([sums]), sums),
        "countdown": (Countdown([puzzle]), puzzle),
        "calculator": (Calculator([sums]), sums),
        "search": (SearchQA([question], index), question),
    }


def _graded(text: str) -> Any:
    found = []
    for name in ("gsm8k", "countdown"):
        task, row = _tasks()[name]
        found.append((task.score(row, text), task.final_answers([text])))
    tags, numbers = (importlib.import_module(f"grpo_rl.envs.grading.{name}") for name in ("tags", "numbers"))
    return found, tags.last_boxed(text, 300), tags.last_answer(text), numbers.extract_answer(text)


def _conversed(text: str) -> Any:
    """A turn of the policy, each task's reply to it, and the score of both with a second turn."""
    found = []
    for name in ("calculator", "search"):
        task, row = _tasks()[name]
        messages = [*task.prompt(row), {"role": "assistant", "content": text}]
        reply = task.reply(row, messages)
        if reply is not None:
            messages += [*reply, {"role": "assistant", "content": text}]
        found.append((task.score_dialog(row, messages), reply))
    return found


def _rewards(scored: list[tuple[Any, Any]]) -> None:
    for reward, _ in scored:
        assert all(value == value and abs(value) < 1e6 for value in reward.parts.values()), reward


def equal_watched(gold: str, answer: str | None) -> list[str]:
    """Forbidden events of the comparison of an answer, in a worker."""
    import sympy.physics.units  # noqa: F401  what sympy simplifies imports it, and it declares units by sympy's parser

    from grpo_rl.envs.grading.boxed import equal

    equal(gold, "1")  # imports, before anything is watched
    with canaries.watched() as seen:
        equal(gold, answer)
    return list(seen)


@cache
def _comparisons() -> Any:
    from grpo_rl.envs.guards.isolation import IsolatedCalls

    return IsolatedCalls(equal_watched, deadline_s=5.0, workers=1)


def _compare(text: str) -> Any:
    return _comparisons().map([(r"\frac{1}{2}", text[:300])])[0]


def _only_deadlines(result: Any) -> None:
    from grpo_rl.envs.guards.isolation import WorkerDied

    allowed = isinstance(result, (list, TimeoutError, MemoryError, WorkerDied))
    assert allowed and not (isinstance(result, list) and result), result


def _guarded(text: str) -> Any:
    from grpo_rl.envs.grading.verification import verdicts

    return verdicts(["1/2"], [rf"\boxed{{{text}}}"], 1.0)


def _is_verdict(result: Any) -> None:
    from grpo_rl.envs.grading.verification import Verdict

    assert isinstance(result[0], Verdict), result


@cache
def _instructions() -> Any:
    from grpo_rl.envs.ifeval.task import parse

    given = CORPUS["ifeval instructions"][0]
    row = json.loads(given)
    return parse(row["instruction_id_list"], row["kwargs"], "a row")


def _followed(text: str) -> Any:
    """All 25 instructions, on the text and on eight variants of it: 225 passes over a megabyte take seconds."""
    from grpo_rl.envs.ifeval.task import verdicts

    return verdicts(_instructions(), text), verdicts(_instructions(), text, loose=True)


def _instruction_row(text: str) -> Any:
    from grpo_rl.envs.ifeval.task import parse, verdicts

    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    ids, arguments = (row.get(key) if isinstance(row, dict) else None for key in ("instruction_id_list", "kwargs"))
    if not isinstance(ids, list) or not isinstance(arguments, list):
        return None
    return verdicts(parse(ids, arguments, "a row"), "A response.")


# ---- chat templates, which come with a model ----


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE({sign: at for at, sign in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}>"
    fast.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)  # compiled once
    return fast


def _in_chat(text: str) -> str:
    from grpo_rl.envs.chat import templated

    return templated(_tokenizer(), [{"role": "user", "content": text}], tokenize=False)


def _soon_read(text: str, folder: Path) -> str:
    """The template without powers, which can take hours, and with at most 50 signs in a row.

    How long a template takes is not promised: for Jinja itself 200 signs in a row are 3 s, and the time grows with the
    cube.
    """
    return re.sub(r"([-+])\1{50,}", lambda run: run[0][:50], text.replace("**", "*"))


def _by_template(template: str) -> Any:
    from grpo_rl.envs.chat import encode_prompts, encode_reply

    tokenizer = copy.copy(_tokenizer())
    tokenizer.chat_template = template
    prompts = encode_prompts(tokenizer, [[{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1?"}]])
    return prompts[0], encode_reply(tokenizer, [{"role": "tool", "content": "2"}])


def _of_ids(result: tuple[list, list]) -> None:
    assert all(isinstance(i, int) for ids in result for i in ids), result


# ---- configs of TRL ----


def _trl_file(text: str, folder: Path) -> Path:
    """A config of TRL; the text's first line says of which kind."""
    kind, _, content = text.partition("\n")
    return _file(f"trl{kind if kind in ('.json', '.py') else '.yaml'}")(content, folder)


def _trl(path: Path) -> Any:
    from grpo_rl.migration.command import read_trl
    from grpo_rl.migration.from_trl import convert

    made = convert(read_trl(path)[0])
    text = made.as_yaml("its config")
    text.encode()
    return yaml.safe_load(text), made


def _is_converted(result: tuple[dict, Any]) -> None:
    written, made = result
    assert set(written) == {"defaults", *made.config}, (written, made.config)
    assert all(line.isprintable() for line in made.differences), made.differences


# ---- files of runs from elsewhere ----


def _checkpoints(folder: Path) -> list[bytes]:
    import torch

    from grpo_rl.storage import checkpoint_file

    class Planted:
        def __reduce__(self):
            return os.system, (f"touch {folder / 'planted'}",)

    path = folder / "seed.pt"
    checkpoint_file.write(path, {"step": 3, "weights": {"w": torch.arange(6.0)}, "config": '{"a": 1}'})
    whole = path.read_bytes()
    torch.save({"step": 3, "weights": torch.ones(2)}, path)
    plain = path.read_bytes()
    endless = plain.replace(b"u.PK", b"K1PK")  # for which torch's error has no text
    torch.save({"step": 3, "bad": Planted()}, path)
    planted = path.read_bytes()
    torch.save({"step": 3, "bad": Planted()}, path, _use_new_zipfile_serialization=False)
    return [whole, plain, endless, planted, path.read_bytes()]


RUN_FILES = ("metrics.jsonl", "summary.json", "config.yaml", "overrides.yaml", "evaluation.json", ".lock")


def _run_folder(text: str, folder: Path) -> Path:
    """A run's folder whose files hold parts of the text: one begins at each line `=== NAME`."""
    run = folder / "foreign"
    run.mkdir(exist_ok=True)
    for name in RUN_FILES:
        (run / name).unlink(missing_ok=True)
    for part in ("\n" + text).split("\n=== ")[1:]:
        name, _, content = part.partition("\n")
        if name in RUN_FILES:
            (run / name).write_bytes(as_bytes(content))
    return run


def _completions(text: str, folder: Path) -> Path:
    """A run whose responses are the text."""
    run = folder / "foreign_responses"
    (run / "completions.parquet").mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    text = text.encode("utf-8", "replace").decode()
    row = {"step": 1, "group_id": 0, "row": 0, "prompt": text, "completion": text, "answer": text, "reward": 1.0}
    row |= {"advantage": 0.5, "tokens": 1, "truncated": False, "policy_version": 0}
    pq.write_table(pa.Table.from_pylist([row] * 2), run / "completions.parquet" / "part-00000001.parquet")
    return run


def _page(run: Path) -> str:
    from grpo_rl.report import page

    return page.assemble(page.SECTIONS, page.build(page.SECTIONS, run))


def _page_of_responses(run: Path) -> str:
    """The page of a run, all of whose responses have to be on it."""
    from grpo_rl.report import page

    data = page.build(page.SECTIONS, run)
    written = pq.read_metadata(run / "completions.parquet" / "part-00000001.parquet").num_rows
    shown = sum(len(group["responses"]) for group in json.loads(data["responses"]).get("groups", ()))
    assert shown == written, f"{shown} of {written} responses are shown: {data['responses'][:200]}"
    return page.assemble(page.SECTIONS, data)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _no_foreign_markup(html: str) -> None:
    parser = _Tags()
    parser.feed(html)
    scripts = [attributes for tag, attributes in parser.found if tag == "script"]
    assert sum(attributes.get("type") != "text/plain" for attributes in scripts) == 1, scripts
    assert not any(name.startswith("on") or name == "src" for _, names in parser.found for name in names)
    assert not any(tag in ("img", "iframe", "object", "embed") for tag, _ in parser.found)
    assert not any("javascript:" in (names.get("href") or "") for _, names in parser.found)


def _load_rows(module: str) -> Callable[[Path], list]:
    load_rows = _lazily(module, "load_rows")
    return lambda path: list(load_rows(path))


def _program(text: str) -> Any:
    module = importlib.import_module("grpo_rl.envs.grading.program_tests")
    return module.program_of(text), module.equal_outputs(text, "7 0.5"), module.equal_outputs("7 0.5", text)


def _action(text: str) -> Any:
    from grpo_rl.envs.openenv import action_of

    return action_of(text, {"required": ["x", "y"], "properties": {"x": {}, "y": {}}})


def _agents_request(body: bytes) -> Any:
    from grpo_rl.agents.requests import digests, for_template, read_json, read_request
    from grpo_rl.engines.sampling import Sampling

    request = read_request(read_json(body), Sampling(), "policy", is_trained=False)
    return request, digests([for_template(message) for message in request.messages], request.tools)


def _is_request(result: Any) -> None:
    request, told = result
    assert len(told) == len(request.messages) + 1 and request.n >= 1


def _teacher(text: str) -> Any:
    from grpo_rl.policies.served import ServedTeacher

    def ask(*_: Any) -> Any:
        try:
            return json.loads(text)
        except RecursionError as error:  # as the client does
            raise ValueError("too deep") from error

    teacher = object.__new__(ServedTeacher)
    teacher._client = SimpleNamespace(ask=ask, url="", without_key=str)
    teacher._name, teacher._vocabulary, teacher._top = "", 256, 2
    teacher._tokenizer = SimpleNamespace(decode=lambda ids: "a")
    return teacher._scored(((1,), (5,)))


def _is_scored(result: Any) -> None:
    own, ids, log_probs = result
    assert (
        own.shape == (1,) and ids.shape == log_probs.shape == (1, 2) and own.isfinite() and log_probs.isfinite().all()
    )


TARGETS = [
    Target("calculate", _as_is, _calculate, _corpus("calculate"), _short_text, error=None),
    Target("judge verdicts", _as_is, lambda text: _verdict(text, 0, 10), _corpus("judge verdicts"), _in_range),
    Target("graders", _as_is, _graded, _corpus("responses"), lambda result: _rewards(result[0]), error=None),
    Target("tool calls", _as_is, _conversed, _corpus("calls"), _rewards, error=None),
    Target("ifeval responses", _as_is, _followed, _corpus("responses"), error=None, deadline_s=DEAR_S),
    Target("ifeval instructions", _as_is, _instruction_row, _corpus("ifeval instructions")),
    Target("math", _as_is, _compare, _corpus("math"), _only_deadlines, error=None, deadline_s=BESIDE_S, examples=100,
           watched=False, clock=time.monotonic),
    Target("math verdicts", _as_is, _guarded, _corpus("math"), _is_verdict, error=None, deadline_s=BESIDE_S,
           examples=60, watched=False, clock=time.monotonic),
    Target("chat", _as_is, _in_chat, _corpus("responses"), error=None),
    Target("chat templates", _soon_read, _by_template, _corpus("chat templates"), _of_ids, deadline_s=DEAR_S),
    Target("teachers", _as_is, _teacher, _corpus("teachers"), _is_scored, error=EndpointError, examples=60),
    Target("agent requests", lambda text, _: text.encode(errors="replace"), _agents_request,
           _corpus("agent requests"), _is_request, examples=60),
    *(
        Target(f"checkpoint {name}", _file("fuzzed.pt"), _lazily("storage.checkpoint_file", name), _checkpoints)
        for name in ("check", "read")
    ),
    Target("report", _run_folder, _page, _corpus("report"), _no_foreign_markup, deadline_s=DEAR_S, examples=60),
    Target("report responses", _completions, _page_of_responses, _corpus("responses"), _no_foreign_markup,
           deadline_s=DEAR_S, examples=40),
    Target("programs", _as_is, _program, _corpus("responses"), error=None, examples=60),
    Target("program tests", _file("rows.jsonl"), _load_rows("envs.code"), _corpus("program tests"), examples=60),
    Target("actions", _as_is, _action, _corpus("actions"), examples=60),
    Target("trl", _trl_file, _trl, _corpus("trl"), _is_converted, examples=200),
    Target("data rows", _file("rows.jsonl"), _load_rows("envs.gsm8k"), _corpus("data rows"), examples=60),
]  # fmt: skip
BY_NAME = {target.name: target for target in TARGETS}
