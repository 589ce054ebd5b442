r"""The 25 instruction types of IFEval, each a pure function of a response and of the instruction's arguments.

Source: https://arxiv.org/abs/2311.07911, and the reference scorer, which decides where the paper leaves a choice:
https://github.com/google-research/google-research/tree/master/instruction_following_eval

Two things differ from the reference, on purpose: an argument is taken as it is, where the reference draws a random one
for a missing or an odd one; and a keyword is a text, where it takes it for a regular expression. Whatever the response,
a check takes time about linear in it: where a hostile response would make them square, `\s*` before a pattern and
`.*` in one are left out.
"""

import json
import re
from collections.abc import Callable, Sequence

from grpo_rl.envs.ifeval.language import count_capital_words, count_sentences, detect_language

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The responses that a constrained question allows."""

_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_FENCES = ("```json", "```Json", "```JSON", "```")
_ENDS_WORD = frozenset(".,?!'\"")


def compare(count: int, relation: str, threshold: int) -> bool:
    """True if ``count`` stands in the relation to the threshold.

    >>> compare(0, "less than", 0), compare(0, "at least", 0)
    (False, True)
    """
    return count < threshold if relation == "less than" else count >= threshold


def existence(response: str, *, keywords: Sequence[str]) -> bool:
    """True if every keyword is there, whatever its case; ``art`` is in ``party`` too."""
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """True if the keyword is there so often, whatever its case, inside other words too."""
    found = re.findall(re.escape(keyword.strip()), response, re.IGNORECASE)
    return compare(len(found), relation, frequency)


def forbidden_words(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """True if none of the words is there, whatever its case; inside another word it is none."""
    # Not \b: next to "C++" it would ask for a letter.
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """True if the letter, or any other character, is there so often, whatever its case."""
    return compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(response: str, *, language: str) -> bool:
    """True if the response is in the language; a response without letters is in every language."""
    return detect_language(response) in (language, None)


def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """True if there are so many sentences."""
    return compare(count_sentences(response), relation, num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """True if ``***`` divides the response into exactly so many paragraphs, none empty.

    A divider may open and close the response.
    """
    first, *rest = [bool(part.strip()) for part in response.split("***")]
    return all(rest[:-1]) and first + sum(rest) == num_paragraphs


def number_words(response: str, *, num_words: int, relation: str) -> bool:
    """True if there are so many words: runs of letters, digits and underscores, so that ``don't`` is two."""
    return compare(len(re.findall(r"\w+", response)), relation, num_words)


def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True if empty lines part exactly so many paragraphs, and the nth begins with the word, whatever its case.

    Of the word, an opening quotation mark and what follows a punctuation mark don't count.
    """
    # Two empty lines in a row leave a blank piece. It is no paragraph, and yet is counted on the way to the nth.
    pieces = [piece.strip() for piece in response.split("\n\n")]
    count = sum(map(bool, pieces))
    if nth_paragraph > count or not (paragraph := pieces[nth_paragraph - 1]):
        return False
    word = paragraph.split(maxsplit=1)[0].lstrip("'").lstrip('"')
    end = next((at for at, character in enumerate(word) if character in _ENDS_WORD), len(word))
    return count == num_paragraphs and word[:end].lower() == first_word.lower()


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    """True if there are at least so many placeholders, such as ``[address]``."""
    return sum(_placeholders(line) for line in response.split("\n") if "[" in line) >= num_placeholders


def _placeholders(line: str) -> int:
    r"""Matches of ``\[.*?\]``, which itself takes square time on a line of opening brackets."""
    count = 0
    end = -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def postscript(response: str, *, postscript_marker: str) -> bool:
    """True if the marker is there, whatever its case; in ``P.S.`` and ``P.P.S`` a space may follow each point."""
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, re.escape(marker.lower()))
    return re.search(pattern, response.lower()) is not None


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    """True if exactly so many lines begin with ``*`` (not ``**``) or ``-``."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-", response, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(response: str) -> bool:
    """True if one of :data:`OPTIONS` is there, with its point."""
    return any(option in response for option in OPTIONS)


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """True if at least so many highlights are not blank: ``*one*`` and ``**one**`` within a line."""
    single = re.findall(r"\*([^\n*]*)\*", response)
    double = re.findall(r"\*\*([^\n*]*)\*\*", response)
    return sum(bool(text.strip()) for text in single + double) >= num_highlights


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """True if there are at least so many headings: the splitter, then a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def json_format(response: str) -> bool:
    """True if the response is JSON, inside a Markdown fence or not."""
    text = response.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """True if there is a title that is not blank, such as ``<<poem of joy>>``, within a line."""
    return any(_title(line).strip() for line in response.split("\n") if "<<" in line)


def _title(line: str) -> str:
    """The text from the first ``<<`` to the last ``>>``, without either; empty where there is none."""
    start, end = line.find("<<"), line.rfind(">>")
    return line[start:end].lstrip("<").rstrip(">") if 0 <= start < end - 2 else ""


def two_responses(response: str) -> bool:
    """True if ``******`` parts exactly two different responses; it may open and close them too."""
    parts = [part.strip() for part in response.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    """True if the response begins with the request, whatever its case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    """True if the response ends with the phrase, whatever its case; quotation marks may close it."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(response: str) -> bool:
    """True if the whole response stands in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """True if there are so many words in capitals."""
    return compare(count_capital_words(response), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """True if the response is English (or has nothing to tell it by) and without small letters."""
    return response.isupper() and detect_language(response) in ("en", None)


def english_lowercase(response: str) -> bool:
    """True if the response is English (or has nothing to tell it by) and without capital letters."""
    return response.islower() and detect_language(response) in ("en", None)


def no_comma(response: str) -> bool:
    """True if there is no comma."""
    return "," not in response


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    f"{group}:{check.__name__}": check
    for group, checks in {
        "keywords": (existence, frequency, forbidden_words, letter_frequency),
        "language": (response_language,),
        "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
        "detectable_content": (number_placeholders, postscript),
        "detectable_format": (
            number_bullet_lists, constrained_response, number_highlighted_sections, multiple_sections, json_format,
            title,
        ),
        "combination": (two_responses, repeat_prompt),
        "startend": (end_checker, quotation),
        "change_case": (capital_word_frequency, english_capital, english_lowercase),
        "punctuation": (no_comma,),
    }.items()
    for check in checks
}  # fmt: skip
"""The check of each instruction id; its keyword-only parameters are the instruction's arguments."""
