from __future__ import annotations

import math

import pytest
from omegaconf import OmegaConf

from grpo_rl.envs.rewards.registry import REWARDS, read_parts


def test_open_r1s_names_are_known():
    assert set(REWARDS) >= {
        "accuracy", "format", "tag_count", "reasoning_steps", "length", "cosine", "repetition_penalty",
        "soft_overlong_punishment", "code_format",
    }  # fmt: skip


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cosin": 1.0}, r"env\.rewards\.cosin is unknown; it can be accuracy, .*; did you mean cosine\?"),
        ({"format": "1.0"}, r"env\.rewards\.format\.weight='1\.0'; a weight is a finite number"),
        ({"format": True}, "weight=True; a weight is"),
        ({"format": {"weight": math.nan}}, "weight=nan; a weight is"),
        ({"format": {"weight": 10**400}}, "weight=1000+; a weight is"),
        ({"format": {"weigth": 1.0}}, r"env\.rewards\.format has no setting weigth; .*did you mean weight\?"),
        ({"format": {"unit": "tokens"}}, "has no setting unit"),
        ({"cosine": {"max_len": 10**400}}, r"env\.rewards\.cosine: "),
        ({"repetition_penalty": {"correct": "accuracy"}}, "has no setting correct"),
        (
            {"cosine": {"maxlen": 80}},
            r"has no setting maxlen; it can be weight, unit, correct, max_len, .*mean max_len",
        ),
        ({"cosine": {"unit": "words"}}, "unit is 'words'; it can be characters or tokens"),
        ({"cosine": {"max_len": 0}}, r"env\.rewards\.cosine: max_len=0"),
        ({"cosine": {"max_len": "long"}}, r"env\.rewards\.cosine: '<' not supported"),
        ({"cosine": {"min_value_correct": math.inf}}, "finite"),
        ({"repetition_penalty": {"max_penalty": 1.0}}, r"max_penalty=1\.0"),
        ({"repetition_penalty": {"ngram_size": 0}}, "ngram_size=0"),
        ({"reasoning_steps": {"enough": 0}}, "enough=0"),
        ({"code_format": {"language": "```"}}, "language='```'"),
        ({"soft_overlong_punishment": 1.0}, r"needs max_len; set env\.rewards\.soft_overlong_punishment\.max_len"),
        ({"soft_overlong_punishment": {"max_len": 10}}, "needs cache"),
        ({"soft_overlong_punishment": {"max_len": 10, "cache": 11}}, "cache=11, max_len=10"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_scored(config, message):
    with pytest.raises(ValueError, match=message):
        read_parts(config)
