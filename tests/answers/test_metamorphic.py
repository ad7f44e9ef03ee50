"""What is said around an answer does not change whether it is right. A second, different answer beside it does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.answers.compare import equal
from trainer.answers.find import lenient, strict

quick = settings(max_examples=150, deadline=None, derandomize=True)

MARKS = {"gsm8k": "#### {}", "boxed": "\\boxed{{{}}}", "tags": "<answer>{}</answer>", "letter": "Answer: {}"}
TEXTS = ["Apollo 11", "World War 2", "the end of the cold war", "Summary judgment", "7 Up", "U.S. Grant", "Catch-22",
         "x^2 + 1", "\\frac{\\pi}{4}", "(1, 2)", "2 \\sqrt{3}", "Answer to Job", "21 Savage", "yes", "n"]  # fmt: skip


def is_right(text: str, style: str, gold: str) -> tuple[bool, bool]:
    found = strict(text, style, gold), lenient(text, gold)
    return found[0] is not None and equal(found[0], gold), found[1] is not None and equal(found[1], gold)


NUMBERS = st.integers(-20_000, 20_000).map(str)
STYLES = st.sampled_from(["gsm8k", "boxed", "tags"])
# A gold answer, another one, and where they have to stand.
CASES = st.one_of(
    st.tuples(NUMBERS, NUMBERS, STYLES),
    st.tuples(st.sampled_from(TEXTS), st.sampled_from(TEXTS), STYLES),
    st.tuples(st.sampled_from("ABCDEFGHIJ"), st.sampled_from("ABCDEFGHIJ"), st.just("letter")),
).filter(lambda case: case[0] != case[1])

BEFORE = ["", " ", "\n\n", "First, 3 * 4 = 12, so 5 are left.\n", "Let me think. Is it 7 or 8? ", "**Solution**\n\n",
          "## Step 1: read (A) and (B)\n", "Die Antwort lautet wie folgt:\n", "<think>It may be 17.</think>\n",
          "<think>#### 17\nAnswer: A</think>", "<seed:think>#### 17</seed:think>",
          "[THINK]It may be 17.[/THINK]"]  # fmt: skip
DRESSES = ["{}", " {} ", "**{}**", "`{}`", "{}.", "\u200b{}\u200b", "\u00a0{}", "*{}*", "**{}**."]
AFTER = ["", "\n", "  \n\n", "\nI hope this helps!", "\n\nLet me know if you have any questions.", "\nThank you.",
         "<|im_end|>", "\n\nThat took 3 steps."]  # fmt: skip


@quick
@given(CASES, st.sampled_from(BEFORE), st.sampled_from(DRESSES), st.sampled_from(AFTER), st.integers(1, 3))
def test_what_stands_around_an_answer_makes_no_difference(
    case: tuple[str, str, str], before: str, dress: str, after: str, times: int
) -> None:
    gold, other, style = case
    said = "\n".join([MARKS[style].format(dress.format(gold))] * times)
    text = before + ("\n" if before else "") + said + after
    assert is_right(text, style, gold) == (True, True)
    assert is_right(text, style, other) == (False, False)


NOTATIONS = [
    "{}", "{}.0", "{}.00", "${}", "{} dollars", "{} eggs", "{}%", "{} cm", "\\${}", "x = {}", "{} apples in all",
    "\\text{{{}}}", "{}/1", "{}e0", "{0} * 1 = {0}", "{} dollars per day", "{} (see above)",
    "{0} because 1 * {0} = {0}",
    "\\frac{{{}}}{{1}}", "The answer is {}", "She has {} eggs", "{} in 3 days", "{}. I hope this helps!",
    "{0} = {0}", "{0} eggs ({0} eggs)", "{0}, that is {0}.0", "{0} eggs ({0} x 1)", "{} eggs left over",
    "\\large {}", "\\color{{red}}{{{}}}", "\\textcolor{{red}}{{{}}}", "\\text{{Tom has }}{}", "{} (not -1)",
    "{} rather than -1", "{0} = 1 * {0}", "{0} + 0 = {0} eggs, so {0}", "{0} eggs, as {0} - 1 + 1 = {0}",
    "{} for 3 days",
    "She makes {} dollars a day for each of 3 friends", "{} eggs, not -1", "{0} dollars (1 * {0})", "\\Large\\bf {}",
]  # fmt: skip


@quick
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sampled_from(NOTATIONS), STYLES, st.sampled_from(["", ","]))
def test_another_notation_is_the_same_number(value: int, more: int, notation: str, style: str, comma: str) -> None:
    text = MARKS[style].format(notation.format(f"{value:{comma}}"))
    assert is_right(text, style, str(value)) == (True, True)
    assert is_right(text, style, str(value + more)) == (False, False)


# What makes another value, or no answer, of a number.
CHANGED = [
    "{}0", "{}.5", "1{}", "-{}", "{}e1", "{}^2", "{}x", "{} x", "{}y + 1", "{} - 1", "{} * 2", "2{}", "{}:30", "0.{}",
    "{}!", "{} squared", "{} halves", "{} over 5", "{} mod 7", "\\sqrt{{{}}}", "\\frac{{1}}{{{}}}", "{}_8", "{}\\pi",
    "{} \\theta", "{} theta", "> {}", "\\leq {}", "not {}", "never {}", "{} is not right", "{} is incorrect",
    "{} minus 2", "twice {}", "half of {}", "{} times x", "{} to the power of 2", "{} thousandths", "{} tenths",
    "{} per x", "{}/x", "{} a",
    "{} - m", "{} - g", "{} m - 3", "{} m * m", "{}m", "at most {}", "up to {}", "log {}", "e^{{{}}}", "({}, x)",
    "{} remainder 2", "{} and a half", "{} and two thirds", "{} 1/2", "{}½", "{} or more", "over {}", "{} and up",
    "{} \\pm 2", "{} false", "{} nope", "no {}", "{} if x", "{} million", "{} factorial", "{} negative", "({})^2",
    "above {}", "{} (* 2)", "{} (2 * 3 / 0)", "isn't {}", "cannot be {}", "{} minus one", "7^{}", "7:{}", "{}:07",
    "{} of 7", "2x = {}", "x^2 = {}", "x + 2 = {}", "{0} - x = {0}", "-x = {}", "|x| = {}", "1/x = {}",
    "\\sqrt{{x}} = {}", "2 * 0 = {}", "\\large {}x", "{} - 7 = ", "about {}", "~{}", "{} dozen",
]  # fmt: skip


@quick
@given(st.integers(2, 10**6), st.sampled_from(CHANGED), STYLES)
def test_what_changes_a_number_makes_it_wrong(value: int, changed: str, style: str) -> None:
    assert is_right(MARKS[style].format(changed.format(value)), style, str(value)) == (False, False)


BESIDE = [
    "{} or {}", "{}, {}", "{} and {}", "{}; {}", "{} or maybe {}", "{}, or {}", "{} ({})", "{} (or {})",
    "{}, but maybe {}", "{}, perhaps {}", "{} \\text{{ or }} {}", "{} \\quad {}", "either {} or {}", "{}. Or {}.",
    "x = {}, y = {}", "x = {} or x = {}", "x={} \\text{{ or }} x={}", "Tom = {} and Ann = {}", "{} & {}", "{} vs {}",
    "{} apples and {} pears", "{} | {}", "not {}, {}", "{}, though it could be {}", "{}, alternatively {}", "{} - {}",
    "{} {}", "{} to {}", "{} ... {}", "{}: {}", "first {}, then {}", "{}? {}?", "{}\t{}", "{} \\\\ {}",
    "[{}, {}]", "{{{}, {}}}", "{} eggs, {} eggs", "{}, possibly {}", "{} and also {}",
    "{} left {} left", "{} used, {} left", "{} used and {} left over", "{} for {} for 7", "{} (that is {})", "{} by {}",
    "{} (as {} = 7 * 7)", "{} with {} remaining", "{} of {}", "{} ({} in total)", "He has {} and she has {}",
    "{} out of {}",
    "\\large {} \\small {}", "{} bought and {} sold", "{} before and {} after", "{} #### {}",
    "{} in 3 days, {} in 4 days",
]  # fmt: skip


@quick
@given(CASES, st.sampled_from(BESIDE), st.booleans(), st.sampled_from(BEFORE))
def test_a_second_answer_beside_it_makes_it_wrong(
    case: tuple[str, str, str], beside: str, first: bool, before: str
) -> None:
    gold, other, style = case
    both = beside.format(*((gold, other) if first else (other, gold)))
    text = before + ("\n" if before else "") + MARKS[style].format(both)
    assert is_right(text, style, gold) == (False, False)
