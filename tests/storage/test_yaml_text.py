"""YAML that would take the memory, the time or the words of whoever reads it."""

import pytest

from grpo_rl.storage.yaml_text import MOST_VALUES, read_yaml


def aliases(lines: int) -> str:
    """Lists of ten aliases of the line before: ten to the power of ``lines`` values."""
    return "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, lines + 1))


def test_aliases_of_few_values_are_read_and_those_of_many_refused_at_once():
    assert len(read_yaml(aliases(4))["a4"]) == 10
    with pytest.raises(ValueError, match="its aliases stand for a million values$"):
        read_yaml(aliases(100))


def test_a_large_text_without_aliases_is_too_large_only_by_its_values():
    assert len(read_yaml("- " + "x" * (MOST_VALUES + 1))[0]) == MOST_VALUES + 1


@pytest.mark.parametrize("text", ["a: !!int hf_secret", "a: !!float hf_secret", "a: !!timestamp hf_secret"])
def test_the_value_that_does_not_fit_its_tag_may_be_a_secret_and_is_not_told(text):
    with pytest.raises(ValueError, match=r"^line 1, column 4: the value is no (int|float|timestamp)$"):
        read_yaml(text)
