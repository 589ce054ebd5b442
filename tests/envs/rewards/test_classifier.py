"""The classifier's reward is what the model gives by itself, on the device of the plan."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.gsm8k import GSM8K
from grpo_rl.envs.rewards.classifier import Classifier
from tests.envs.scoring import scored

TEXTS = ["yes", "no, never", "yes", "", "a much longer response than the others"]
QUESTIONS = ["Is it?"] * 5


def save(tokenizer, folder, kind, labels):
    """A random classifier of two layers, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "num_labels": labels, "pad_token_id": None}
    sizes["initializer_range"] = 0.5  # so that texts have values of their own
    if kind == "bert":
        tokenizer.chat_template = None
        config = transformers.BertConfig(**sizes | {"pad_token_id": 0})
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, head_dim=16)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "bert":  # which tells its two texts apart
        file = folder / "tokenizer_config.json"
        names = ["input_ids", "token_type_ids", "attention_mask"]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_input_names": names}))
    return str(folder)


def alone(folder, question, text, limit=64):
    """The logits of one text, by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        shown = tokenizer.apply_chat_template(chat, tokenize=False)
        inputs = {"input_ids": tokenizer(shown, add_special_tokens=False, return_tensors="pt")["input_ids"][:, :limit]}
    else:
        inputs = tokenizer(question, text, return_tensors="pt")
        assert inputs["token_type_ids"].unique().tolist() == [0, 1][: 1 + bool(text)]
    with torch.no_grad():
        return model.eval()(**inputs).logits[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_value_is_the_logit_of_a_forward_pass_by_itself(tokenizer, tmp_path, kind):
    folder = save(tokenizer, tmp_path / "model", kind, 1)
    values = Classifier(name=folder)(QUESTIONS, TEXTS)
    expected = [alone(folder, q, text).item() for q, text in zip(QUESTIONS, TEXTS, strict=True)]
    assert values == pytest.approx(expected, abs=1e-5) and len({round(value, 3) for value in values}) == 4
    squashed = Classifier(name=folder, sigmoid=True)(QUESTIONS, TEXTS)
    assert squashed == pytest.approx(torch.tensor(expected).sigmoid().tolist(), abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("label", ["LABEL_2", 2])
def test_of_several_labels_one_has_its_probability(tokenizer, tmp_path, label):
    folder = save(tokenizer, tmp_path / "model", "llama", 3)
    values = Classifier(name=folder, label=label, batch=1)(QUESTIONS, TEXTS)
    expected = [alone(folder, q, text).softmax(-1)[2].item() for q, text in zip(QUESTIONS, TEXTS, strict=True)]
    assert values == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="has the labels LABEL_0, LABEL_1, LABEL_2; choose one"):
        Classifier(name=folder, label="good").place("cpu")


def test_what_is_longer_than_the_model_takes_is_cut_and_counted(tokenizer, tmp_path):
    folder = save(tokenizer, tmp_path / "model", "llama", 1)
    classifier = Classifier(name=folder, max_tokens=20)
    (value,) = classifier(["Is it?"], ["x" * 100])
    assert value == pytest.approx(alone(folder, "Is it?", "x" * 100, 20).item(), abs=1e-5)
    assert classifier.counts() == {"reward_model/scored": 1, "reward_model/truncated": 1}
    classifier.restore({"reward_model/scored": 41.0})
    classifier(["Is it?"], ["x"])
    assert classifier.counts() == {"reward_model/scored": 42, "reward_model/truncated": 1}


def test_any_task_can_have_a_classifier(tokenizer, tmp_path):
    task = GSM8K([{"question": "Is it?", "answer": "#### 1"}], system_prompt=None)
    folder = save(tokenizer, tmp_path / "model", "llama", 1)
    env = LLMEnv(task, tokenizer, 1, 2, rewards={"model": {"name": folder, "weight": 0.5}})
    env.task.place(torch.device("cpu"))
    results = scored(env, 0, ["yes", "no"])
    expected = [0.5 * alone(folder, "Is it?", text).item() for text in ("yes", "no")]
    assert [result.parts["model"] for result in results] == pytest.approx(expected, abs=1e-5)
    assert env.metrics()["reward_model/scored"] == 2
