"""YAML that stands for more than a reader can hold, and values that are not told."""

import pytest

from grpo_rl.storage.yaml_text import read_yaml


def aliases(lines: int) -> str:
    """Lists of ten aliases of the line before: ten to the power of ``lines`` values."""
    return "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, lines + 1))


def test_aliases_of_few_values_are_read_and_those_of_many_refused_at_once():
    assert len(read_yaml(aliases(4))["a4"]) == 10
    with pytest.raises(ValueError, match="^it holds more than a million values"):
        read_yaml(aliases(8))


@pytest.mark.slow
def test_a_hundred_levels_are_read_and_no_more_whether_written_out_or_by_aliases():
    assert read_yaml("[" * 99 + "]" * 99) and read_yaml("[" * 100 + "]" * 100)
    by_alias = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 1300))
    for text in ("[" * 101 + "]" * 101, by_alias, "[" * 5000):
        with pytest.raises(ValueError, match="or more than 100 levels$"):
            read_yaml(text)


@pytest.mark.parametrize("text", ["a: !!int hf_secret", "a: !!float hf_secret", "a: !!timestamp hf_secret"])
def test_the_value_that_does_not_fit_its_tag_may_be_a_secret_and_is_not_reported(text):
    with pytest.raises(ValueError, match=r"^it is no YAML \(\w+\)$"):
        read_yaml(text)
