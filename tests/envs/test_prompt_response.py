import json

import pytest

from grpo_rl.envs.base import LLMEnv, ScoreGuard
from grpo_rl.envs.prompt_response import PromptResponse
from grpo_rl.envs.rewards.combined import with_rewards
from grpo_rl.envs.task import Reward, Unjudgeable
from tests.envs.chat_templates import tokenizer_of

EXAMPLES = "grpo_rl.envs.rewards.examples"
LENGTH, ENDING = f"{EXAMPLES}:reward_len", f"{EXAMPLES}:sentence_ending"
ROWS = [
    {"prompt": "Say hi.", "completion": "Hi.", "topic": "hello"},
    {"prompt": "Say bye.", "completion": "Bye.", "topic": "parting"},
]
CHAT = [{"role": "user", "content": "Say hi."}]


def exact(completion, reference, **columns):
    return [float(text == gold) for text, gold in zip(completion, reference, strict=True)]


def test_named_functions_and_others_judge_together_by_their_weights():
    weighted = PromptResponse(ROWS, reward={LENGTH: 0.5, exact: 3, ENDING: 0.0}, completion_column="completion")
    assert weighted.reward_parts == ("reward_len", "exact", "sentence_ending")
    assert weighted.score(ROWS[0], "Hi.").parts == {"reward_len": -8.5, "exact": 3.0, "sentence_ending": 0.0}


def test_a_function_gets_what_the_data_has():
    seen = {}

    def own(prompt, completion, reference, topic, **columns):
        seen.update(columns, prompt=prompt, completion=completion, reference=reference, topic=topic)
        return [0.0, 0.0]

    task = PromptResponse([ROWS[0]], reward=own, completion_column="completion")
    task.score_many([ROWS[0]] * 2, ["a", "b"])
    assert seen == {
        "prompt": ["Say hi."] * 2, "completion": ["a", "b"], "reference": ["Hi."] * 2, "topic": ["hello"] * 2,
        "prompts": ["Say hi."] * 2, "completions": ["a", "b"],
    }  # fmt: skip
    # Of messages a completion is one, too, as in TRL.
    chat = PromptResponse([{"prompt": CHAT}], reward=lambda completions: [float(len(completions[0][0]["content"]))])
    assert chat.score(chat.rows[0], "four").total == 4.0


def test_a_column_that_some_rows_lack_is_no_column():
    rows = [*ROWS, {"prompt": "Nod.", "completion": "."}]
    task = PromptResponse(rows, reward=lambda completion, **columns: [float("topic" in columns)] * len(completion))
    assert task.score(rows[0], "Hi.").total == 0.0
    with pytest.raises(ValueError, match="asks for topic, and what it can get by name is completion.*of all rows"):
        PromptResponse(rows, reward=lambda completion, topic: [])


def test_prompts_may_be_texts_or_sentences_or_messages():
    rows = [{"ask": "Sum up."}, {"ask": ["One.", "Two."]}, {"ask": [{**CHAT[0], "name": None}]}]
    task = PromptResponse(rows, reward=LENGTH, prompt_column="ask", system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert [task.prompt(row) for row in rows] == [
        [system, {"role": "user", "content": "Sum up."}],
        [system, {"role": "user", "content": "One. Two."}],
        [system, {"role": "user", "content": "Say hi."}],
    ]
    own = {"ask": [{"role": "system", "content": "Rhyme."}, *CHAT]}
    assert task.prompt(own) == own["ask"]


@pytest.mark.parametrize(
    ("response", "gold"),
    [("Hi.", "Hi."), (["Hi.", "Hello."], "Hi."), ([{"role": "assistant", "content": "Hi."}], "Hi."), (7, "7"),
     (None, None)],
)  # fmt: skip
def test_the_datas_own_response_is_there_for_logs(response, gold):
    row = {"prompt": "Say hi.", "best": response}
    assert PromptResponse([row], reward=LENGTH, completion_column="best").gold(row) == gold
    assert PromptResponse([row], reward=LENGTH).gold(row) is None


KINDS = [{"prompt": "1 + 1?", "kind": "math"}, {"prompt": "print", "kind": "code"}, {"prompt": "Hi", "kind": "chat"}]


def of(own, value):
    """TRL's routing: a function that judges the rows of one kind."""

    def reward(completion, kind):
        return [value * len(text) if each == own else None for text, each in zip(completion, kind, strict=True)]

    reward.__name__ = own
    return reward


def test_none_of_one_function_is_no_part_of_the_sum_and_of_all_is_not_judged():
    task = PromptResponse(KINDS, reward={of("math", 1.0): 2.0, of("code", -1.0): 0.5})
    math, code, chat = task.score_many(KINDS, ["xx", "xxx", "x"])
    assert (math, code) == (Reward({"math": 4.0}), Reward({"code": -1.5})) and (math.total, code.total) == (4.0, -1.5)
    assert isinstance(chat, Unjudgeable)
    guard = ScoreGuard(task, 5.0, 1.0)
    assert [guard.score(row, ["xx", "x"], "row") for row in KINDS[:2]] == [
        [Reward({"math": 4.0}), Reward({"math": 2.0})], [Reward({"code": -1.0}), Reward({"code": -0.5})],
    ]  # fmt: skip
    assert [result.kind for result in guard.score(KINDS[2], ["x"], "row 2")] == ["unjudgeable"]


def test_added_rewards_judge_what_no_function_judges():
    task = with_rewards(PromptResponse(KINDS, reward=[of("math", 1.0)]), {"tag_count": 2.0})
    rewards = ScoreGuard(task, 5.0, 1.0).score(KINDS[1], ["<think>\n"], "row 1")
    assert rewards == [Reward({"tag_count": 0.5})]
    assert ScoreGuard(task, 5.0, 1.0).score(KINDS[0], ["xx"], "row 0") == [Reward({"math": 2.0, "tag_count": 0.0})]


CALL = {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": None}}}
KEPT = {**CALL, "function": {"name": "add", "arguments": {"x": 1}}}
CALLS = [
    {"role": "user", "content": "1 + 1?", "name": "Kim"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I add."},
    {"role": "tool", "content": "2", "tool_call_id": "c00000000", "name": "add", "tool_calls": None},
]
KEPT_CALLS = [
    CALLS[0],
    {"role": "assistant", "content": "", "tool_calls": [KEPT], "reasoning_content": "I add."},
    {"role": "tool", "content": "2", "tool_call_id": "c00000000", "name": "add"},
]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def test_all_that_messages_have_but_nulls_is_kept_for_the_chat_template():
    seen = []

    def own(prompts):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    task = PromptResponse([{"prompt": CALLS}], reward=own)
    assert task.prompt(task.rows[0]) == KEPT_CALLS
    task.score(task.rows[0], "2")
    assert seen == [KEPT_CALLS]


def test_a_message_that_says_more_than_its_content_is_the_demonstration():
    row = {"messages": CALLS[:2]}
    task = PromptResponse([row], prompt_column="messages")
    assert (task.prompt(row), task.demonstration(row)) == (KEPT_CALLS[:1], KEPT_CALLS[1])
    row = {"prompt": "1 + 1?", "completion": CALLS[1:2]}
    task = PromptResponse([row], completion_column="completion")
    assert task.demonstration(row) == KEPT_CALLS[1] and '"name": "add"' in task.gold(row)
    row = {"prompt": [{**CALLS[1], "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}, CALLS[0]]}
    with pytest.raises(ValueError, match=r"row 0: prompt: the arguments '\[1\]' of a call"):
        PromptResponse([row], reward=LENGTH)


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD]), [{"type": "function", "function": ADD, "strict": None}]])
def test_a_rows_own_tools_are_shown_in_its_prompt_and_in_no_others(tools):
    tokenizer = tokenizer_of("qwen3")
    task = PromptResponse([{"prompt": "1 + 1?", "tools": tools}, {"prompt": "Hi", "tools": None}], reward=LENGTH)
    first, second = sorted(LLMEnv(task, tokenizer, 2, 2).next_prompts(), key=lambda prompt: prompt.row)
    schema = {"type": "function", "function": ADD}
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], tools=[schema], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(first.ids) == expected and '"name": "add"' in expected
    assert tokenizer.decode(second.ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_without_tools_gets_tools_and_calls_as_text():
    tokenizer = tokenizer_of("smollm2")
    task = PromptResponse([{"prompt": [*CALLS, CALLS[0]]}, {"prompt": CALLS, "tools": [ADD]}], reward=LENGTH)
    without, shown = sorted(LLMEnv(task, tokenizer, 2, 2).next_prompts(), key=lambda prompt: prompt.row)
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in tokenizer.decode(without.ids)
    assert "<tools>" not in tokenizer.decode(without.ids)
    text = tokenizer.decode(shown.ids)
    assert f"<tools>\n{json.dumps({'type': 'function', 'function': ADD})}\n</tools>" in text and call in text


OWN = """
import os, re

calls = []

def freezes(completion):
    calls.append(1)
    if "freeze" in completion:  # in one call that keeps the interpreter to itself
        re.match(r"(a+)+$", "a" * 40 + "b")
    if "die" in completion:
        os._exit(3)
    return [float(len(calls))] * len(completion)
"""


@pytest.mark.slow
def test_a_named_function_that_freezes_costs_its_group_and_not_the_run(written_module):
    row, told = {"prompt": "Hi"}, []
    guard = ScoreGuard(PromptResponse([row], reward=f"{written_module('own_frozen', OWN)}:freezes"), 1.0, 1.0)
    guard.tell = told.append
    assert [reward.total for reward in guard.score(row, ["a", "b"], "row 1")] == [1.0, 1.0]
    assert guard.score(row, ["a"], "row 1")[0].total == 2.0  # its process keeps what it keeps
    assert [result.kind for result in guard.score(row, ["a", "freeze"], "row 2")] == ["timeout", "timeout"]
    assert [result.kind for result in guard.score(row, ["die"], "row 3")] == ["error"]
    assert guard.score(row, ["a"], "row 4")[0].total == 1.0  # another process
    assert len(told) == 2 and "own_frozen:freezes gave no result within 1 s" in told[0] and "row 2" in told[0]
    assert "exit code 3" in told[1] and "row 3" in told[1]
