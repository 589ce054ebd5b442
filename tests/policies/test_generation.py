"""Generation configs that transformers reads and would not write again, as of Llama 2 and Vicuna."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_rl.envs.chat import encode_prompts, encode_reply
from grpo_rl.policies.generation import end_ids, leave_out_ignored, load_tokenizer
from grpo_rl.policies.loading import check_written, load_whole
from grpo_rl.run.export import export
from grpo_rl.testing import save_tiny_model
from tests.envs.chat_templates import QWEN3

VICUNA = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False, "temperature": 0.9, "top_p": 0.6}


@pytest.fixture
def model(tmp_path):
    return save_tiny_model(tmp_path / "model")


def says(model, text):
    (model / "generation_config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return model


@pytest.mark.parametrize(
    ("entries", "ignored"),
    [
        (VICUNA, {"temperature", "top_p"}),
        ({"do_sample": True, "temperature": 0.9, "top_p": 0.6}, set()),
        ({"length_penalty": 2.0, "early_stopping": True}, {"length_penalty", "early_stopping"}),
        ({"use_cache": False, "cache_implementation": "static"}, {"cache_implementation"}),
    ],
)
def test_what_transformers_ignores_is_left_out_and_the_rest_can_be_written_as_it_was(tmp_path, entries, ignored):
    config = GenerationConfig.from_dict(entries)
    assert set(leave_out_ignored(config)) == ignored
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: written[name] for name in entries if name not in ignored} == {
        name: value for name, value in entries.items() if name not in ignored
    }
    assert not ignored & {name for name, value in written.items() if value is not None}


def test_a_model_with_such_a_config_is_written_and_stops_where_it_did(model, tmp_path):
    tokenizer = load_tokenizer(says(model, VICUNA))
    assert check_written(model, tokenizer) == ["temperature", "top_p"]
    export(load_whole(model, dtype=torch.bfloat16), tokenizer, tmp_path / "written")
    assert end_ids(tmp_path / "written") == end_ids(model) == (0,)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "written").generation_config.do_sample is False


def test_values_of_the_chat_templates_variables_hold_in_all_prompts_and_in_the_saved_model(model, tmp_path):
    question = [{"role": "user", "content": "2 + 3?"}]
    plain = load_tokenizer(model, {"chat_template": QWEN3})
    quiet = load_tokenizer(model, {"chat_template": QWEN3, "chat_template_kwargs": {"enable_thinking": False}})
    shutil.copytree(model, tmp_path / "saved")
    quiet.save_pretrained(tmp_path / "saved")
    expected = plain.apply_chat_template(question, add_generation_prompt=True, return_dict=False, enable_thinking=False)
    assert plain.decode(expected).endswith("<think>\n\n</think>\n\n")
    for tokenizer in (quiet, load_tokenizer(tmp_path / "saved")):
        assert encode_prompts(tokenizer, [question]) == [expected]
        reply = encode_reply(tokenizer, [{"role": "tool", "content": "5"}])
        assert tokenizer.decode(reply).endswith("<think>\n\n</think>\n\n")
    assert encode_prompts(plain, [question]) == encode_prompts(
        load_tokenizer(tmp_path / "saved", {"chat_template_kwargs": {"enable_thinking": True}}), [question]
    )
    with pytest.raises(ValueError, match=r"model\.chat_template_kwargs: .* has no variable thinking"):
        load_tokenizer(model, {"chat_template": QWEN3, "chat_template_kwargs": {"thinking": False}})
    with pytest.raises(ValueError, match="the chat template can't be read"):
        load_tokenizer(model, {"chat_template": "{% if %}", "chat_template_kwargs": {"thinking": False}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ({"early_stopping": "perhaps"}, "`early_stopping` must be a boolean or 'never', but is perhaps"),
        ('{"eos_token_id": 0', "not a valid JSON file"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_file_and_entry(model, text, told):
    says(model, text)
    for read in (load_tokenizer, end_ids):
        with pytest.raises(ValueError, match=rf"generation_config\.json makes no sense .*{told}.*; correct it or"):
            read(model)
