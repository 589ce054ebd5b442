from __future__ import annotations

from omegaconf import OmegaConf

from grpo_rl.envs.rewards.registry import read_parts


def test_weights_and_settings_come_from_a_config():
    config = OmegaConf.create(
        {
            "format": 0.5,
            "tag_count": None,
            "cosine": {"weight": 2, "max_len": 80, "unit": "tokens", "correct": "exact"},
            "repetition_penalty": {"ngram_size": 4},
        }
    )
    form, cosine, repetition = read_parts(config)
    assert (form.name, form.weight, form.settings, form.unit) == ("format", 0.5, {}, "characters")
    assert (cosine.weight, cosine.settings, cosine.unit, cosine.correct) == (2.0, {"max_len": 80}, "tokens", "exact")
    assert (repetition.weight, repetition.settings) == (1.0, {"ngram_size": 4})


def test_what_is_asked_for_is_what_is_computed():
    cosine, overlong, length = read_parts(
        {"cosine": {"max_len": 10}, "soft_overlong_punishment": {"max_len": 10, "cache": 5}, "length": 1}
    )
    inputs = {"length": [0, 10], "correct": [True, False]}
    assert cosine.values(inputs, 2) == [1.0, -0.5]
    assert overlong.values(inputs, 2) == [0.0, -1.0]
    assert overlong.unit == "tokens"
    assert length.values(inputs, 2) == [0.5, -0.5]
