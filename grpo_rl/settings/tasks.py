"""The settings of each task and of its reward, in ``env`` next to the settings that all tasks share.

Their defaults are those of the environment's class; ``config/env/`` repeats them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from grpo_rl.by_name import is_name, short_name
from grpo_rl.settings.declaration import REQUIRED, RewardSource, Section, setting, unknown

Examples = tuple[Mapping[str, Any], ...]
SYSTEM_PROMPT = "the system message; null: none"
FORM = "form of %s in the prompt: line (%s) | json (<tool_call>…</tool_call>) | function (the model's own)"
TOOL_ROLE = "role of results: tool | user, for chat templates that know no tool role"


def required(meaning: str, **constraints: Any) -> Any:
    """A setting without a default in the schema."""
    return setting(REQUIRED, meaning, **constraints)


class GSM8KReward(Section):
    correctness: float = required(
        'weight: the final number (<answer>, ####, \\boxed, "the answer is", else the last) is the gold one'
    )
    reasoning_format: float = required("weight: the response matches reasoning_pattern")
    answer_format: float = required("weight: the response matches answer_pattern")
    reasoning_pattern: str = required("searched in the whole response")
    answer_pattern: str = required("searched in the whole response")


class GSM8K(Section):
    """Grade-school mathematics, judged on the final number."""

    system_prompt: str | None = required(SYSTEM_PROMPT)
    examples: Examples = required("few-shot turns before the problem: a list of {question, answer}")
    reward: GSM8KReward


class IFEvalReward(Section):
    strict: float = required("weight: the share of instructions that are followed")
    all: float = required("weight: all of them are followed")
    loose: float = required("weight: that share, with a greeting, a closing line or bold type forgiven")


class IFEval(Section):
    """Instructions whose fulfilment programs can check."""

    system_prompt: str | None = required(SYSTEM_PROMPT)
    reward: IFEvalReward


class MathReward(Section):
    correctness: float = required("weight: the boxed answer equals the gold answer")
    answer_format: float = required("weight: there is a closed box")
    deadline_s: float = required(
        "seconds for one comparison; a response that takes longer is wrong, and logged as measure/timed_out",
        more_than=0,
    )


class Math(Section):
    """Mathematics with a boxed final answer."""

    system_prompt: str | None = required(SYSTEM_PROMPT)
    examples: Examples = required("few-shot turns before the problem: a list of {problem, solution}")
    reward: MathReward


class Puzzles(Section):
    """The generated puzzles of ``countdown``."""

    sizes: tuple[int, ...] = required("how many numbers a puzzle has")
    max_number: int = required("the largest number of a puzzle", at_least=1)
    max_target: int = required("the largest target", at_least=1)
    seed: int = required("seed of the generator")


class CountdownReward(Section):
    correctness: float = required("weight: the expression reaches the target by the rules")
    answer_format: float = required("weight: there is an expression that has a value")
    use_all: bool = required("true: each number has to be used once; false: at most once")


class Countdown(Section):
    """Puzzles: reach a target from given numbers by arithmetic."""

    system_prompt: str | None = required(SYSTEM_PROMPT)
    examples: Examples = required(
        "turns before the puzzle: {numbers, target, response}; a small model that sees none writes no expression"
    )
    puzzles: Puzzles
    reward: CountdownReward


class CalculatorReward(Section):
    correctness: float = required("weight: the final number equals the gold number")
    tool_use: float = required("weight: a result was calculated and used")
    answer_format: float = required("weight: the last message ends on <answer>NUMBER</answer>")


class Calculator(Section):
    """Word problems with a calculator as a tool."""

    form: Literal["line", "json", "function"] = required(FORM % ("calls", "Calculator: 3*(4+5)"))
    tool_role: Literal["tool", "user"] = required(TOOL_ROLE)
    system_prompt: str | None = required("system message, in which {call} becomes a call in that form; null: none")
    examples: Examples = required("turns before the problem; a small model that sees none, or one, calls nothing")
    reward: CalculatorReward


class SearchQAReward(Section):
    exact_match: float = required("weight: the final answer is the gold answer")
    f1: float = required("weight: share of words in common with the gold answer")
    supporting_recall: float = required("weight: share of the supporting documents that were shown")


class SearchQA(Section):
    """Questions to be answered by searching documents."""

    corpus: str | None = required(
        "documents: JSON (title -> sentences) or JSONL (title, text); null: those next to the questions"
    )
    held_out: float = required("share of `path` that is kept for evaluation", at_least=0, less_than=1)
    results: int = required("documents that a search shows", at_least=1)
    max_result_chars: int = required("characters of a document that a search shows", at_least=1)
    form: Literal["line", "json", "function"] = required(FORM % ("searches", "Search: Jane Austen"))
    tool_role: Literal["tool", "user"] = required(TOOL_ROLE)
    system_prompt: str | None = required("system message, in which {call} becomes a search in that form; null: none")
    examples: Examples = required("turns before the question")
    reward: SearchQAReward


class CodeReward(Section):
    tests: float = required("weight: the share of tests that are passed")
    all_passed: float = required("weight: all tests are passed")
    answer_format: float = required("weight: there is a fenced block")


class Code(Section):
    """Programs, judged by tests in a sandbox."""

    sandbox: Literal["bubblewrap", "i_accept_no_sandbox"] = required(
        "where programs run: bubblewrap | i_accept_no_sandbox: they can read, change and delete every file that you "
        "can, and forge their verdicts"
    )
    time_s: float = required("CPU seconds for one run of a program, in whole ones", at_least=0.1)
    memory_mib: int = required("memory of a program", at_least=64)
    max_tests: int | None = required("tests of a row that are run, at equal distances; null: all", at_least=1)
    system_prompt: str | None = required(SYSTEM_PROMPT)
    reward: CodeReward


class OpenEnv(Section):
    """Episodes of an environment behind an OpenEnv server."""

    url: str | None = required("the server's address, such as http://127.0.0.1:8000; no other is contacted")
    episodes: int = required("seeds to train on where there is no path; a tenth as many are held out", at_least=1)
    system_prompt: str | None = required(SYSTEM_PROMPT)


class Verifiers(Section):
    """Tasks of a taskset of Prime Intellect's verifiers."""

    name: str | None = required(
        "the taskset: an installed package, or one that comes with verifiers, such as textarena"
    )
    taskset: Mapping[str, Any] = required("the taskset's settings, those of `--env.taskset` under verifiers")
    episodes: int | None = required("tasks that are taken; null: all", at_least=1)
    held_out: float = required("share of them that is kept for evaluation", at_least=0, less_than=1)


class PromptResponse(Section):
    """Prompts from a file, scored by reward functions given by name."""

    reward: RewardSource | None = required(
        "package.module:function, or a list of them, or weights by name; called in a process of its own (env.isolated)"
    )
    prompt_column: str = required("column of the prompts: texts, or lists of chat messages")
    completion_column: str | None = required("column of the reference answer, for logs; mode=sft imitates it")
    system_prompt: str | None = required(SYSTEM_PROMPT)


class MixtureTasks(Section):
    """Several tasks in one run."""

    mixture: Mapping[str, Any] = required(
        "weights by task: {gsm8k: 0.5, ifeval: 0.3}; or a mapping of weight, scale (factor of its rewards), task "
        "(where its name is another) and its own settings"
    )


MIXTURE = "mixture"
"""The value of ``env.dataset`` that stands for several tasks, ``env.mixture``."""


class Agent(Section):
    """A program of one's own that calls the policy through an endpoint."""

    command: str | None = required("a program and its arguments, started for each session; no shell runs it")
    agent: str | None = required(
        "instead of command: package.module:function, called with a client's settings and the row, in processes of its "
        "own"
    )
    scorer: str | None = required(
        "task that gives the rows and scores an agent's final message, one of env.dataset's; null: rows are those of "
        "env.path, and the agent sends its reward"
    )
    scorer_settings: Mapping[str, Any] = required("settings of the scorer that differ from its own")
    pass_environment: tuple[str, ...] = required(
        "variables of the environment that an agent inherits though they look like secrets"
    )
    deadline_s: float = required("seconds of one session; an agent that takes longer is killed", more_than=0)
    max_calls: int = required("calls of the policy in one session", at_least=1)
    max_session_tokens: int = required("tokens sampled in all calls of one session", at_least=1)
    max_sessions: int = required(
        "sessions at the same time, each with a process of its own; further ones wait", at_least=1
    )


TASKS: Mapping[str, type[Section]] = {
    "gsm8k": GSM8K,
    "ifeval": IFEval,
    "math": Math,
    "countdown": Countdown,
    "calculator": Calculator,
    "search_qa": SearchQA,
    "code": Code,
    "openenv": OpenEnv,
    "verifiers": Verifiers,
    "prompt_response": PromptResponse,
    MIXTURE: MixtureTasks,
    "agent": Agent,
}
"""The values of ``env.dataset``, each with its own settings."""
ALIASES = {"math500": "math"}
"""Names of test sets, and the task that they are the held-out rows of."""
SINGLE = (*(name for name in TASKS if name != MIXTURE), *ALIASES)
"""The names of single tasks, which can be evaluated."""


def check_names(names: Sequence[str], where: str, known: Collection[str] = SINGLE) -> None:
    """Refuses names of no task, and two of one short name, which metrics would mix up.

    Raises:
        ValueError: names the setting, and the nearest task.
    """
    for name in names:
        if name not in known and not is_name(name):
            raise ValueError(f"{where}: {unknown('task', name, [*known, 'package.module:Class'])}")
    short = [short_name(name) for name in names]
    if twice := [name for name in short if short.count(name) > 1]:
        raise ValueError(f"{where} names {twice[0]} twice")
