from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.envs.grading.numbers import extract_answer, written

FORMATS = [
    # thousands
    ("1,234", "1234"), ("1,234,567", "1234567"), ("1,234.50", "1234.5"), ("109,200,000", "109200000"),
    ("3, 4", "4"), ("1,2345", "2345"), ("12,34", "34"), ("1,234,56", "56"), ("1{,}234", "1234"), ("1\\,234", "1234"),
    ("10,\\!000", "10000"), ("1\u202f234", "1234"), ("1\u00a0234\u00a0567", "1234567"), ("sets 1,234, 5", "5"),
    # decimals
    ("12.0", "12"), ("12.50", "12.5"), (".5", "0.5"), ("$.50", "0.5"), ("0.5.", "0.5"), ("007", "7"), ("...5", "5"),
    ("end.5", "5"),
    # the end of a sentence
    ("It is 42.", "42"), ("42!", "42"), ("42,", "42"), ("1,234.", "1234"), ("(42)", "42"), ("42\n\n", "42"),
    # currency, percent, units
    ("$5", "5"), ("$ 5", "5"), ("5€", "5"), ("£3", "3"), ("€1,234.56", "1234.56"), ("USD 5", "5"), ("5 %", "5"),
    ("50%", "50"), ("5kg", "5"), ("5 apples", "5"), ("25 cm^2", "25"), ("25\\text{ cm}^{2}", "25"), ("25 m²", "25"),
    # markup
    ("**42**", "42"), ("*42*", "42"), ("`42`", "42"), ("\\boxed{42}", "42"), ("$\\boxed{-42}$", "-42"),
    ("$\\$5$", "5"), ("\\(42\\)", "42"), ("\\$1,000", "1000"), ("\\text{Answer: } 42", "42"),
    # signs
    ("-3", "-3"), ("−3", "-3"), ("–3", "-3"), ("-$3", "-3"), ("$-3", "-3"), ("-\\$3", "-3"), ("**-3**", "-3"),
    ("(-3)", "-3"), ("= -3", "-3"), ("is -3.50", "-3.5"), ("-1,234", "-1234"), ("+3", "3"), ("-.5", "-0.5"),
    ("Step 3\n-2", "-2"), ("-0", "0"), ("2 * -3", "-3"),
    ("-" + "7" * 40, "-" + "7" * 40),
    # a minus that is none
    ("3-2", "2"), ("3 - 2", "2"), ("3 -2", "2"), ("3\u22122", "2"), ("$5-$3", "3"), ("5€-3€", "3"), ("5% -3", "3"),
    ("(1+2)-3", "3"), ("(1+2) -3", "3"), ("day-2", "2"), ("COVID-19", "19"), ("- 3 apples", "3"), ("- $3", "3"),
    ("so--3", "3"), ("10–12", "12"),
    # fractions
    ("1/2", "0.5"), ("-1/2", "-0.5"), ("6 / 4", "1.5"), ("1,000/4", "250"), ("\\frac{1}{2}", "0.5"),
    ("-\\dfrac{3}{4}", "-0.75"), ("\\frac12", "0.5"), ("$\\dfrac 3{4}$", "0.75"),
    ("5/day", "5"), ("12/25/2024", "2024"), ("5/0", None), ("\\frac{5}{0}", None),
    # powers
    ("1.5e3", "1500"), ("2E+2", "200"), ("5e-1", "0.5"), ("5eggs", "5"), ("3e5f", "5"), ("2^10", "2"),
    # other scripts
    ("４２", "42"), ("１,２３４", "1234"), ("٤٢", "42"), ("答えは42です", "42"),
    # which text is judged
    ("1 <answer>2</answer> 3", "2"), ("<answer>1</answer> <answer>2</answer>", "2"), ("#### 1 <answer>2</answer>", "2"),
    ("<answer>2</answer> #### 1", "2"), ("<answer>1</answer> <answer>2", "1"), ("<answer>7", "7"), ("7</answer>", "7"),
    ("<answer>5</answer> so 7</answer>", "5"), ("<answer>1<answer>2</answer>", "2"), ("</answer>7<answer>", "7"),
    ("12 #### 42", "42"), ("#### 1\n#### 2", "2"), ("#### 42 apples", "42"), ("####42", "42"),
    ("1 <answer>x</answer>", None), ("7 ####", None), ("#### 7\n####", None), ("7 + 5 = 12", "12"),
    ("48/2 = <<48/2=24>>24", "24"),
    # a heading is no marker
    ("#### Final Answer\n\\boxed{72}", "72"), ("#### Step 3: sum\nIt is 72.", "72"), ("##### 1\n72", "72"),
    ("#### 3\n#### **Check**\n7", "3"), ("#### **42**", "42"), ("#### the sum: **42**\n7", "42"),
    ("#### x = 42\nin 3 steps", "42"), ("#### It is 42.\n7", "42"), ("#### USD 42\n(3 items)", "42"),
    # an open marker: the first number behind it, chatter may follow
    ("#### 3\nThis took 2 steps.", "3"), ("#### 3. This took 2 steps.", "3"), ("####\n\n42\n7", "42"),
    ("1 + 2 = 3, so the answer is 42. I used 3 steps.", "42"), ("**Final Answer:** $5\n\n3 steps.", "5"),
    ("The answer is 3. No, the answer is 4, as 3 < 4.", "4"), ("The answer is -3, in 2 steps.", "-3"),
    ("It is 42 in 3 steps, I hope the answer is right", "3"), ("The answer is 42, 1 way. Is my answer: yes?", "42"),
    ("#### 41 or 42", "41"), ("the answer is 41 or 42", "41"), ("answers 1 is 2", "2"),
    # a closed marker: all of it is the answer
    ("<answer>42</answer> Thanks for 1 nice problem", "42"), ("So \\boxed{42}, in 3 steps.", "42"),
    ("\\boxed{1}, no, \\boxed{2}: 3", "2"), ("\\boxed{\\frac{1}{2}} of 5", "0.5"), ("\\boxed{1} or \\boxed{2", "2"),
    ("<answer>41 or 42</answer>", None), ("\\boxed{41, 42}", None), ("<answer>1 1/2</answer>", None),
    ("<answer>x = 3, y = 4</answer>", None), ("<answer>42 (that is 42.0)</answer>", "42"),
    # one kind of marker precedes the other
    ("#### 1 and \\boxed{2}", "1"), ("\\boxed{2} #### 1", "1"), ("\\boxed{2}. The answer is 3.", "2"),
    ("The answer is 3. <answer>2</answer>", "2"), ("The answer is 3.\n#### 2", "2"),
    # an equation answers with its right side
    ("#### 7 + 5 = 12", "12"), ("<answer>7 + 5 = 12</answer>", "12"), ("The answer is 3 x 4 = $12.", "12"),
    ("The answer is 18.\n\n16 - 3 - 4 = 9", "18"), ("The answer is 20.\n5 x 3 = 15", "20"),
    ("The answer is 18\n2 = 2", "18"), ("The answer is 18. 16 - 3 = 13", "18"),
    ("The answer is 18, 9 + 9 = 18.5", "18"),
    ("#### 1,000 + .5 = 1,000.5", "1000.5"),
    ("#### 2 + 2 = 4 = 8 - 4", "8"), ("#### 3 apples, as 1 + 2 = 3", "3"), ("\\boxed{6 \\times 7 = 42}", "42"),
    # none
    ("", None), ("forty-two", None), ("-", None), ("$", None), (".", None), ("²", None), ("½", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FORMATS)
def test_the_final_number_is_read_whatever_its_format_and_its_marker(text, expected):
    assert extract_answer(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48 / 6 =", None), ("#### 48 / 6", None), ("#### 48/6 each", None), ("<answer>48 / 6</answer>", None),
        ("\\boxed{\\frac{48}{6}}", None), ("The answer is 48/6.", None), ("-48/6", None), ("1/2", None),
        ("#### 48 / 6 = 8", "8"), ("48/6 = <<48/6=8>>8", "8"), ("<answer>48 / 6 (that is 8)</answer>", "8"),
        ("<answer>1 1/2</answer>", None), ("12/25/2024", "2024"), ("#### 8, from 48 / 6", "8"), ("5/day", "5"),
    ],
)  # fmt: skip
def test_a_division_left_undone_is_no_number_where_quotients_are_not_asked_for(text, expected):
    assert extract_answer(text, quotients=False) == (None if expected is None else Decimal(expected))


@given(
    whole=st.integers(0, 10**12),
    cents=st.sampled_from(["", ".0", ".00", ".5", ".50", ".25", ".125"]),
    negative=st.booleans(),
    grouped=st.booleans(),
    minus=st.sampled_from(["-", "−", "-$", "$-", "-\\$"]),
    plus=st.sampled_from(["", "$", "£", "€ ", "+", "\\$"]),
    around=st.sampled_from(
        ["{}", "It is {}.", "**{}**", "\\boxed{{{}}}", "Then 3 + 4 = 7, so {} apples", "#### {}",
         "9 <answer> {} </answer> 8", "${}$", "{}%", "({})", "1, 2, {}\n", "total: {}€"]
    ),
)  # fmt: skip
def test_a_number_written_in_any_way_is_the_same_number(whole, cents, negative, grouped, minus, plus, around):
    number = (f"{whole:,}" if grouped else str(whole)) + cents
    expected = Decimal(f"{whole}{cents}") * (-1 if negative else 1)
    assert extract_answer(around.format((minus if negative else plus) + number)) == expected


def test_equal_numbers_alone_are_written_alike_however_long():
    assert written(Decimal("0.500")) == written(Decimal(".5")) == "0.5"
    assert written(Decimal("1" * 40)) != written(Decimal("1" * 39 + "2"))
    assert written(Decimal("1" * 1_000_001)) == "1" * 1_000_001
