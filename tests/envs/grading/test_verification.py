import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.envs.grading.boxed import equal
from grpo_rl.envs.grading.tags import last_boxed
from grpo_rl.envs.grading.verification import MAX_CHARS, verify

pytestmark = pytest.mark.slow

EQUIVALENT = [
    # fractions and decimals
    (r"\frac{1}{2}", "1/2"), (r"\frac12", r"\dfrac{2}{4}"), (r"\frac{1}{2}", "0.5"), (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"\frac{-6}{8}", "-0.75"), ("2.5", r"\frac{5}{2}"), (r"1\frac{4}{5}", r"\frac{9}{5}"), ("0.25", ".25"),
    ("3", "3.0"), (r"\frac{1}{3}", "0.333333"), (r"\frac{270}7", r"\frac{270}{7}"), ("0.5", "0.50"),
    # percents
    (r"25\%", r"\frac{1}{4}"), (r"50\%", "0.5"), (r"10\%", r"10 \%"), (r"12.5\%", "0.125"),
    # thousands, money, units
    (r"10,\!080", "10080"), ("58,500", "58500"), (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"\$32,\!348", "32348"), (r"\$18.90", "18.9"), (r"15\mbox{ cm}^2", "15"), (r"5.4 \text{ cents}", "5.4"),
    ("12", r"12\text{ miles}"), (r"90^\circ", "90"), (r"90^\circ", r"90^{\circ}"),
    # surds, pi, powers
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), (r"11\sqrt2", r"11 \sqrt{2}"),
    (r"3\sqrt{13}", r"\sqrt{117}"), (r"1+2\sqrt{3}", r"2\sqrt{3}+1"), (r"288 \pi", r"288\cdot\pi"),
    (r"-\frac{\pi}{6}", r"-\pi/6"), ("2^{10}", "1024"), ("10^{-2}", "0.01"),
    # expressions and equations
    ("p - q", "-q + p"), ("x^3+3x-6", "3x + x^3 - 6"), ("(a+5)(b+2)", "ab+2a+5b+10"), ("2k+2", "2(k+1)"),
    ("x=5", "5"), ("y = 2x + 3", "y=3+2x"), ("6 - 5i", "-5i + 6"), ("x > 3", "3 < x"),
    # tuples, intervals, sets
    ("(6,31,-1)", "(6, 31, -1)"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"), (r"(\frac12, 2)", "(0.5, 2)"),
    ("(3,4]", r"\left(3, 4\right]"), (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
    ("[0,1/2]", r"\left[0,\frac{1}{2}\right]"), (r"x \in [-2,7]", "[-2,7]"), ("1,-2", "-2,1"), (r"3, 5, 7",
    r"\{7,5,3\}"),
    (r"\{1,2\}", r"\{2, 1\}"), (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    # matrices
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}"),
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{bmatrix}-1&0\\0&-1\end{bmatrix}"),
    # words, bases
    (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), (r"\text{even}", r"\textbf{even}"), ("52_8", "52_{8}"),
]  # fmt: skip

DIFFERENT = [
    # fractions and decimals
    (r"\frac{1}{2}", "2"), (r"\frac{1}{2}", r"\frac{1}{3}"), (r"\frac{1}{3}", "0.33"), (r"\frac{2}{3}", "0.67"),
    (r"\frac{14}{3}", r"\frac{3}{14}"), (r"1\frac{4}{5}", r"\frac{4}{5}"), ("2.5", "25"), ("0.25", "0.2"), ("3", "3.1"),
    ("7", "77"), ("100", "10"), ("0", "1"), (r"\frac{3}{56}", r"\frac{3}{65}"), ("0.125", r"\frac{1}{80}"),
    # signs
    ("5", "-5"), (r"-\frac{3}{4}", r"\frac{3}{4}"), ("-2", "2"), (r"-\sqrt{3}", r"\sqrt{3}"),
    # percents
    (r"25\%", r"2.5\%"), (r"50\%", "5"), (r"\frac{1}{4}", r"4\%"), ("0.28", "28"),
    # thousands, money, units
    ("10,080", "10.08"), ("58,500", "58,501"), (r"\$36", r"\$3.6"), (r"15\mbox{ cm}^2", "225"), (r"90^\circ", "80"),
    # surds, pi, powers
    (r"\sqrt{8}", r"4\sqrt{2}"), (r"3\sqrt{13}", r"13\sqrt{3}"), (r"\sqrt{51}", "51"), (r"\sqrt{5}", "2.2"),
    ("\\pi", "3.14"), (r"288 \pi", "288"), (r"-\frac{\pi}{6}", r"\frac{\pi}{6}"), ("2^{10}", "20"), ("10^{-2}", "-100"),
    # expressions and equations
    ("p - q", "q - p"), ("x^3+3x-6", "x^3+3x+6"), ("2k+2", "2k+1"), ("5r^5", "5r^4"), ("x=5", "x=6"), ("x=5", "-5"),
    ("y = 2x + 3", "y = 3x + 2"), ("6 - 5i", "6 + 5i"), ("x > 3", "x < 3"), (r"x \ge 3", "x > 3"), ("2k", "2n"),
    # tuples, intervals, sets
    ("(6,31,-1)", "(31,6,-1)"), ("(-2,1)", "(1,-2)"), ("(1,2)", "(1,2,3)"), ("(3,4]", "[3,4]"), ("(3,4]", "(3,4)"),
    ("(2,\\infty)", "(-\\infty,2)"), (r"(0,9) \cup (9,36)", "(0,36)"), ("1,-2", "1"), ("1,-2", "1,2"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    # matrices
    (r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", r"\begin{pmatrix} -7 \\ 5 \\ 16 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
    # words, bases
    (r"\text{Evelyn}", r"\text{Navin}"), (r"\text{(C)}", "B"), (r"\text{even}", r"\text{odd}"), ("52_8", "52_9"),
    ("52_8", "52"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), EQUIVALENT)
def test_an_equivalent_answer_is_right(gold, answer):
    assert verify(gold, rf"Therefore it is $\boxed{{{answer}}}$.") is True
    assert verify(rf"Thus, $\boxed{{{gold}}}.$", rf"\[\boxed{{{answer}}}\]") is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_a_different_answer_is_wrong(gold, answer):
    assert verify(gold, rf"Therefore it is $\boxed{{{answer}}}$.") is False


LETTERS_AND_SIGNS = [
    # what math-verify itself reads -> the same in other fonts, as its table of complex numbers has them
    ("3+4i", r"3+4\cdot i"), ("3+4i", r"3+4\mathrm{i}"), ("3+4i", r"3+4\text{i}"),
    ("3+4i", r"3 + 4\,\mathrm{i}."), ("3+4i", r"3+4{\rm i}"),
    ("i", r"\mathrm{i}"), ("1+i", r"1+\mathrm{ i }"), ("1-i", r"1-\imath"), ("-5i+6", r"6 - 5\mathrm{i}"),
    (r"\frac{1+i}{2}", r"\frac{1+\mathrm{i}}{2}"), (r"\sqrt{2}i", r"\sqrt{2}\mathrm{i}"), (r"\pi i", r"\pi\mathrm{i}"),
    ("2e", r"2\mathrm{e}"), ("2e", r"2\text{e}"), ("e^2", r"\mathrm{e}^{2}"), ("3e^{20}", r"3\mathrm{e}^{20}"),
    (r"e^{i\pi}", r"\mathrm{e}^{\mathrm{i}\pi}"), (r"\frac{e}{2}", r"\frac{\rm e}{2}"), ("e-1", r"\mathrm{e}-1"),
    (r"\{1+i, 1-i\}", r"\{1+\mathrm{i},1-\mathrm{i}\}"),
    # both signs, wherever they stand
    (r"\frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2}", r"\frac{1 \pm \sqrt{5}}{2}"),
    (r"\frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2}", r"x = \dfrac{1\pm\sqrt{5}}{2}"),
    (r"\frac{1 \pm \sqrt{5}}{2}", r"\frac12 \pm \frac{\sqrt5}{2}"), (r"3(1\pm\sqrt{2})", r"3\pm 3\sqrt{2}"),
    (r"\{\frac{-1\pm i\sqrt{3}}{2}, 1\}", r"1, \frac{-1+i\sqrt{3}}{2}, \frac{-1-i\sqrt{3}}{2}"),
    (r"\sqrt{2\pm\sqrt{3}}", r"\sqrt{2+\sqrt3}, \sqrt{2-\sqrt3}"), ("2, -2", r"\pm 2"), ("x = 2, x = -2", r"x = \pm 2"),
    (r"(1+\sqrt{2}, 1-\sqrt{2}), (1-\sqrt{2}, 1+\sqrt{2})", r"(1\pm\sqrt{2}, 1\mp\sqrt{2})"),
    ("1+i, 1-i, -1+i, -1-i", r"\pm 1 \pm \mathrm{i}"),
]  # fmt: skip


SPACED = [
    r"1\,000", "1000.", r"1{,}000", r"1\ 000", "1~000", r"1\;000.", "1,000.", r"{1000}.", "1000 .", r"x = 1\,000.",
]  # fmt: skip
COMMAS = [("(3, 140)", r"(3,\,140)"), (r"\{5,120\}", r"\{5,\ 120\}"), ("[2,100]", r"[2,\;100]"), ("3, 140", r"3,\:140")]
UNTRUE = ["1=72", "72=1", "x=1=72", "1=x=72", "1==72", "2 + 2 = 72", "1.0=72"]
TRUE = ["x=72", r"\text{Total} = 72", "71+1=72", "72.0=72", "x=70+2=72", r"f(2) = 72"]

EQUAL = [
    # every i of math-verify's own table, and every double sign of its grammar
    *[
        pair
        for letter in (r"\i", "i", r"\text{i}", r"\mathrm{i}", r"\imath")
        for pair in (("3+4i", f"3+4{letter}"), (f"3+4{letter}", "3+4i"), (f"1-{letter}", "-i+1"))
    ],
    *[
        (rf"\frac{{1{sign}\sqrt{{5}}}}{{2}}", r"\frac{1-\sqrt{5}}{2}, \frac{1+\sqrt{5}}{2}")
        for sign in (r"\pm", r"\mp", "±", "∓")
    ],
    # a full stop behind any answer, and a space behind a comma of a list
    (r"\frac{1}{2}", r"\frac{1}{2}."), (r"\text{even}", r"\text{even}."), ("(1, 2)", "(1,2)."), *COMMAS,
    # an equation answers with its right side, also where one number is written in two ways
    *[("72", answer) for answer in TRUE],
    ("7", "111_2=7"), ("13", "1101_2 = 13"), ("3.14", r"\frac{22}{7}=3.14"), ("0.333", r"\frac{1}{3}=0.333"),
    ("0.66", r"\frac{2}{3}=0.66"), ("1.41", r"\sqrt{2}=1.41"), ("3.14", r"\pi=3.14"), ("50\\%", r"\frac{1}{2}=50\%"),
    (r"\frac{1}{2}", r"\frac{1}{2}=50\%"), ("1", r"7 \equiv 1"), ("3", "1 + 2 = 3.0"),
]  # fmt: skip

UNEQUAL = [
    # another number in another font, and one sign of two
    ("3+4i", r"3-4\mathrm{i}"), ("3+4i", "3+4"), (r"3+4\mathrm{i}", "7"), (r"2\mathrm{e}", "2"), ("2e", r"2\mathrm{i}"),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt{5}}{2}"), (r"\frac{1+\sqrt{5}}{2}", r"\frac{1\pm\sqrt{5}}{2}"),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{-1\pm\sqrt{5}}{2}"), (r"\pm 1 \pm i", "1+i, -1-i"),
    *[(gold, "7") for gold in (r"3+4\i", r"3+4\text{i}", r"3+4\imath")],
    # spaces, commas and full stops
    *[(gold, answer) for answer in SPACED for gold in ("1001", "1", "0")],
    *[("3140", answer) for _, answer in COMMAS], ("1000", "100.0"), ("5", ".5"),
    # equations: of two different numbers, of more than rounding apart, and of another right side
    *[(gold, answer) for answer in UNTRUE for gold in ("72", "1")],
    *[("72, 73", f"{answer}, 73") for answer in UNTRUE],
    ("0.5", r"\frac{1}{3}=0.5"), ("0.34", r"\frac{1}{4}=0.34"), *[("71", answer) for answer in TRUE],
]  # fmt: skip


@pytest.mark.parametrize(("plain", "other"), [*LETTERS_AND_SIGNS, *(("1000", answer) for answer in SPACED)])
def test_fonts_of_i_and_e_signs_in_any_place_and_spaces_are_read_in_gold_answers_and_in_others(plain, other):
    assert equal(plain, other) is True and equal(other, plain) is True


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_another_way_to_write_an_answer_is_right(gold, answer):
    assert equal(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_another_answer_in_such_a_way_is_wrong(gold, answer):
    assert equal(gold, answer) is False


def test_a_percent_sign_may_be_left_out_where_the_gold_answer_is_a_whole_number():
    assert verify("10", r"\boxed{10\%}") and verify("1,200", r"\boxed{1,200.0\%}") is not None
    assert verify("0.5", r"\boxed{0.5\%}") is False and verify("0.28", r"\boxed{28\%}") is True


EXPANSIONS = [
    "(x+y+z+w+a+b)^{19}", "(x+y+z+w+a+b)^9", "{(x+y+z+w+a+b)}^{{9}}", "(x+y+z+w+a)^{(9)}", "(x+y+z+w+a)^{4+5}",
    r"\left(a+b+c+d\right)^{\frac{9}{1}}", "((a+b+c)^{4}+(c+d)^{3})^3", "(a-b-c)^{-9}(d+e)^{9}",
    "(a+b+c)^{9},(d+e)^9",
    r"\frac{(a+b+c+d)^8}{(a+e)^9}", r"(a+b)(c+d)(e+f)(g+h)(k+l)(m+n)(p+q)", r"((a+b+c)^{12})",
    r"\{(a+b+c)^9+(d+e+f)^9\}^2",
]  # fmt: skip


@pytest.mark.parametrize("answer", EXPANSIONS)
def test_what_expands_to_many_terms_is_wrong_before_it_is_expanded(answer):
    equal("72", "x+1")  # the gold answer is parsed, math-verify imported
    start = time.process_time()
    assert equal("72", answer) is False
    assert time.process_time() - start < 0.1  # the first takes sympy 5 s and more


def test_what_expands_to_few_terms_is_compared():
    assert equal("x^5 + 5x^4 + 10x^3 + 10x^2 + 5x + 1", "(x+1)^5") is True
    assert equal("(x-1)(x-2)(x-3)(x-4)(x-5)(x-6)", "(x-6)(x-5)(x-4)(x-3)(x-2)(x-1)") is True
    assert equal("(x+y+z+w+a+b)^{19}", "(b+x+y+z+w+a)^{19}") is True  # the gold answer is written so itself


BOXES = [
    (r"\boxed{5}", "5"), (r"is $\boxed{ 5 }$.", "5"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\fbox{5}", "5"),
    (r"\boxed {5}", "5"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
    (r"\boxed{a \\ b}", r"a \\ b"), ("\\boxed{1\n}", "1"), (r"\boxed{}", ""),
    # the last one counts
    (r"\boxed{5} and \boxed{6}", "6"), (r"\boxed{\boxed{5}}", "5"), (r"\boxed{5} \fbox{6}", "6"),
    (r"\boxed{5}, in the form \boxed", "5"), (r"\boxed{5} \boxedblue{6}", "5"),
    # none
    ("5", None), ("", None), (r"\boxed", None), (r"\boxed 5", None), (r"\boxed{5", None), (r"\boxed{5} \boxed{6", None),
    (r"boxed{5}", None), (r"\boxed{\frac{1}{2}", None), (r"\boxed{5\}", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "inside"), BOXES)
def test_the_last_box_is_found_with_its_own_braces(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize("piece", ["\\boxed{", "\\boxed", "\\boxed ", "{", "}", "\\", "\\boxed{1}", "\\boxed{{", " "])
def test_a_megabyte_of_anything_is_searched_in_time_linear_in_it(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    last_boxed(text), last_boxed("\\boxed{" + text), last_boxed(text + "\\boxed{1}")
    assert time.process_time() - start < 5


def test_only_the_last_box_of_a_response_counts():
    assert verify("5", r"\boxed{5} is too low, so \boxed{6}") is False
    assert verify("5", r"\boxed{6} is too high, so \boxed{5}") is True
    assert verify("5", r"\boxed{5} or \boxed{6") is False
    assert verify("1,2", r"\boxed{1} and \boxed{2}") is False
    assert verify("5", "the answer is 5") is False
    assert verify("5", "") is False
    assert verify(r"\frac{1}{2}", r"\boxed{\frac{1}{2} (( \frac{7}{8} ^^ }") is False  # a part makes sense


def test_an_answer_that_is_too_long_is_wrong():
    right = "5" + "+0" * ((MAX_CHARS - 1) // 2)
    assert verify("5", rf"\boxed{{{right[:99]}}}") is True
    assert verify("5", rf"\boxed{{{right + '+0' * 9}}}") is False


@settings(max_examples=200)
@given(
    gold=st.integers(-(10**12) + 1, 10**12 - 1),
    other=st.integers(-(10**12) + 1, 10**12 - 1),
    near=st.integers(-2, 2),
)
def test_integers_that_are_compared_as_texts_are_so_judged_by_math_verify_too(gold, other, near):
    for answer in (gold, other, gold + near):
        if abs(answer) < 10**12:
            expected = verify(str(gold), rf"\boxed{{{answer}}}")
            assert expected is (gold == answer) and equal(str(gold), str(answer)) is expected
