"""Number words of English: `forty-five` is 45, `three quarters` is 3/4, and `the third` is the 3rd."""

import re

from trainer.answers.patterns import any_of

SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TO_TEN = "one two three four five six seven eight nine ten"
_TO_NINETEEN = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
SPOKEN = {word: value for value, word in enumerate(f"{_TO_TEN} {_TO_NINETEEN}".split(), 1)}
SPOKEN |= {"zero": 0} | {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
_PARTS = {word: value for value, word in enumerate(_ORDINALS.split(), 3)} | {"half": 2, "halve": 2, "quarter": 4}
_RANKS = f"first second {_ORDINALS} eleventh twelfth".split()
_RANK = re.compile(rf"(?:the\s)?(?:([0-9]+)(?:st|nd|rd|th)|({'|'.join(_RANKS)}))\.?", re.IGNORECASE)
SCALE, _COUNT, _PART = (any_of(" ".join(words)) for words in (SCALES, SPOKEN, _PARTS))
_SPELLED = re.compile(
    rf"""(?xi)(?<![\w'-])(?<![0-9]\s)(?:an?\s{SCALE}|{_COUNT})  # "a hundred", "forty"
    (?:(?:(?:(?<=hundred)|(?<=thousand)|(?<=million))(?:\sand|,)\s|\s|-)(?:{_COUNT}|{SCALE}))*  # " and ten", "-five"
    (?!\w|-(?!{_PART}))"""  # but not "two-part"
)
_HALF = re.compile(rf"(?i)(?<!and )\bhalf an? ({SCALE})\b")  # half a dozen
_FRACTION = re.compile(  # three quarters, 2 and a half
    rf"(?i)(?<![\w'.,/-])(?:([0-9]+)\sand\s)?(an?|one|[0-9]+)[\s-]({_PART})s?(?![\w-])"
)


def same_rank(answer: str, gold: str) -> bool:
    """Return True for `the third` and `3rd`."""
    matches = [_RANK.fullmatch(text.strip()) for text in (answer, gold)]
    ranks = {match and (match[1] or str(_RANKS.index(match[2].lower()) + 1)) for match in matches}
    return len(ranks) == 1 and None not in ranks


def in_digits(text: str) -> str:
    """Write number words as digits: `45 marbles` for `forty-five marbles`, `3/4` for `three quarters`."""
    is_bare = not re.search("[0-9]", text)
    text = _HALF.sub(lambda half: f"{SCALES[half[1].lower()] // 2}", text)
    if is_bare:
        text = re.sub(r"(?<![\w-])half(?=\Z|\s(?:an?|the|of)\b)(?<!(?:one|..a)\shalf)", "one half", text)

    def digits(match: re.Match[str]) -> str:
        value = _spelled(re.split(r"[\s-]", match[0].lower()))
        return match[0] if value is None or (match[0].lower() == "one" and not is_bare) else str(value)

    def quotient(match: re.Match[str]) -> str:
        top, part = match[2] if match[2].isdigit() else "1", _PARTS[match[3].lower()]
        return f"{match[1] or ''} {top}/{part}".strip()

    return _FRACTION.sub(quotient, _SPELLED.sub(digits, text))


def _spelled(words: list[str]) -> int | None:
    """Return 125 for "a hundred and twenty five", and None for "two three" and "ten twenty"."""
    total, group, scale = 0, 0, 10**15
    for word in words:
        if word in SCALES:
            if word == "hundred" and 0 < group < 100:
                group *= 100
            elif group and SCALES[word] < scale and word != "hundred":
                total, group, scale = total + group * SCALES[word], 0, SCALES[word]
            else:
                return None
        elif word in SPOKEN:
            value = SPOKEN[word]
            if group % (10 if value < 10 else 100) or (value < 10 and 0 < group % 100 < 20) or (group and not value):
                return None
            group += value
        elif word != "and":
            group += 1  # the a of "a hundred"
    return total + group
