import json

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

from grpo_rl.data import keys
from grpo_rl.envs.base import LLMEnv, Messages, Reward, Task
from tests.envs.scoring import policy_of


class Letters(Task):
    """Row i asks for i letters; a response earns 1 a letter, and 0.5 where it has the number asked for."""

    reward_parts = ("letters", "exact")

    def __init__(self, rows: int = 5) -> None:
        self.rows = [{"count": i} for i in range(rows)]

    def prompt(self, row: dict) -> Messages:
        return [{"role": "user", "content": "x" * row["count"]}]

    def score(self, row: dict, response: str) -> Reward:
        return Reward({"letters": float(len(response)), "exact": 0.5 * (len(response) == row["count"])})


class Broken(Letters):
    def score(self, row: dict, response: str) -> Reward:
        if row["count"] == 3:
            raise KeyError("gold")
        return super().score(row, response)


def responding(tokenizer, texts: list[str]):
    """A policy that gives each row of the batch its text and ends it."""

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        for row, text in zip(tensordict.unbind(0), texts, strict=True):
            row[keys.TOKENS_RESPONSE] = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        return tensordict

    return policy


def column(rollout: TensorDictBase, key) -> list:
    return [row[key].flatten().tolist() for row in rollout[:, 0].unbind(0)]


@pytest.mark.parametrize("break_when_any_done", [True, False])
def test_it_keeps_torchrls_contract_with_prompts_of_different_lengths(tokenizer, break_when_any_done):
    check_env_specs(LLMEnv(Letters(), tokenizer, 3, 2), seed=0)
    check_env_specs(LLMEnv(Letters(), tokenizer, 3, 2), break_when_any_done=break_when_any_done)


def test_a_rollout_asks_each_prompt_repeats_times_and_pays_every_response(tokenizer):
    env = LLMEnv(Letters(3), tokenizer, num_envs=2, repeats=2)
    first, second = env.next_prompts()
    env.set_seed(0)
    rollout = env.rollout(max_steps=1, policy=responding(tokenizer, ["", "a", "aa", "aaa"]))

    assert rollout.batch_size == (4, 1)
    assert column(rollout, keys.ROW) == [[first.row], [first.row], [second.row], [second.row]]
    assert column(rollout, keys.GROUP_ID) == [[2], [2], [3], [3]]
    assert rollout[0, 0][keys.QUERY] == "x" * first.row
    assert tokenizer.decode(rollout[2, 0][keys.TOKENS_PROMPT]) == f"user: {'x' * second.row}\nassistant:"
    # The end token is sampled and trained on, but is no letter.
    assert column(rollout, keys.TOKENS_RESPONSE)[1][1:] == [tokenizer.eos_token_id]
    letters, exact = [0.0, 1.0, 2.0, 3.0], [0.5 * (n == row) for n, [row] in enumerate(column(rollout, keys.ROW))]
    assert column(rollout, ("next", *keys.REWARD_PARTS, "letters")) == [[x] for x in letters]
    assert column(rollout, ("next", *keys.REWARD_PARTS, "exact")) == [[x] for x in exact]
    assert rollout[keys.REWARD].flatten().tolist() == [a + b for a, b in zip(letters, exact, strict=True)]
    assert rollout["next", "done"].all() and rollout["next", "terminated"].all()


def test_a_prompt_is_tokenised_once_however_often_it_is_repeated(tokenizer, monkeypatch):
    written, apply = [], type(tokenizer).apply_chat_template

    def counted(self, conversations, **options):
        written.extend(conversations)
        return apply(self, conversations, **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    LLMEnv(Letters(), tokenizer, num_envs=3, repeats=16).reset()
    assert len(written) == 3


def test_every_row_comes_once_an_epoch_in_an_order_of_the_seed(tokenizer):
    def rows(seed: int, epochs: int = 2) -> list[int]:
        env = LLMEnv(Letters(40), tokenizer, num_envs=10, repeats=2, seed=seed)
        return [prompt.row for _ in range(4 * epochs) for prompt in env.next_prompts()]

    first = rows(0)
    assert sorted(first[:40]) == sorted(first[40:]) == list(range(40))
    assert first[:40] != first[40:]
    assert rows(0) == first
    # Seeds are apart in every epoch: seed 1 does not begin with seed 0's second epoch.
    assert rows(1)[:40] not in (first[:40], first[40:])


@pytest.mark.parametrize("used", [0, 1, 2, 7])
def test_a_restored_environment_asks_the_same_next_prompts(tokenizer, used):
    env = LLMEnv(Letters(5), tokenizer, num_envs=3, repeats=2, seed=7)
    for _ in range(used):
        env.next_prompts()
    state = json.loads(json.dumps(env.state_dict()))
    restored = LLMEnv(Letters(5), tokenizer, num_envs=3, repeats=2, seed=0)
    restored.load_state_dict(state)
    for _ in range(6):
        for expected, prompt in zip(env.next_prompts(), restored.next_prompts(), strict=True):
            assert (prompt.group_id, prompt.row, prompt.query) == (expected.group_id, expected.row, expected.query)
            assert prompt.ids.tolist() == expected.ids.tolist()


def test_a_position_in_other_data_is_refused(tokenizer):
    state = LLMEnv(Letters(5), tokenizer, 2, 2).state_dict()
    with pytest.raises(ValueError, match="5 rows then, 4 now"):
        LLMEnv(Letters(4), tokenizer, 2, 2).load_state_dict(state)
    reordered = Letters(5)
    reordered.rows = reordered.rows[::-1]
    with pytest.raises(ValueError, match="other content"):
        LLMEnv(reordered, tokenizer, 2, 2).load_state_dict(state)


def test_a_failing_scorer_is_named_and_never_a_zero(tokenizer):
    env = LLMEnv(Broken(), tokenizer, 2, 2)
    env.guard.tell = lambda _: None
    ends = [env.rollout(max_steps=1, policy=responding(tokenizer, ["a"] * 4))["next"] for _ in range(3)]
    rows = [row for end in ends for row in end[:, 0].unbind(0)]
    failed = [row for row in rows if row[keys.ROW].item() == 3]
    assert len(failed) >= 2 and all(row["reward"].isnan() and row["done"] for row in failed)
    assert [bool(row[keys.FAILED]) for row in rows] == [row[keys.ROW].item() == 3 for row in rows]
    verdict = failed[0][keys.HISTORY].verdict
    assert verdict.kind == "error" and "Broken failed on row 3: KeyError: 'gold'" in verdict.message


# A prompt is "user: " + i letters + "\nassistant:": 17 + i bytes, so rows 0 and 1 have 17 and 18 tokens.
def test_long_prompts_are_refused_or_skipped_and_counted_once_and_the_same_come_where_they_are_checked(tokenizer):
    LLMEnv(Letters(5), tokenizer, 2, 2, max_prompt_tokens=21).check_prompts()
    with pytest.raises(ValueError, match=r"row 3 has 20 tokens, 19 fit.*env\.long_prompt=skip"):
        LLMEnv(Letters(5), tokenizer, 2, 2, max_prompt_tokens=19).check_prompts()
    envs = [LLMEnv(Letters(5), tokenizer, 2, 2, max_prompt_tokens=19, long_prompt="skip") for _ in range(2)]
    envs[1].check_prompts()
    assert envs[1].skipped == 2
    first, second = ([prompt.row for _ in range(6) for prompt in env.next_prompts()] for env in envs)
    assert first == second and len(first) == 12 and set(first) == {0, 1, 2}
    assert [env.skipped for env in envs] == [2, 2]


@pytest.mark.parametrize("call", [LLMEnv.check_prompts, LLMEnv.next_prompts])
def test_data_of_long_prompts_only_is_refused_not_searched_for_ever(tokenizer, call):
    env = LLMEnv(Letters(3), tokenizer, 2, 2, max_prompt_tokens=5, long_prompt="skip")
    with pytest.raises(ValueError, match="all 3 prompts are longer than 5 tokens"):
        call(env)


class Talking(Letters):
    """Says "go on" to responses of fewer than three letters; the whole conversation is worth its letters."""

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        return [{"role": "user", "content": "go on"}] if len(messages[-1]["content"]) < 3 else None

    def score_dialog(self, row: dict, messages: Messages) -> Reward:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return Reward({"letters": float(len("".join(said))), "exact": 0.0})


def test_a_conversation_goes_on_in_the_next_step_until_all_of_the_batch_are_over(tokenizer):
    env = LLMEnv(Talking(), tokenizer, 1, 2, max_turns=3)
    first = env.reset()
    prompt = first[0][keys.TOKENS_PROMPT]
    second = env.step(responding(tokenizer, ["abc", "a"])(first))["next"]
    assert second["done"].flatten().tolist() == [True, False]
    assert second["reward"].flatten().tolist() == [3.0, 0.0]
    # What was sampled stays, id by id; behind it comes what the template writes around the reply.
    said, reply = (tokenizer(text)["input_ids"] for text in ("a", "\nuser: go on\nassistant:"))
    expected = [*prompt.tolist(), *said, tokenizer.eos_token_id, *reply]
    assert second[1][keys.TOKENS_PROMPT].tolist() == expected
    third = env.step(responding(tokenizer, ["ignored", "abcd"])(second))["next"]
    assert third["done"].all() and third["reward"].flatten().tolist() == [0.0, 5.0]


@pytest.mark.slow
def test_torchrls_own_collector_gets_conversations_in_complete_groups(tokenizer):
    env = LLMEnv(Talking(2), tokenizer, num_envs=2, repeats=2, max_turns=2)
    policy, groups = policy_of(tokenizer, lambda prompt, g: "ab"[: 1 + g]), []
    collector = Collector(env, policy, frames_per_batch=8, total_frames=16, use_buffers=False)
    try:
        for batch in collector:
            assert batch.batch_size == (4, 2)
            groups += [int(turn[keys.GROUP_ID]) for turn in batch[:, 1].unbind(0)]
            for first, second in (conversation.unbind(0) for conversation in batch.unbind(0)):
                before = torch.cat([first[keys.TOKENS_PROMPT], first[keys.TOKENS_RESPONSE]])
                assert torch.equal(second[keys.TOKENS_PROMPT][: len(before)], before)
                assert not first["next", "done"].item() and second["next", "done"].item()
                said = [env.decode(turn[keys.TOKENS_RESPONSE]) for turn in (first, second)]
                assert [turn["next", "reward"].item() for turn in (first, second)] == [0, len("".join(said))]
    finally:
        collector.shutdown()
    assert groups == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_part_of_a_batch_cannot_be_reset_alone(tokenizer):
    env = LLMEnv(Letters(), tokenizer, 1, 2)
    reset = env.reset()
    reset["_reset"] = torch.tensor([[True], [False]])
    with pytest.raises(ValueError, match="begin at the same time"):
        env.reset(reset)


CALL = {"id": "x", "type": "function", "function": {"name": "spell", "arguments": "{}"}}


class Spelling(Letters):
    tools = ({"name": "spell", "description": "Spells.", "parameters": {"type": "object", "properties": {}}},)

    def reply(self, row: dict, messages: Messages) -> Messages | None:
        return [{"role": "tool", "content": "ok"}] if messages[-1].get("tool_calls") else None


class OwnParser:
    """Fails at "boom", finds no text beside the calls of "none", and a call without a function in "odd"."""

    def __init__(self, tokenizer, schemas): ...

    def parse(self, text):
        if text == "boom":
            raise KeyError("name")
        calls = {"none": [CALL], "odd": [{"type": "function"}], "named": [CALL | {"function": {"name": "spell"}}]}
        return (None if text == "none" else text), calls.get(text, [])


def test_a_turn_that_a_parser_of_ones_own_fails_at_is_text_and_the_first_failure_is_reported(tokenizer):
    env, told = LLMEnv(Spelling(), tokenizer, 2, 2, tool_parser=OwnParser, max_failed_fraction=0.0), []
    env.guard.tell = told.append
    texts = ["boom", "none", "odd", "named"]
    first = env.step(responding(tokenizer, texts)(env.reset()))["next"]
    assert first["done"].flatten().tolist() == [True, False, True, True]  # calls alone are replied to
    assert column(first.unsqueeze(1), keys.REWARD_PARTS + ("letters",))[::2] == [[4.0], [3.0]]
    assert first[1][keys.HISTORY].text == "spell({})\n\nok"
    (text,) = told
    assert text.startswith("The parser of env.tool_parser failed, on boom: KeyError: 'name' (") and __file__ in text
