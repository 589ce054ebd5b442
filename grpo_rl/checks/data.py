"""Checks of the data and the reward: rows and prompts, and what gold and garbage earn within the scorer's deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from grpo_rl.assembly.environment import eval_plan, eval_rows, make_env
from grpo_rl.checks.check import Case
from grpo_rl.checks.finding import Finding
from grpo_rl.checks.model_of_run import source_of
from grpo_rl.envs.base import Failure, LLMEnv, Reward, ScoreGuard
from grpo_rl.envs.task import plays_turns
from grpo_rl.policies.hub import load_tokenizer
from grpo_rl.settings.derived import total_steps
from grpo_rl.settings.schema import Settings

ROWS = 4
"""Rows whose responses are scored."""
GARBAGE = "qwrt zxcv ~~ <<>> 000 \\boxed{ ####"
"""A response that answers nothing, and is no easy text to parse."""
PATIENCE_S = 15.0
"""Seconds that a call of the scorer may take here, where a run gives it more."""
MANY_PASSES = 20


_environments: dict[str, LLMEnv] = {}


def dataset(case: Case) -> Iterator[Finding]:
    """Reads all rows, tokenises all prompts, and compares their number with the run's steps."""
    settings, env = case.read, env_of(case)
    held_out = len(eval_rows(settings, env))
    eval_plan(settings, env.tokenizer, env)
    rows, steps, groups = len(env.task.rows) - env.skipped, total_steps(settings), settings.env.num_envs
    passes = steps * groups / rows
    text = f"{rows:,} rows"
    text += f" ({env.skipped} of {len(env.task.rows)} are too long and left out)" if env.skipped else ""
    text += (
        f"; {steps:,} steps of {groups} prompts see each {passes:.2g} times"
        if passes >= 1
        else (f"; {steps:,} steps of {groups} prompts see {steps * groups:,} of them")
    )
    text += f"; {held_out} held out" if held_out else "; none held out (evaluate.rows=0)"
    if rows < groups:
        text += f". A step has a row more than once: lower env.num_envs to {rows}, or give more rows"
    elif passes > MANY_PASSES:
        text += ". That often: expect it to learn them by heart, and watch the held-out reward"
    yield Finding("note" if rows < groups or passes > MANY_PASSES else "OK", "dataset", text)


def rewards(case: Case) -> Iterator[Finding]:
    """Scores gold and garbage responses to the first rows, against the scorer's deadline."""
    whole = env_of(case)
    for name, env in (whole.members or {"": whole}).items():
        for finding in _rewards(case.read, env):
            yield replace(finding, text=f"{name}: {finding.text}") if name else finding


def _rewards(settings: Settings, env: LLMEnv) -> Iterator[Finding]:
    deadline = env.guard.deadline_s
    guard = ScoreGuard(env.task, min(deadline, PATIENCE_S), max_failed_fraction=1.0)
    guard.tell = lambda _: None  # a line of the report tells
    totals: dict[str, list[float]] = {"gold": [], "garbage": []}
    slowest = 0.0
    if env.task.rows:  # a scorer's own process starts at the first call, once in a run
        for result in _scored(env, guard, env.task.rows[0], [GARBAGE] * _group_size(env, settings), 0):
            if not isinstance(result, Reward) and result.kind != "unjudgeable":
                yield _failed(result, "garbage", deadline)
                return
    for index in range(min(ROWS, len(env.task.rows))):
        row = env.task.rows[index]
        said = env.task.demonstration(row)
        gold = said if said and isinstance(said, str) else env.task.gold(row)
        for kind, text in (("gold", gold), ("garbage", GARBAGE)):
            if text is None:
                continue
            count = _group_size(env, settings)
            began = time.monotonic()
            results = _scored(env, guard, row, [text] * count, index)
            slowest = max(slowest, time.monotonic() - began)
            for result in results:
                if isinstance(result, Reward):
                    totals[kind].append(result.total)
                elif result.kind != "unjudgeable":
                    yield _failed(result, kind, deadline)
                    return
    yield _judged(totals, slowest, deadline, settings)


def _judged(totals: dict[str, list[float]], slowest: float, deadline: float, settings: Settings) -> Finding:
    means = {kind: sum(of) / len(of) for kind, of in totals.items() if of}
    earned = ", ".join(f"{kind} earns {mean:.3g}" for kind, mean in means.items())
    a_step = settings.env.num_envs * settings.env.repeats
    text = f"{earned or 'no row can be judged'}; the slowest call took {slowest:.2g} s of {deadline:g} s"
    if slowest > deadline / 2:
        return Finding("note", "rewards", f"{text}: a slower machine would be late; raise env.score_timeout_s")
    if slowest > 1:
        return Finding("note", "rewards", f"{text}, and a step scores {a_step} responses one after the other")
    if len(means) == 2 and means["gold"] <= means["garbage"]:
        return Finding("note", "rewards", f"{text}. The data's own response earns no more: does it have the format?")
    return Finding("OK" if means else "note", "rewards", text)


def _group_size(env: LLMEnv, settings: Settings) -> int:
    return settings.env.repeats if env.task.scores_group else 1


def _scored(env: LLMEnv, guard: ScoreGuard, row: dict, texts: Sequence[str], index: int) -> Sequence[Reward | Failure]:
    if not plays_turns(env.task):
        return guard.score(row, texts, f"row {index}")
    prompt = env.task.prompt(row)
    return guard.score_dialogs(
        row, [[*prompt, {"role": "assistant", "content": text}] for text in texts], f"row {index}"
    )


def _failed(failure: Failure, kind: str, deadline: float) -> Finding:
    if failure.kind == "timeout" and deadline > PATIENCE_S:
        text = f"more than {PATIENCE_S:g} s for a {kind} response, of env.score_timeout_s={deadline:g}"
        return Finding("note", "rewards", f"{text}: a step scores many")
    late = "; make it faster, or raise env.score_timeout_s" if failure.kind == "timeout" else ""
    return Finding("FIX", "rewards", f"on a {kind} response: {failure.message}{late}")


def env_of(case: Case) -> LLMEnv:
    """The run's environment, read once in a process."""
    key = case.read.as_json()
    if key not in _environments:
        tokenizer = load_tokenizer(source_of(case), case.read.model.chat_template)
        _environments[key] = make_env(case.read, tokenizer, tries=False)  # the check of rewards does more
    return _environments[key]
