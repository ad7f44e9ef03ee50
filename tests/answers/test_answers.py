"""Finding and comparing answers: a table of cases, round trips of numbers, all of GSM8K, hostile text."""

import json
import re
import time
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.answers.compare import equal
from trainer.answers.find import STYLES, lenient, strict
from trainer.answers.notation import LONGEST_ANSWER
from trainer.answers.number import LARGEST_EXPONENT, number
from trainer.answers.strip_thinking import LONGEST_TEXT
from trainer.config.sections.reward import Reward
from trainer.records import Completion, Problem, Prompt
from trainer.reward.built_in import Rules, read

ROOT = Path(__file__).parents[2]
TABLE = yaml.safe_load((ROOT / "tests/data/answers.yaml").read_text(encoding="utf-8"))


def correct(text: str, style: str, gold: str) -> str:
    found = strict(text, style, gold), lenient(text, gold)
    by_strict, by_lenient = (one is not None and equal(one, gold) for one in found)
    return {(1, 1): "both", (1, 0): "strict", (0, 1): "lenient", (0, 0): "neither"}[by_strict, by_lenient]


@pytest.mark.parametrize("case", TABLE["found"], ids=lambda case: repr(case[0]))
def test_finds_what_the_table_says(case: list[str]) -> None:
    text, style, want_strict, want_lenient, gold, want_correct = case
    assert strict(text, style, gold) == want_strict
    assert (lenient(text, gold), correct(text, style, gold)) == (want_lenient, want_correct)


@pytest.mark.parametrize("case", TABLE["paid"], ids=lambda case: f"{case['form']} {case['gold']}")
def test_pays_what_the_table_says(case: dict[str, Any]) -> None:
    def is_paid(text: str) -> bool:
        found = strict(case["form"].format(text), case["style"], case["gold"])
        return found is not None and equal(found, case["gold"])

    assert [text for text in case["right"] if not is_paid(text)] == []
    assert [text for text in case["wrong"] if is_paid(text)] == []


@pytest.mark.parametrize("case", TABLE["compared"], ids=lambda case: f"{case[0]!r} vs {case[1]!r}")
def test_compares_as_the_table_says(case: tuple[str, str, bool]) -> None:
    answer, gold, same = case
    assert equal(answer, gold) is same


@pytest.mark.parametrize("case", TABLE["numbers"], ids=lambda case: repr(case[0]))
def test_reads_numbers_as_the_table_says(case: tuple[str, str | None]) -> None:
    text, value = case
    assert number(text) == (None if value is None else Fraction(value))


INTEGERS = st.integers(-(10**15), 10**15)
DRESSES = [
    "{}", " {} ", "{}.", "**{}**", "`{}`", "__{}__", "$\\mathbf{{{}}}$", "\\({}\\)", "\\[{}\\]", "\\text{{{}}}",
    "{} dollars", "{} km/h", "{}\\text{{ cm}}^2", "{}%", "{}\\%", "{} percent", "{}^\\circ", "{}^{{\\circ}}", "{} °C",
    "x = {}", "= {}", "\\textbf{{{}}}", "\u202e{}\u202c", "\u200b{}", "\0{}\0", "{}\\,\\text{{m}}",
]  # fmt: skip
MINUSES = ["-", "\u2212", "\u2013", "- ", "minus ", "negative "]
MONEY = [
    "{}${}", "${}{}", "\\${}{}", "$\\${}{}$", "{}\\${}", "€{}{}", "{}£ {}", "{}US${}", "USD {}{}", "**${}{}** in all",
    "{}{}€",
]  # fmt: skip


def signed(value: Fraction | int, text_of_magnitude: str, minus: str) -> str:
    return minus + text_of_magnitude if value < 0 else text_of_magnitude


@given(
    INTEGERS, st.sampled_from(DRESSES), st.sampled_from(MINUSES), st.sampled_from(["", ",", "{,}", ",\\!", "\u202f"])
)
def test_an_integer_in_any_dress_is_read_back(value: int, dress: str, minus: str, comma: str) -> None:
    text = dress.format(signed(value, f"{abs(value):,}".replace(",", comma), minus))
    assert number(text) == value, text


@given(INTEGERS, st.sampled_from(MONEY), st.sampled_from(["-", "\u2212"]), st.sampled_from(["", ".00", "."]))
def test_money_is_read_back(value: int, form: str, minus: str, zeros: str) -> None:
    text = form.format(minus if value < 0 else "", f"{abs(value):,}{zeros}")
    assert number(text) == value, text


@given(INTEGERS, st.integers(1, 12), st.sampled_from(DRESSES), st.sampled_from(MINUSES), st.integers(0, 3))
def test_a_decimal_in_any_dress_is_read_back(value: int, places: int, dress: str, minus: str, zeros: int) -> None:
    exact = Fraction(value, 10**places)
    digits = str(abs(value)).rjust(places + 1, "0")
    text = dress.format(signed(value, f"{digits[:-places]}.{digits[-places:]}{'0' * zeros}", minus))
    assert number(text) == exact, text


FRACTIONS = [
    "{}/{}", "{} / {}", "\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}", "\\tfrac {{{}}} {{{}}}", "\\cfrac{{{}}}{{{}}}",
]  # fmt: skip


@given(INTEGERS, st.integers(1, 10**9), st.sampled_from(FRACTIONS), st.sampled_from(["-", "\u2212", "- "]))
def test_a_fraction_is_read_back(top: int, bottom: int, form: str, minus: str) -> None:
    text = signed(top, form.format(abs(top), bottom), minus)
    assert number(text) == Fraction(top, bottom), text


@given(st.integers(0, 10**6), st.integers(0, 999), st.integers(1, 10**6), st.sampled_from(FRACTIONS), st.booleans())
def test_a_mixed_number_is_read_back(whole: int, top: int, bottom: int, form: str, negative: bool) -> None:
    text = ("-" if negative else "") + f"{whole} {form.format(top, bottom)}"
    value = whole + Fraction(top, bottom)
    assert number(text) == (-value if negative else value), text


POWERS = ["{}e{}", "{}E{}", "{} \\times 10^{{{}}}", "{}\\cdot10^{{{}}}", "{} × 10^{}", "{} x 10^{}", "{}*10^({})"]


@given(INTEGERS, st.integers(-LARGEST_EXPONENT, LARGEST_EXPONENT), st.sampled_from(POWERS))
def test_scientific_notation_is_read_back(value: int, exponent: int, form: str) -> None:
    assert number(form.format(value, exponent)) == value * Fraction(10) ** exponent


@given(st.lists(INTEGERS, min_size=2, max_size=6), st.sampled_from(["(){}", "[]{}", "(]{}", "[){}"]), st.randoms())
def test_tuples_keep_their_order_and_sets_do_not(values: list[int], brackets: str, random: object) -> None:
    shuffled = values[::-1]
    inside, backwards = ", ".join(map(str, values)), " ,".join(map(str, shuffled))
    opening, closing = brackets[0], brackets[1]
    assert equal(f"\\left{opening}{inside}\\right{closing}", f"{opening}{inside}{closing}")
    assert equal(f"{opening}{backwards}{closing}", f"{opening}{inside}{closing}") is (shuffled == values)
    assert equal(f"\\{{{backwards}\\}}", f"\\{{{inside}\\}}")


KINDS = ("So", "Sm", "Sk", "Sc", "Po")
SYMBOLS = [char for char in map(chr, range(0x20000)) if unicodedata.category(char) in KINDS]
SEQUENCES = [
    "👍", "👍🏽", "👍🏿", "🇫🇷", "🇩🇪", "🇫🇷🇩🇪", "👩\u200d🚀", "👩🚀", "👨\u200d🚀", "👨\u200d👩\u200d👧", "👨👩👧",
    "❤\ufe0f\u200d🔥", "❤🔥", "🏳\ufe0f\u200d🌈", "🏳", "🏳\ufe0f\u200d⚧\ufe0f", "F♯", "F♭", "F", "♯", "♭", "→", "←",
    "→←", "x→y", "x←y", "A♠", "A♥", "10♠", "10♥", "10", "½♥",
]  # fmt: skip


def test_symbols_are_equal_only_if_unicode_says_that_they_are_the_same() -> None:
    assert len(SYMBOLS) > 6_000
    for distance in (1, 2, 5):
        for one, other in zip(SYMBOLS, SYMBOLS[distance:]):
            same = unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
            assert equal(one, other) is same, (one, other)
            assert equal(f"${one}$", one)


@pytest.mark.parametrize("gold", SEQUENCES)
def test_sequences_of_symbols_are_equal_only_to_themselves(gold: str) -> None:
    assert [one for one in SEQUENCES if equal(one, gold)] == [gold]
    assert [one for one in SEQUENCES if equal(f"\\text{{{one}}}", gold)] == [gold]


@given(st.text(st.characters(categories=("L", "Mn", "Nd"), max_codepoint=0x1FFF), min_size=1, max_size=12))
def test_the_encoding_of_accents_makes_no_difference(text: str) -> None:
    composed, decomposed = unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
    assert equal(composed, decomposed)
    assert equal(decomposed, composed)


def is_paid_by(text: str, style: str, gold: str) -> tuple[bool, bool]:
    prompt = Prompt(Problem("p", "?", gold), "", ())
    reading = read(prompt, Completion((), (), text, truncated=False), Rules(Reward(), style, 100))
    return reading.correct_strict, reading.correct_lenient


def test_what_the_strict_reading_pays_the_lenient_one_pays_in_the_whole_table() -> None:
    cases = [(text, style, gold) for text, style, _, _, gold, _ in TABLE["found"]]
    cases += [(one["form"].format(text), one["style"], one["gold"]) for one in TABLE["paid"] for text in one["right"]]
    paid = [is_paid_by(*case) for case in cases]
    assert sum(by_strict for by_strict, _ in paid) > 600
    assert [case for case, pays in zip(cases, paid) if pays == (True, False)] == []


@pytest.fixture(scope="module")
def gsm8k(gsm8k_folder: Path) -> list[tuple[str, str]]:
    texts = [(gsm8k_folder / f"{split}.jsonl").read_text(encoding="utf-8") for split in ("train", "test")]
    solutions = [json.loads(line)["answer"] for text in texts for line in text.splitlines()]
    return [(one, one.rpartition("####")[2].strip()) for one in solutions]


def test_every_gold_answer_scores_against_itself_and_not_against_the_next_number(gsm8k) -> None:
    assert len(gsm8k) == 8792
    assert [text for text, gold in gsm8k if correct(text, "gsm8k", gold) != "both"] == []
    next_numbers = [(text, str(int(gold.replace(",", "")) + 1)) for text, gold in gsm8k]
    assert [text for text, other in next_numbers if correct(text, "gsm8k", other) != "neither"] == []


@pytest.mark.parametrize(
    "form", ["\\boxed{{{}}}", "<answer>{}</answer>", "So the answer is **{}**.", "That makes {} in total."]
)
def test_gold_answers_in_another_format_score_leniently(gsm8k, form: str) -> None:
    said = [(text.rpartition("####")[0] + form.format(gold), gold) for text, gold in gsm8k]
    wrong = [text for text, gold in said if correct(text, "gsm8k", gold) != "lenient"]
    assert wrong == []


MB = 1_000_000
# A text of a megabyte repeats one of these.
REPEATED = {
    "digits": "1", "digits of another script": "٣", "open boxes": "\\boxed{", "nested fractions": "\\frac{",
    "hashes": "#### ", "lines of hashes": "####\n", "headings": "#### Step 1:\n", "open tags": "<answer>",
    "closed tags": "</answer>", "phrases": "the answer is ", "half phrases": "the answer to ", "thoughts": "</think>",
    "stop tokens": "<|a|>", "numbers": "1 ", "dots": "1.", "slashes": "1/", "exponents": "1e1", "choices": "(C) or ",
    "dollars": "$", "stars": "*", "minuses": "\u2212", "vulgar fractions": "½", "second thoughts": "18, no wait, ",
    "spaces": " ", "newlines": "\n", "zero-width joiners": "\u200d", "commas": ",", "open braces": "{",
    "braces in pairs": "{}", "thoughts of several kinds": "<think>[THINK]</think>",
}  # fmt: skip
# Behind the mark of an answer: how it begins, what is repeated how often, and how it ends.
BEHIND = {
    "words in a bracket": ("(", "a", 40, " + 3) = 18"), "prepositions and pronouns": ("18 ", "for you ", 29, "for"),
    "labels": ("", "the answer is ", 28), "HTML tags": ("", "<b> ", 98, "x"), "metres": ("", "1m²", 130),
    "units": ("1 ", "ab/", 130), "units that fail late": ("1 ", "a ", 190, "!"), "equals signs": ("", "=", 390),
    "half bold": ("", "**a", 130), "escaped dollars": ("", "$\\", 190), "superscripts": ("1", "²", 390),
    "spaces within": ("1", " ", 390, "x"), "commas in a phrase": ("1", ",", 390), "sums": ("", "1 + ", 98, "1"),
    "quotients by zero": ("18 (", "1 / 0 / ", 45, "1)"), "denials": ("18", " not 1", 60),
    "contexts": ("18", " in the 1 days", 25), "corrections in a phrase": ("", "18, wait, ", 39, "18"),
    "nouns": ("18 ", "ab ", 190), "names": ("", "cost of ", 48, "is 18"), "clauses": ("", "so it is 18, ", 30),
    "prepositions": ("18 ", "in of to ", 40), "dotted thousands": ("1", ".234", 98), "apostrophes": ("1", "'234", 98),
    "pairs of digits": ("1", ",23", 130), "approximations": ("", "1/3 ≈ ", 60), "entries": ("", '{"a": ', 60),
    "hyphens": ("18 ", "twenty-", 55),
}  # fmt: skip
# How a text begins, what a megabyte of it repeats, and how it ends.
WITHIN = {
    "digits in a box": ("\\boxed{", "1", "}"), "digits behind hashes": ("#### ", "1", ""),
    "exponent of a megabyte": ("1e", "9", ""), "box far away": ("\\boxed", " ", "{18}"),
    "stop tokens of one kind": ("", "</s>", "<s>"), "numbers, then letters": ("", "1 ", "a" * (MB // 2)),
    "thousands": ("1", ",000", ""), "spaced thousands": ("1", " 000", ""),
    "digits, and a second thought": ("", "1", " wait " + "1" * 1_000),
    "groups of digits, and a second thought": ("actually 1", " 000", ""),
    "NUL bytes": ("", "\0", "#### 18\0"), "lone surrogates": ("", "\ud800", "#### 18\udfff"),
    "right-to-left marks": ("", "\u202e", "#### \u202e18\u202c"), "emoji": ("", "🎉", "#### 18"),
    "joiners between pictures": ("#### ", "🎉\u200d", ""), "decomposed accents": ("#### ", "a\u0301", ""),
    "accents on one letter": ("#### 1", "\u0301", ""),
}  # fmt: skip
HOSTILE = {
    "power tower": "#### 9**9**9", "huge exponent": "#### 1e999999999", "huge power of ten": "\\boxed{10^{999999999}}",
    "nested braces": "\\boxed{" + "{" * MB + "}" * MB + "}", "nested boxes": "\\boxed{" * 50 + "1" + "}" * 50,
    "nested brackets": "\\boxed{" + "(" * 150 + "," * 50 + ")" * 150 + "}", "brackets": "#### " + "(" * 195 + ")" * 195,
    "nested text": "\\boxed{" + "\\text{" * 60 + "}" * 60 + "}", "long list": "\\boxed{" + "1," * 190 + "1}",
    "long union": "\\boxed{" + "(1,2)\\cup" * 39 + "(1,2)}", "products": "#### 18 (" + f"{'9' * 60} * " * 5 + "9)",
    "blank lines behind an answer": "The answer is" + "\n" * 380 + "18",
}  # fmt: skip
HOSTILE |= {name: unit * (MB // len(unit)) for name, unit in REPEATED.items()}
HOSTILE |= {name: begins + unit * (MB // len(unit)) + end for name, (begins, unit, end) in WITHIN.items()}
HOSTILE |= {name: f"#### {begins}{unit * times}{''.join(end)}" for name, (begins, unit, times, *end) in BEHIND.items()}
MOST_SECONDS = 0.05


def score(text: str, style: str) -> None:
    for found in (strict(text, style), lenient(text)):
        if found is not None:
            equal(found, "18")
            equal(found, found[::-1])


def is_in_time(work: Callable[[], None]) -> bool:
    """Tell whether one of up to ten tries takes a short processor time: a busy machine is not the parser's fault."""
    for _ in range(10):
        start = time.process_time()
        work()
        if time.process_time() - start < MOST_SECONDS:
            return True
    return False


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_scored_in_time(name: str) -> None:
    for style in STYLES:
        assert is_in_time(partial(score, HOSTILE[name], style)), style


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_compared_in_time(name: str) -> None:
    text = HOSTILE[name]

    def compare() -> None:
        assert equal(text, text + " ")
        assert not equal(text, "17")
        assert number(text) != 17

    assert is_in_time(compare)


MODULES = [import_module(f"trainer.answers.{path.stem}") for path in sorted((ROOT / "trainer/answers").glob("*.py"))]
PATTERNS = {
    f"{module.__name__}.{name}": pattern
    for module in MODULES
    for name, pattern in vars(module).items()
    if isinstance(pattern, re.Pattern)
}
UNITS = [*" 1a{}(),.-=$*#'\"\n\\", "1,", "1 ", "1.", "1/", ",000", " 000", "1 * ", "a ", "ab ", "not ", "in the 1 ",
         "nswer is ", "twenty-", "km/", "<|a|>", "\\boxed{1}", "{}", "()", "**", "w", "wv",
          "wp", "pdw", "N", "1'", "1.234"]  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_no_pattern_goes_on_for_ever_on_the_longest_phrase(name: str) -> None:
    for unit in UNITS:
        text = (unit * LONGEST_ANSWER)[:LONGEST_ANSWER]
        for end in ("", "!", "z1"):
            assert len(PATTERNS[name].findall(text + end)) <= 2 * len(text + end) + 1


@pytest.mark.parametrize("name", ["NUL bytes", "lone surrogates", "right-to-left marks", "emoji"])
def test_what_is_only_invisible_does_not_hide_the_answer(name: str) -> None:
    assert correct(HOSTILE[name], "gsm8k", "18") == "both"


@pytest.mark.parametrize("name", ["digits", "digits in a box", "digits behind hashes", "exponent of a megabyte"])
def test_a_piece_of_a_huge_number_is_not_an_answer(name: str) -> None:
    assert [strict(HOSTILE[name], style) for style in STYLES] == [None] * len(STYLES)
    assert lenient(HOSTILE[name]) is None


def test_only_the_end_of_an_endless_text_is_read() -> None:
    assert strict("#### 18\n" + "x" * (LONGEST_TEXT - 100), "gsm8k") == "18"
    assert strict("#### 18\n" + "x" * LONGEST_TEXT, "gsm8k") is None


FRAGMENTS = st.sampled_from([
    "\\boxed{", "\\fbox", "\\frac", "\\frac{1}", "\\cup", "\\text{", "{", "}", "\\{", "\\}", "(", ")", "[", "]", "####",
    "<answer>", "</answer>", "</think>", "the answer is ", "Answer:", "\n", " ", ".", ",", "1", "23", "000", "/", "e9",
    "10^", "*", "**", "$", "\\$", "%", "-", "\u2212", "=", "C", "(C)", " or ", " and ", "pi", " dollars", "½", "²",
    "yes", "no", "Tim", "third", "\0", "\ud800",
])  # fmt: skip
GENERATED = st.one_of(st.lists(FRAGMENTS, max_size=40).map("".join), st.text(st.characters(), max_size=60))


@settings(max_examples=400)
@given(GENERATED)
@example("\\boxed{\\frac{1}{0}}")
@example("10^{-}")
@example("#### yes (+)")
def test_no_text_raises_and_every_answer_equals_itself(text: str) -> None:
    for gold in ("", "yes", "no", "Tim and Sarah", "3rd", "C", "x = 1"):
        for found in (lenient(text, gold), *(strict(text, style, gold) for style in STYLES)):
            assert found is None or equal(found, found)
    assert equal(text, text)


@settings(max_examples=400)
@given(GENERATED, GENERATED, st.sampled_from(STYLES))
@example("#### 1\nso ", "\\boxed{23}", "gsm8k")
@example("#### 1, no wait, 23", "", "gsm8k")
def test_whatever_the_strict_reading_pays_the_lenient_one_pays(text: str, more: str, style: str) -> None:
    for gold in (strict(text + more, style) or "1", "1", "C"):
        assert is_paid_by(text + more, style, gold) != (True, False)


QUOTED = re.compile("`([^`]*)`")


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of a table of this page, whose first line begins so."""
    lines = (ROOT / "docs" / page).read_text().split(heading)[1].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize(("what", "gold", "right", "wrong"), rows_of("rewards.md", "| | gold answer |"))
def test_the_table_of_equal_answers_is_true(what: str, gold: str, right: str, wrong: str) -> None:
    answer = QUOTED.findall(gold)[0]
    for texts, is_right in ((right, True), (wrong, False)):
        found = QUOTED.findall(texts.partition(", but")[0])
        assert [one for one in found if is_paid_by(f"<answer>{one}</answer>", "tags", answer)[0] != is_right] == []


@pytest.mark.parametrize(("what", "texts"), rows_of("rewards.md", "| after the mark |"))
def test_the_table_of_statements_is_true(what: str, texts: str) -> None:
    found = QUOTED.findall(texts)
    assert [is_paid_by(f"#### {one}", "gsm8k", "18") for one in found] == [("right" in what,) * 2] * len(found)


@pytest.mark.parametrize(("texts", "by_strict", "by_lenient"), rows_of("rewards.md", "| text | strict |"))
def test_the_table_of_marks_is_true(texts: str, by_strict: str, by_lenient: str) -> None:
    for one in QUOTED.findall(texts.rpartition("`:")[0] + "`"):
        style = "boxed" if "boxed" in one else "gsm8k"
        assert is_paid_by(one, style, "18") == (by_strict == "right", by_lenient == "right"), one
