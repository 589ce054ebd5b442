"""Checks of the data and the reward: rows and prompts, and what gold and garbage earn within the scorer's deadline."""

from collections.abc import Iterator
from dataclasses import replace

from grpo_rl.assembly.environment import eval_rows, eval_tasks, make_env
from grpo_rl.checks.check import Case, Finding
from grpo_rl.checks.model import source_of
from grpo_rl.envs.base import LLMEnv, Reward
from grpo_rl.policies.generation import load_tokenizer
from grpo_rl.settings.derived import total_steps

ROWS = 4
"""Rows whose responses are scored."""
GARBAGE = "qwrt zxcv ~~ <<>> 000 \\boxed{ ####"
"""A garbage response, and one that is hard to parse."""
MANY_PASSES = 20

_environments: dict[str, LLMEnv] = {}


def dataset(case: Case) -> Iterator[Finding]:
    """Reads all rows, tokenises all prompts, and compares their number with the run's steps."""
    settings, env = case.read, env_of(case)
    held_out = len(eval_rows(settings, env))
    eval_tasks(settings, env.tokenizer, env)
    rows, steps, groups = len(env.task.rows) - env.skipped, total_steps(settings), settings.env.num_envs
    passes = steps * groups / rows
    text = f"{rows:,} rows"
    text += f" ({env.skipped} of {len(env.task.rows)} are too long and left out)" if env.skipped else ""
    text += f"; {steps:,} steps of {groups} prompts see "
    text += f"each {passes:.2g} times" if passes >= 1 else f"{steps * groups:,} of them"
    text += f"; {held_out} held out" if held_out else "; none held out (evaluate.rows=0)"
    if passes > MANY_PASSES:
        text += ". That often: expect it to learn them by heart, and watch the held-out reward"
    yield Finding("note" if passes > MANY_PASSES else "OK", "dataset", text)


def rewards(case: Case) -> Iterator[Finding]:
    """Scores gold and garbage responses to the first rows, each within the scorer's deadline."""
    whole = env_of(case)
    for name, env in (whole.members or {"": whole}).items():
        finding = _rewards(env, case.read.env.repeats if env.task.scores_group else 1)
        yield replace(finding, text=f"{name}: {finding.text}") if name else finding


def _rewards(env: LLMEnv, size: int) -> Finding:
    guard = env.guard.apart()  # has no limit of failures
    guard.tell = lambda _: None  # shown as a line of the report
    totals: dict[str, list[float]] = {"gold": [], "garbage": []}
    for index in range(min(ROWS, len(env.task.rows))):
        row = env.task.rows[index]
        demonstration = env.task.demonstration(row)
        gold = demonstration if demonstration and isinstance(demonstration, str) else env.task.gold(row)
        for kind, text in (("garbage", GARBAGE), ("gold", gold)):
            dialog = [*env.task.prompt(row), {"role": "assistant", "content": text}]
            for result in guard.score_dialogs(row, [dialog] * size, f"row {index}") if text is not None else ():
                if isinstance(result, Reward):
                    totals[kind].append(result.total)
                elif result.kind != "unjudgeable":
                    late = "; make it faster, or raise env.score_timeout_s" if result.kind == "timeout" else ""
                    return Finding("FIX", "rewards", f"on a {kind} response: {result.message}{late}")
    means = {kind: sum(of) / len(of) for kind, of in totals.items() if of}
    text = ", ".join(f"{kind} earns {mean:.3g}" for kind, mean in means.items()) or "no row can be judged"
    if len(means) == 2 and means["gold"] <= means["garbage"]:
        return Finding("note", "rewards", f"{text}. The data's own response earns no more: does it have the format?")
    return Finding("OK" if means else "note", "rewards", f"{text}; each call within {env.guard.deadline_s:g} s")


def env_of(case: Case) -> LLMEnv:
    """The run's environment, read once in a process."""
    key = case.read.as_json()
    if key not in _environments:
        tokenizer = load_tokenizer(source_of(case), case.read.model)
        _environments[key] = make_env(case.read, tokenizer, tries=False)  # the check of rewards does more
    return _environments[key]
