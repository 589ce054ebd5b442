"""Responses to each of the 25 instruction types, their verdicts derived by hand from the published definition."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.envs.ifeval.instructions import INSTRUCTIONS
from grpo_rl.envs.ifeval.task import COUNT_SENTENCES, parse, verdicts


def check(ids, kwargs, response, loose=False):
    return verdicts(parse(ids, kwargs, "a row"), response, loose=loose)


GERMAN = "Guten Morgen, meine Damen und Herren. Heute sprechen wir über das Wetter in den Bergen."
ENGLISH = "good morning, ladies and gentlemen. today we are going to talk about the weather in the mountains."
FRENCH = "bonjour mesdames et messieurs, aujourd'hui nous allons parler de la météo dans les montagnes."
AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}

# Instruction, arguments, then responses that follow it and responses that do not.
TABLE = [
    ("keywords:existence", {"keywords": ["art", "new york"]},
     ["Art in New York.", "A PARTY IN NEW YORK", "new york: smart"],
     ["Art in York.", "New York", "art in New\nYork"]),
    ("keywords:existence", {"keywords": []}, ["anything"], []),
    # A keyword is a text: in "C++" the signs mean themselves, and so does the point.
    ("keywords:existence", {"keywords": ["C++", "a.b"]}, ["c++ A.B"], ["C a.b", "C++ axb"]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, **AT_LEAST},
     ["Cat and cat", "concatenate the CAT"], ["cat", "dog", "c a t cat"]),
    ("keywords:frequency", {"keyword": " cat ", "frequency": 2, **LESS}, ["dog", "cat"], ["cat cat", "catcat"]),
    ("keywords:frequency", {"keyword": "aa", "frequency": 2, **AT_LEAST}, ["aaaa"], ["aaa"]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 0, **AT_LEAST}, ["dog", "cat"], []),
    ("keywords:frequency", {"keyword": "cat", "frequency": 0, **LESS}, [], ["dog", "cat"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock", "c++"]},
     ["rocks and rocket", "bedrock_rock", "c+", "c++11"], ["a Rock.", "rock", "in C++ and", "rock-solid"]),
    ("keywords:forbidden_words", {"forbidden_words": []}, ["anything"], []),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 3, "let_relation": "at least"},
     ["banana", "Aaa"], ["bana", "xyz"]),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 1, "let_relation": "less than"},
     ["banana"], ["Queen", "equal"]),
    # The dataset has two such "letters": they are counted, never replaced.
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 4, "let_relation": "at least"},
     ["#### 42", "# # ##"], ["### 42", "hashtag"]),
    ("language:response_language", {"language": "de"}, [GERMAN, "1 + 1 = 2"], [ENGLISH, FRENCH]),
    ("length_constraints:number_sentences", {"num_sentences": 2, **AT_LEAST},
     ["One. Two.", "One! Two? Three.", "Dr. Smith came. He sat."], ["One.", "Dr. Smith came", "No end\nof line"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, **LESS},
     ["One.", "It costs 3.50 dollars."], ["One. Two."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["one\n***\ntwo", "one***two", "***\none\n***\ntwo\n***", "one\n\nstill one\n***\ntwo"],
     ["one", "one\n***\ntwo\n***\nthree", "one\n***\n\n***\ntwo", "one\n**\ntwo"]),
    # "***" parts two blanks: at either end they don't count, so no paragraph is left.
    ("length_constraints:number_paragraphs", {"num_paragraphs": 0}, ["***"], ["one", "one***two"]),
    ("length_constraints:number_words", {"num_words": 3, **AT_LEAST},
     ["one two three", "don't go", "a-b-c", "é ü 3"], ["one two", "snake_case word", "-- ... !"]),
    ("length_constraints:number_words", {"num_words": 3, **LESS}, ["one two", "..."], ["one two three", "don't go"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Elm"},
     ["One.\n\nelm trees", "One.\n\n'ELM' trees", 'One.\n\n"Elm, trees', "One.\n\n  Elm's", "One.\n\nElm"],
     ["One.\n\nThe elm", "Elm", "One.\n\nElms", "One.\n\nElm\n\nThree.", "One.\nElm", "One.\n\n(Elm)", "Elm\n\nOne.",
      "One.\n\n\n\nElm"]),  # the second of its three pieces is blank
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "it"},
     ["It's fine", "it"], ["\n\nit", "Item"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": ""},
     ["...and so on", "?"], ["word"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] lives at [address]", "[] []", "[a][b][c]", "[a [b] [c]"], ["[name]", "name address", "[a\n] [b]", "]["]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Bye.\nP.S. Call me.", "p. s. call", "Bye. P.S.", "P.P.S. Call"], ["PS: call", "P.S call", "Postscript"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["P.P.S call", "p. p. s. call", "P.P.S. call"], ["P.S. call", "PPS"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["N.B. this", "see n.b. too"], ["NxBx", "NB"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* one\n* two", "- one\n- two", "Intro:\n  * one\n\n- two\nEnd.", "*one\n*two", "---\n* one"],
     ["* one", "* one\n* two\n* three", "**one**\n**two**", "1. one\n2. two", "a * b\nc - d", "* one\n*"]),
    # The character after a star may be the end of its line; the next line then belongs to that bullet.
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, ["*\n* two", "*\ntwo"], ["*", "*\n* two\n* three"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 0}, ["none", "**bold**"], ["* one"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "Well. My answer is maybe. Or so.", "  My answer is no.\n"],
     ["My answer is yes", "my answer is no.", "Yes."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*one* and *two*", "**one** and *two*", "**one** **two**", "*one*two*three*"],
     ["*one*", "**one**", "* *, *\t* and ****", "*one\ntwo* three*", "one two"]),
    ("detectable_format:multiple_sections", {"section_spliter": " Day ", "num_sections": 2},
     ["Day 1\nrest\nDay 2\nwork", "Day1 Day2", "**Day 1** **Day 2** Day 3", "Monday: Day 1, MonDay 2"],
     ["Day 1", "day 1 day 2", "Day one, Day two", "Day  1 Day  2"]),
    ("detectable_format:multiple_sections", {"section_spliter": "(a|b)", "num_sections": 1}, ["(a|b) 1"], ["a 1"]),
    ("detectable_format:json_format", {},
     ['{"a": 1}', '```json\n{"a": 1}\n```', '```\n[1, 2]\n```', ' ```JSON{"a": null}``` ', "42", '"text"', "NaN"],
     ["{'a': 1}", '{"a": 1} done', 'Here: {"a": 1}', "``` python\n{}\n```", "{", "[" * 200_000]),
    ("detectable_format:title", {},
     ["<<poem of joy>>", "A << b >> c", "<<<a>>>", "<<a\n<<b>>"],
     ["<poem>", "<<>>", "<< >>", "<<a\nb>>", ">>a<<", "<<<<>>>>"]),
    ("combination:two_responses", {},
     ["one\n******\ntwo", "one******two", "******one******two******", "one ****** one."],
     ["one", "one******one", "one ****** one ", "a******b******c", "a************b", "one\n*****\ntwo"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": " Write a poem. "},
     ["Write a poem. Roses...", "WRITE A POEM.", "\n write a poem.X"],
     ["A poem. Write a poem.", "Write a poem", "Roses"]),
    ("startend:end_checker", {"end_phrase": " The End. "},
     ["It was so. The end.", '"...THE END."', "The End.\n\n", "Legend: the end."],
     ["The End. Bye", "The End", "The end.'"]),
    ("startend:end_checker", {"end_phrase": ""}, ["anything"], []),
    ("startend:quotation", {}, ['"Hi"', ' "Hi" and "bye"\n', '""'], ['"', '"Hi', 'Hi"', "“Hi”", "'Hi'"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["NASA and ESA", "I AM here", "A-B and C3", "DON'T."],  # "DO" and "N'T" at the end of a sentence
     ["NASA", "Nasa and Esa", "A-B", "NASA, 1 + 1"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"},
     ["none", "NASA rocks."], ["NASA and ESA"]),
    # Of a word in capitals langdetect reads the first letter only; without words, nothing is left to tell by.
    ("change_case:english_capital", {}, ["THE WEATHER WAS WHAT THEY THOUGHT THAT IT WAS, AND THE WIND WAS WARM"],
     [ENGLISH, ENGLISH.capitalize(), "12:30"]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.capitalize(), FRENCH, "12:30"]),
    ("punctuation:no_comma", {}, ["No comma; none.", "１，２"], ["a, b", ","]),
]  # fmt: skip

CASES = [
    pytest.param(name, kwargs, response, verdict, id=f"{name.partition(':')[2]}-{number}-{verdict}-{at}")
    for number, (name, kwargs, right, wrong) in enumerate(TABLE)
    for verdict, responses in ((True, right), (False, wrong))
    for at, response in enumerate(responses)
]


@pytest.mark.parametrize(("name", "kwargs", "response", "verdict"), CASES)
def test_a_response_follows_the_instruction_or_not(request, name, kwargs, response, verdict):
    if name in COUNT_SENTENCES:
        request.getfixturevalue("punkt")
    assert check([name], [kwargs], response) == [verdict]
    # What follows strictly follows loosely.
    assert not verdict or check([name], [kwargs], response, loose=True) == [True]


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_a_blank_response_follows_nothing(name):
    assert all(any(row[at] for row in TABLE if row[0] == name) for at in (2, 3))  # the table has each verdict
    kwargs = next(row[1] for row in TABLE if row[0] == name)
    for blank in ("", " \n\t\n "):
        assert check([name], [kwargs], blank) == [False]
        assert check([name], [kwargs], blank, loose=True) == [False]


LOOSE = [
    # strictly not, loosely yes: without the first line, the last, both, the asterisks, or all of it
    ("detectable_format:json_format", {}, "Sure, here it is:\n{}", True),
    ("detectable_format:json_format", {}, "{}\nI hope this helps!", True),
    ("detectable_format:json_format", {}, "**{}**", True),
    ("detectable_format:json_format", {}, "Sure:\n\n**{}**\n\nI hope this helps!", True),
    ("startend:quotation", {}, 'Sure:\n *"Hi"*\nBye.', True),
    ("keywords:existence", {"keywords": ["big deal"]}, "a *big* deal", True),
    # only one line goes at each end, and all asterisks or none
    ("detectable_format:json_format", {}, "Well,\nhere it is:\n{}", False),
    ("detectable_format:json_format", {}, "Sure: {}", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one*", False),
    # of one line, nothing is left without the first or the last
    ("punctuation:no_comma", {}, "Hello, World", False),
]


@pytest.mark.parametrize(("name", "kwargs", "response", "verdict"), LOOSE)
def test_a_loose_verdict_forgives_the_first_line_the_last_and_asterisks(name, kwargs, response, verdict):
    assert check([name], [kwargs], response) == [False]
    assert check([name], [kwargs], response, loose=True) == [verdict]


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (["keywords:exists"], [{}], r"instruction 1 \(keywords:exists\) is unknown; .* 25 known .* keywords:existence"),
        ([], [], "a row has 0 instructions and 0 sets of arguments"),
        (["startend:quotation", "keywords:existence"], [{}, {"keywords": None}], r"instruction 2 .* \['keywords'\]"),
        (["punctuation:no_comma"], [{"num_words": 3}], r"arguments \{'num_words': 3\}; it needs \[\], and no other"),
        (["length_constraints:number_words"], [{"num_words": -1, **LESS}], "num_words is -1: .* equal to 0"),
        (["keywords:existence"], [{"keywords": "art"}], "keywords is 'art': .* valid list"),
        (["length_constraints:nth_paragraph_first_word"],
         [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}], "paragraph 3 of 2; no response could"),
    ],
)  # fmt: skip
def test_a_wrong_instruction_is_named_and_nothing_is_drawn_in_its_place(ids, kwargs, message):
    with pytest.raises(ValueError, match=message):
        check(ids, kwargs, "a response")


def defined_paragraphs(text: str) -> int:
    """The number of paragraphs, -1 where one in the middle is blank."""
    pieces = re.split(r"\s?\*\*\*\s?", text)
    blank = [at for at, piece in enumerate(pieces) if not piece.strip()]
    return len(pieces) - len(blank) if set(blank) <= {0, len(pieces) - 1} else -1


# Patterns of the published definition, which take square time on hostile texts: ours must find the same without them.
DEFINED = {
    "detectable_content:number_placeholders": ("num_placeholders", lambda text: len(re.findall(r"\[.*?\]", text))),
    "detectable_format:number_bullet_lists": (
        "num_bullets",
        lambda text: len(re.findall(r"(?m)^\s*\*[^\*].*$", text)) + len(re.findall(r"(?m)^\s*-.*$", text)),
    ),
    "detectable_format:multiple_sections": ("num_sections", lambda text: len(re.split(r"\s?a\s?\d+\s?", text)) - 1),
    "length_constraints:number_paragraphs": ("num_paragraphs", defined_paragraphs),
}


@given(text=st.text(alphabet="*-[]a1 \t\n\r", min_size=1, max_size=40).filter(str.strip))
@pytest.mark.parametrize("name", DEFINED)
def test_the_count_is_the_one_that_the_definitions_pattern_finds(name, text):
    argument, count = DEFINED[name]
    more = {"section_spliter": "a"} if argument == "num_sections" else {}
    expected = count(text)
    for wanted in range(6):
        exact = argument in ("num_bullets", "num_paragraphs")
        followed = expected == wanted if exact else expected >= wanted
        assert check([name], [{argument: wanted, **more}], text) == [followed]


@given(text=st.text(alphabet="<>a \n", min_size=1, max_size=30).filter(str.strip))
def test_a_title_is_the_one_that_the_definitions_pattern_finds(text):
    titles = [title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text)]
    assert check(["detectable_format:title"], [{}], text) == [any(titles)]
