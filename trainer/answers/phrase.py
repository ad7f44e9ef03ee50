r"""Read the number that a phrase offers as its answer: 18 in `#### She has 18 eggs (6 x 3), not 20`.

First drop what is not the answer: working (`3 * 6 =`), numbers that are denied (`not 20`), and numbers in a harmless
context (`in 3 days`). The rest is an answer if it has a single number, in whatever notation, if the working (`6 x 3`)
has the same result, and if the words around the number state it (`grammar.py`): `hardly 18` offers nothing.
"""

import re
from fractions import Fraction
from functools import lru_cache

from trainer.answers.compare import ORDINAL
from trainer.answers.grammar import CORRECTING, REASON, SO, TEXT, fits, is_statement, kind, unit, unit_kind
from trainer.answers.notation import BOLD, LONGEST_ANSWER, VULGAR_FRACTIONS, WRAPPERS, clean, to_ascii
from trainer.answers.number import CURRENCY, DECIMAL, MYRIADS, number, with_cents, worked_out
from trainer.answers.number_words import in_digits
from trainer.answers.patterns import any_of

WINDOW = 200  # characters before the last digit in which the last number begins
_SIGN = r"(?:(?<!\))-\s?(?=[$€£\\])|(?<![\w)])[-+](?=[0-9.]))"  # of -$3 and -3, but not of 5-3
_FRACTION = rf"[0-9]*\\[dt]?frac\{{-?{DECIMAL}\}}\{{{DECIMAL}\}}"  # 2\frac{3}{4}
_MIXED = r"[0-9]+[ ][0-9]+/[0-9]+(?![0-9])"  # 3 1/2
_POWER_OF_TEN = r"(?:[eE][-+]?[0-9]+(?!\w)|\s?(?:\*|x|\\times|\\cdot)\s?10\^\{?-?[0-9]+\}?)"  # e3, * 10^3
_SCALE = rf"(?:\s(?:hundred|thousand|[mb]illion)s?\b)+|\sgrand\b(?!\s[a-z])|\s?{MYRIADS}"  # million
_NUMBER = rf"""{_SIGN}?
    (?:{_FRACTION}|(?:{CURRENCY}\s?-?)?(?:{_MIXED}|{DECIMAL}(?:\s?/\s?[0-9]+(?![0-9])|{_POWER_OF_TEN})?))
    (?:\s?(?:\\?%|€(?!\s?[a-z]*(?:thousand|illion)))|{_SCALE})?"""
_NUMERAL = re.compile(_NUMBER, re.VERBOSE)
_OPERAND = rf"{CURRENCY}?{DECIMAL}%?(?:[ ][a-z]{{2,}}(?=[ ]?(?:[-+*/=]|x[ ])))?"  # $3, 50%, 6 eggs
_NO_OPERAND = re.compile("[a-z]{2,}|=.*")
_SIGN_WORDS = {"times": "*", "multiplied by": "*", "plus": "+", "minus": "-"}
_SPOKEN_SIGN = re.compile(rf"(?<=[0-9]) ({'|'.join(_SIGN_WORDS)}) (?=[0-9])|(?<=%) (of) (?=[0-9])")  # "8 times 8"
CORRECTION = re.compile(rf"(?i)[ \t,.;(-]{{1,4}}{CORRECTING}\b(?:[ \t,.:;!-]{{1,4}}no\b)?")  # "18, wait, no, 20"
_WORKING = re.compile(
    rf"""(?x)(?<![\w.^]){_OPERAND}(?:\s?[-+*/x]\s?{_OPERAND})+(?![\w^!(]|[.][0-9])  # "3 boxes * 6 eggs", "6 x 3"
    (?P<equals>\s?=(?:\s?(?P<step>{_OPERAND})  # and with the result if it is only a step:
        (?:[,;.]?\s(?:so|then)\s(?={_OPERAND}\s?[-+*/x]\s?[$0-9])  # "8 + 4 = 12, so 12 * 2"
        |[,;]\s(?=(?P=step)\s?[-+*/x])))?)?"""  # "8 + 4 = 12, 12 * 2"
)
_DENIED = re.compile(  # the 20 of "18 (not 20)" and "18 rather than 20"
    rf"(?xi)(?<=[\s,(])(?:(?:and\s+)?not|rather\s+than|instead\s+of)\s+(?P<number>{_NUMBER})(?![\w.^])"
)
_PREPOSITION = any_of("in for per each every within after before during at on over")
_DETERMINER = any_of("of the a all only about each every these those his her their its")
_CONTEXT = re.compile(
    rf"""(?xi)\b{_PREPOSITION}(?:\s+the\s[a-z]+\sof)?\s+(?:{_DETERMINER}\s+){{0,3}}  # "for each of 5 friends"
    {_NUMBER}\s+(?!(?:{_PREPOSITION}|and|to)\b)(?=[a-z]{{2}})"""
)
_OCCASION = re.compile(
    rf"""(?xi)\b(?:(?:after|by)\s[a-z]+ing(?:\s[a-z]+)?|to\sbuy)\s{_NUMBER}(?![\w.^])  # "after selling 3"
    |{_NUMBER}\s(?:second|minute|hour|day|week|month|year)s?\s(?:later|ago|from\snow)  # "3 days later"
    |(?<=[0-9])(?<![/.][0-9])(?<![/.][0-9]{{2}})\sof\s(?:the|his|her|their)\s{_NUMBER}\s[a-z]{{3,}}"""  # of the 30 eggs
)
_UNIT_IN_BRACKETS = re.compile(r"(?<=[0-9]) \((?!dozen)([a-z]+s(?:\s[^()0-9]+)?|(?:final\s)?answer)\)")  # 18 (dollars)
_WORD = r"[^\W\d_]\w*(?:'\w+|(?<=\w\w)(?:/|-(?=[^\W\d_]{2}))[^\W\d_]\w*)*"  # eggs, she's, push-ups
# A number with the letters joined to it, a word, or a punctuation mark: `18cm`, `per`, `,`.
_TOKEN = re.compile(
    rf"(?P<number>{_NUMBER})(?P<unit>(?<!\.)[/-]?{_WORD})?|(?P<word>{_WORD})|(?P<mark>[,.;:!()\[\]=/~-])", re.VERBOSE
)
_MARKS = {"=": "=", ":": ":", "/": "p", "~": "Q"}
_UNIT_BEHIND = re.compile(r"\s(?:(?:square|cubic|sq|cu)\s)?(?!in\s)([A-Za-z]+)")
_GRAMS = re.compile(r"(?<=[0-9]{2})(?=[gLh]\Z)")  # 500g, but 5g may be algebra
_DIMENSION = {"2": "square", "3": "cubic"}
_POWER = re.compile(r"(?<=[0-9]\s)([A-Za-z]+)\s?\^\s?\{?([23])\}?")  # 30 cm^2
# Remarks that say nothing about the answer, with an example of each.
_REMARK = re.compile(
    r"""(?xi)
    \b(?:I\s(?:think|believe)|I(?:'m|\sam)\s(?:sure|certain)|we\s(?:find|see|conclude))(?:\sthat)?\b  # I think that
    |\b(?:a\s)?total\sof\b|(?<=[a-z]\s)(?:therefore|thus|hence)\b|\bi\.e\.  # She therefore has a total of 18
    |\b(?:which|this|that)\s(?:gives|makes|means|leaves)\b(?:\sthat\b)?  # which gives 18
    |,?\sas\s(?:computed|calculated|shown|required|requested)(?:\sabove)?\b|\(?\bsee\s[^().]*\)?  # 18 (see above)
    |\b(?:(?:I\s)?hope\s(?:this|that|it)|(?:please\s)?let[ ]me[ ]know|thank)\b[^.!]*  # I hope this helps
    |\b(?:mrs?|ms|dr)\.\s|(?-i:(?:\b[A-Z][a-z]+,\s){2,}and\s(?=[A-Z]))  # Ann, Bob, and Mr. Lee have 18
    |(?<=the\s)(?:first|second|third)(?=\s(?!of\b)[a-z])  # the first number is 18
    |(?:(?<=the\s)|(?<=all\s))(?:two|three|four|five|six)(?:\sof\sthem)?(?=\s[a-z][^.]*[0-9])  # the two of them have 18
    |\bat\sfirst$|\bso\sfar\b|\bus(?=\sdollars)|(?<=[0-9])です"""  # She has 18 US dollars so far
)
_SO = re.compile(rf"(?i)(.+)[,;]\s{SO}\b(.*[0-9].*)")  # 20 - 2, so 18
_IS = re.compile(r"\s?(?:=|(?:is|equals|must\sbe)\s-?[$0-9])")
_YEAR = re.compile(r"(?i)\b(?:in(?= [12]\d{3}\b(?! ?[a-z]))|(?:in )?(?:the )?year(?= [0-9]))")  # "It sank in 1912"
_SUMS = re.compile(r"\bconsists? of\b|\b(?:add|sum|work|come)s? (?:up|out) to\b")  # adds up to 18
# Signs that a number, written as 0 here, is not stated alone. "12-inch", "$18/hour" and "over/under" have none.
_ALGEBRA = re.compile(
    r"""(?xi)[^\w\s.,;:!()\[\]"'$&=~/-]|_|[0-9][!(]|!=|0,0  # 18^2, 18_8, 18!, 18(x + 1)
    |-(?![a-z]{3}|[0-9.$€£])|(?<!\w)-(?![0-9.$€£])|(?<!\w)/|/(?![a-z])  # 18 - x, 18/(x + 1)
    |\bused\sto\b|\b(?:an?|one)\s0th  # "an 18th"
    |\bshould\shave\s[a-z]|\b(?:answer|result|solution)\s(?:has|had|contains)\b"""
)
DIGIT = re.compile(f"[\\d{''.join(VULGAR_FRACTIONS)}]")


def tidy(phrase: str) -> str:
    """Strip the markup and punctuation around an answer, and leave the answer as it was written."""
    before, phrase = "", BOLD.sub(r"\2", phrase.strip().lstrip("# "))
    while phrase != before:  # layer by layer: `**$18$**.` has three
        before, phrase = phrase, phrase.rstrip(".,;: \\").strip(WRAPPERS)
        if phrase.startswith("$") and phrase.endswith("$") and len(phrase) > 2:
            phrase = phrase.strip("$").strip()
        elif phrase.startswith(("\\(", "\\[")) and phrase.endswith(("\\)", "\\]")):
            phrase = phrase[2:-2].strip()
    return phrase


@lru_cache(maxsize=1024)  # a completion is read twice, and the answers of a group are often the same
def offered(phrase: str) -> str | None:
    """Return the number that a phrase offers, as written, or the whole phrase if it does not offer one number."""
    phrase = tidy(phrase)
    if not phrase or number(phrase) is not None:
        return phrase or None
    return _among_words(phrase) or phrase


def _among_words(phrase: str) -> str | None:
    """Drop what is not the answer, and return the remaining number unless something that was dropped contradicts it."""
    plain = with_cents(" ".join(clean("; ".join(phrase.split("\n"))).split()))
    plain = in_digits(_REMARK.sub(" ", _SUMS.sub("equals", _YEAR.sub("anno", plain))))
    plain = _SPOKEN_SIGN.sub(lambda sign: _SIGN_WORDS.get(sign[1], "*"), plain)
    if number(plain) is not None:
        return plain
    plain = _POWER.sub(lambda power: f"{_DIMENSION[power[2]]} {power[1]}" if unit(power[1]) else power[0], plain)
    if (first := DIGIT.search(plain)) is None:
        return None
    start, rest = plain[: first.end()], plain[first.end() :]  # keep the denied 17 of "not 17, 18"
    denied = {number(match["number"]) for match in _DENIED.finditer(rest)}
    plain, results = _without_working(_UNIT_IN_BRACKETS.sub(r" \1", _GRAMS.sub(" ", start + _DENIED.sub(" ", rest))))
    without = _CONTEXT.sub(" in the ", _OCCASION.sub(" now ", plain, count=1), count=1)
    answer = _only_number(_concluded(without if DIGIT.search(without) else plain))
    is_sure = answer is not None and results <= {number(answer)} and number(answer) not in denied
    return answer if is_sure else None


def _without_working(plain: str) -> tuple[str, set[Fraction | None]]:
    """Drop `3 * 6 =`, and return what it comes to. A step such as `8 + 4 = 12, so` counts only if it is wrong."""
    results = set[Fraction | None]()

    def drop(working: re.Match[str]) -> str:
        if not working["equals"] and number(working[0]) is not None:  # a fraction
            return working[0]
        result, step = worked_out(_NO_OPERAND.sub("", working[0])), working["step"]
        if step is None or result != number(step):
            results.add(None if step else result)
        return " "

    return _WORKING.sub(drop, plain), results


def _concluded(plain: str) -> str:
    """Return `she has 18` for `She had 20 and ate 2, so she has 18`, but all of `20, so 18` and `Half, so 18`."""
    match = _SO.fullmatch(plain)
    if match is None or {"q", "Q"} & {*map(kind, re.findall(_WORD, match[1]))} or _only_number(match[1]):
        return plain
    return match[2]


def _only_number(plain: str) -> str | None:
    """Return the number of a text if it has only one, once or repeatedly, and if the words around it state it."""
    bare = _NUMERAL.sub(lambda numeral: "-" * (numeral[0][0] == "-") + "0", plain)  # £3/4 and 50% are not algebra
    if _ALGEBRA.search(bare):
        return None
    tokens = list(_TOKEN.finditer(plain))
    numbers = [token for token in tokens if token["number"]]
    if not numbers or any(one["unit"] and number(f"1{one['unit']}") is None for one in numbers):  # 18x
        return None
    after = _UNIT_BEHIND.match(plain, numbers[0].end())
    answer = numbers[0]["number"] + (after[0] if after and unit(after[1]) else "")
    is_one = {number(one["number"]) for one in numbers} == {number(answer)}
    return tidy(answer) if is_one and is_statement(_kinds(plain, tokens)) else None


def _kinds(plain: str, tokens: list[re.Match[str]]) -> str:
    """Return the letters that stand for the words of a text in `grammar.py`."""
    kinds = ""
    for token in tokens:
        word = token["word"]
        if token["number"]:
            kinds += "N"
        elif word is None:
            kinds += _MARKS.get(token["mark"], ",")
        elif _is_name(plain, token, kinds):
            kinds += "s" if kinds.endswith("v") else "w"
        else:
            kinds += unit_kind(word) if kinds.endswith("N") else kind(word)
    return kinds


def _is_name(plain: str, word: re.Match[str], kinds: str) -> bool:
    """Return True for the x of `x = 18` and `value of x is 18`, the May of `in May`, and for a name after a verb."""
    if len(word[0]) == 1:
        return _IS.match(plain, word.end()) is not None or plain[: word.start()].endswith("value of ")
    return word[0][0].isupper() and (kinds[-1:] in ("p", "P", "a") or (kinds.endswith("v") and kind(word[0]) == "w"))


_PIECE = re.compile(r"\w+(?:\s\w+)*|[^\w\s]")
_SAID = re.compile(r"[^\W\d_][\w'-]*|[0-9][0-9.,:]*|\S")
_PLACE = re.compile(r"(?i)\b(?:on|in|at|to)\s(?:an?\s|the\s)?\Z")  # on Monday
_NO = r"\b(?:no|not|never|cannot|none|nothing|nobody|\w+n't)\b"
_NEGATIONS = {"yes": "(?!)", "true": "(?!)", "no": _NO, "false": _NO}


def states(phrase: str, gold: str) -> bool:
    """Return True if a phrase states that `gold` is the answer: `The winner is Maria` does, `not Maria` does not."""
    text, name = (" ".join(clean(_REMARK.sub(" ", part)).split()) for part in (phrase, gold))
    text = ORDINAL.sub("", text)
    if not 1 < len(name) < len(text) <= LONGEST_ANSWER:
        return False
    spaced = r"\s?".join(map(re.escape, _PIECE.findall(name)))
    is_word = name[0].isalpha() and name.replace(" ", "").isalnum()
    matches = list(re.finditer(rf"(?<![^\s(]){spaced}(?![\w'-])", text, re.IGNORECASE if is_word else 0))
    if len(matches) != 1:
        return False
    before, after = text[: matches[0].start()], text[matches[0].end() :]
    if name.lower() in _NEGATIONS and not (before and name.lower() in ("true", "false")):
        return not before and _explains(after, _NEGATIONS[name.lower()])
    return _surround(before, after, matches[0][0], is_word)


def _explains(after: str, negation: str) -> bool:
    """Return True for what may follow Yes or No: `, because she has more`. `negation` may be in it."""
    words = re.findall(r"[\w'-]+", re.sub(negation, " is ", after, flags=re.IGNORECASE))
    return after[:1] in ",.;:!- " and words[:1] != ["one"] and fits(REASON, "".join(map(kind, words)))  # "No one is"


def _surround(before: str, after: str, name: str, is_word: bool) -> bool:
    """Return True if the words on both sides of a name state it."""
    sides = [_SAID.findall(side) for side in (_PLACE.sub("", before), after)]
    kinds = ["".join(map(_kind_of_said, side)) for side in sides]
    may_follow = "pP" if kinds[0][-1:] in ("i", "r") else ""  # the capital of France is Paris
    others = [word for kind_before, word in zip(kinds[0] + "N", sides[0][1:]) if kind_before not in may_follow]
    if (after and not is_word) or any(word[0].isupper() and word != "I" for word in others + sides[1]):
        return False
    kinds[0] += "i" * (kinds[0] == "s" and kind(name.partition(" ")[0]) in "iqrv")  # "It cannot be determined"
    return fits(TEXT, "N".join(kinds)) or (name.islower() and fits(TEXT, "M".join(kinds)))


def _kind_of_said(word: str) -> str:
    if word[0].isalpha():
        letter = kind(word).replace("Q", "w")  # "the most" does not change a name
        return "v" if letter == "w" and len(word) > 4 and word.endswith("ed") else letter  # "It was discovered by"
    return "n" if word[0].isdigit() else ":" if word == ":" else "," if word in ",.;!()-" else "q"


# The lookahead at the start only makes the search fast.
_IN_TEXT = re.compile(rf"(?=[-+.0-9\\$€£¥₹₽₩ACEGHINRSU])(?<!\w)(?<![0-9]/){_NUMBER}", re.VERBOSE)
_PARTS = re.compile(  # between two numbers neither of which is the answer: "17, 18", "17 or 18", "3:18", "17 + x = 18"
    r"(?i)(?:\s?[-+*/x,;&]?\s?|:|(?:\s[a-z]+)?,?\s(?:and|or|to)\s(?:[a-z]+\s)?)(?:[a-z]\s?=\s?|\*+)?"
)
_DENYING = any_of("not never cannot neither nor doubt doubt_that unless [a-z]+n't")
_CHANGING = any_of(
    """nearly almost hardly barely scarcely maybe perhaps possibly probably may_be might_be could_be
    guess[,:]? guess_(?:is|would_be) at_least at_most more_than less_than fewer_than greater_than over under above below
    beyond up_to close_to half half_of twice double third_of quarter_of between_\\S+_and instead_of other_than
    rather_than except except_for anything_but everything_but"""
)
TURNED = re.compile(  # what changes or denies a number behind it: "not equal to 18", "half of 18", "wrong answer: 18"
    rf"""(?xi)(?:\b(?:{_DENYING}(?:\s[a-z']+){{0,2}}|{_CHANGING}|(?:wrong|incorrect|false)(?:\sanswer)?(?:\sis)?:?)\s
    |(?<=[^\s<>=-])(?:\s+|(?<!<[a-z])(?<!<h[1-6])(?<![a-z]{{2}}))[<>]=?\s?  # "x > 18"; not "=> 18", "<b>18", "> 18"
    |\\(?:leq?|geq?|lt|gt|neq?)\s+|(?:\^\s?|(?<=[^\s_*])_)\{{?|\\(?:d?frac|sqrt)\{{  # "x^18"
    )[*$({{\[\\]*$"""
)
_CONTINUED = re.compile(  # what stands behind a number and changes or doubts it
    r"""(?x)[^\d.!?\n]{0,30}\?  # "18, right?"
    |[A-Za-z]+|\s(?:squared|cubed|factorial)|\s?\^|_\{?[0-9]|(?<!€)!|\s?\\(?:pi|sqrt)  # "18x", "18^2", "18!"
    |(?<=[백천만억])[0-9]"""  # the 5천 of "1만5천"
)


def last_number(text: str) -> str | None:
    """Return the last number of a text, as written, or None if it is part of something else: "17, 18", "not 18"."""
    last_digit = DIGIT.search(text[::-1])
    if last_digit is None:
        return None
    end = len(text) - last_digit.start()
    line = text.rfind("\n", 0, end) + 1
    start = max(line, end - WINDOW)
    plain = with_cents(to_ascii(text[start : end + 32].partition("\n")[0]))
    numbers = [match for match in _IN_TEXT.finditer(plain) if match.start() or start == line]
    return tidy(numbers[-1][0]) if numbers and _stands_alone(plain, numbers[-2:]) else None


def _stands_alone(plain: str, numbers: list[re.Match[str]]) -> bool:
    """Return False for the last number of "18 or 20", "2^18" and "isn't 18"."""
    first, last = numbers[0], numbers[-1]
    before = plain[max(0, last.start() - 30) : last.start()]
    if TURNED.search(before):
        return False
    after = _CONTINUED.match(plain, last.end())
    is_joy = after and after[0] == "!" and before.rstrip(" :*$")[-1:].isalpha()  # "She has 18!", but not "n = 18!"
    if after and not is_joy and number(last[0] + after[0]) != number(last[0]):
        return False
    is_apart = first is last or not _PARTS.fullmatch(plain, first.end(), last.start())
    return is_apart or number(first[0]) == number(last[0])
