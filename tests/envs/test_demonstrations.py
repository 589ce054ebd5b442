"""Demonstrations: the prompt's ids as GRPO has them, the response's as it would be sampled, and what is refused."""

import copy
import json

import pytest

from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.countdown import Countdown
from grpo_rl.envs.demonstrations import Demonstrations
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.prompt_response import PromptResponse
from grpo_rl.envs.spec import task_spec
from grpo_rl.policies.generation import load_tokenizer
from tests.envs.chat_templates import tokenizer_of

END = 0
GSM8K_ROWS = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(5)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


def demonstrations(task, tokenizer, ends=(END,), longest=(200, 50), **settings):
    return Demonstrations(task, tokenizer, ends, *longest, **settings)


def test_prompts_have_the_ids_of_the_environment_and_responses_those_of_the_text_and_the_end_of_turn(tokenizer):
    task = GSM8K(GSM8K_ROWS)
    env = LLMEnv(task, tokenizer, num_envs=5, repeats=2, max_prompt_tokens=200, seed=3)
    rows = demonstrations(task, tokenizer, seed=3)
    # The tiny model's template announces a new turn by a sign that it leaves out of earlier ones.
    assert rows.written_otherwise == [0, 1, 2, 3, 4]
    for prompt, group in zip(env.next_prompts(), rows.take(5), strict=True):
        assert (group.row, group.size) == (prompt.row, 1)
        assert group.prompt_ids.tolist() == prompt.ids.tolist()
        text = task.rows[group.row]["answer"]
        assert group.response_ids.tolist() == [*tokenizer(text)["input_ids"], END]


def test_a_template_that_writes_earlier_turns_alike_gives_the_ids_of_the_whole_conversation(tokenizer):
    same = copy.deepcopy(tokenizer)
    same.chat_template = same.chat_template.replace("{{ m", "{% if m['role'] == 'assistant' %}>{% endif %}{{ m")
    rows = demonstrations(GSM8K(GSM8K_ROWS), same)
    assert not rows.written_otherwise
    (group,) = rows.take(1)
    row = GSM8K_ROWS[group.row]
    whole = [*rows.task.prompt(row), {"role": "assistant", "content": row["answer"]}]
    written = same.apply_chat_template(whole, tokenize=True, return_dict=False)
    assert [*group.prompt_ids.tolist(), *group.response_ids.tolist()] == written


def test_chat_rows_of_every_task_are_imitated_as_the_loaders_give_them(tmp_path):
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "How much is 3 + 4?"}, {"role": "assistant", "content": r"\\boxed{7} #### 7"}]
    chat.write_text(json.dumps({"messages": turns}))
    for name in ("gsm8k", "math", "prompt_response"):
        task = task_spec(name).make_task(chat)
        assert task.demonstration(task.rows[0]) == turns[1]["content"], name
        assert task.prompt(task.rows[0])[-1] == turns[0], name


ASKED, SAID = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "two"}


@pytest.mark.parametrize("completion", ["two", ["two"], [{"role": "system", "content": "Add"}, ASKED, SAID]])
def test_a_column_of_completions_is_imitated(completion):
    row = {"prompt": "1 + 1?", "completion": completion}
    task = PromptResponse([row], completion_column="completion", system_prompt="Add")
    assert task.demonstration(row) == task.gold(row) == "two"


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ([SAID, ASKED, SAID], "messages of assistant, user, assistant behind the prompt"),  # a whole turn would be lost
        ([{"role": "user", "content": "2 + 2?"}, SAID], "messages of user, assistant behind"),  # of another question
        (["two", "2"], r"\['two', '2'\]"),
    ],
)
def test_a_completion_that_is_not_one_response_is_refused_with_its_row(completion, found, tokenizer):
    rows = [{"prompt": "1 + 1?", "completion": "two"}, {"prompt": "1 + 1?", "completion": completion}]
    with pytest.raises(ValueError, match=f"row 1: completion is {found}.*without env.completion_column"):
        demonstrations(PromptResponse(rows, completion_column="completion"), tokenizer)


CALL = {"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": 1}}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 1}}\n</tool_call><|im_end|>'),
        ("smollm2", '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 1}}\n</tool_call><|im_end|>'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1, "y": 1}, "id": "c00000000"}]</s>'),
    ],
)
def test_a_row_that_ends_in_a_call_teaches_the_call_as_the_template_writes_it(family, said):
    tokenizer = tokenizer_of(family)
    row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [ADD]}
    task = PromptResponse([row], prompt_column="messages")
    rows = Demonstrations(task, tokenizer, [tokenizer.eos_token_id], 2000, 500)
    (group,) = rows.take(1)
    assert tokenizer.decode(group.response_ids) == said
    assert '"name": "add"' in tokenizer.decode(group.prompt_ids)
    assert [tokenizer.decode(held.prompt_ids) for held in rows.groups([row])] == [tokenizer.decode(group.prompt_ids)]


def test_what_the_template_would_leave_out_of_a_demonstration_is_refused_with_its_row():
    tokenizer = tokenizer_of("llama3")  # it writes no content beside a call
    call = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
    task = PromptResponse([{"messages": [ASKED, call]}], prompt_column="messages")
    with pytest.raises(ValueError, match="row 0: the tokenizer's chat template leaves out 'I add.' of the message"):
        Demonstrations(task, tokenizer, [tokenizer.eos_token_id], 2000, 500)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: Countdown([{"numbers": [1, 2], "target": 3}]), "row 0: Countdown has no demonstration.*gsm8k"),
        (
            lambda: PromptResponse([{"prompt": "Hi", "to": "Ho"}, {"prompt": "Hi", "to": " "}], completion_column="to"),
            "the demonstration of row 1 is ' '; give it a text, or remove the row",
        ),
        (lambda: PromptResponse([{"m": [SAID]}], prompt_column="m"), "no question before"),
        # As data have it that a chat template was applied to: a policy would learn to end twice.
        (
            lambda: GSM8K([*GSM8K_ROWS, {"question": "1 + 1?", "answer": "2<end>and 3"}]),
            "of row 5 has '<end>' in its text, at which generation ends.*remove such",
        ),
    ],
)
def test_rows_without_anything_to_imitate_are_refused(task, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        demonstrations(task(), tokenizer)


def test_a_thought_that_the_prompt_begins_is_not_begun_twice(tokenizer):
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = thinking.chat_template.replace(
        "{% if add_generation_prompt %}>", "{% if add_generation_prompt %}><think>\n"
    )
    assert thinking.chat_template != tokenizer.chat_template
    for text, rest in (("<think>\n1 + 1</think>2", "1 + 1</think>2"), ("<think>1</think>2", "1</think>2"), ("2", "2")):
        task = GSM8K([{"question": "1 + 1?", "answer": text}])
        (group,) = demonstrations(task, thinking).take(1)
        assert thinking.decode(group.prompt_ids).endswith("<think>\n")
        assert group.response_ids.tolist() == [*thinking(rest)["input_ids"], END]
        (group,) = demonstrations(task, tokenizer).take(1)
        assert group.response_ids.tolist() == [*tokenizer(text)["input_ids"], END]


def test_the_end_is_the_templates_where_generation_stops_there_and_otherwise_generations_own(tokenizer):
    letter = tokenizer("z")["input_ids"][0]
    assert demonstrations(GSM8K(GSM8K_ROWS), tokenizer, ends=(letter, END)).end == END
    assert demonstrations(GSM8K(GSM8K_ROWS), tokenizer, ends=(letter,)).end == letter
    with pytest.raises(ValueError, match="no end of sequence"):
        demonstrations(GSM8K(GSM8K_ROWS), tokenizer, ends=())
