"""The grammar of the words around a number: `Janet makes $18 a day` states 18, and `hardly 18` does not.

A phrase becomes a string with a letter for the kind of each word, and a regular expression over these letters defines
what a statement is. `grammar.txt` lists verbs and function words of English; any other word counts as a noun or an
adjective. So an unknown word makes a phrase no statement, unless it stands where a noun may stand.
"""

import re
import unicodedata
from pathlib import Path

from trainer.answers.equation import FUNCTION, GREEK
from trainer.answers.number_words import SCALES, SPOKEN
from trainer.answers.patterns import any_of

# Words that take an answer back, doubt it, and add another one.
CORRECTING = any_of(
    """wait actually sorry oops correction edit hmm scratch_that on_second(?:_thought)? i_mean make_that
    (?:my_)?apologies my_mistake just_kidding let_me_re-?(?:check|calculate|compute|consider|do|think)"""
)
SO = any_of("so thus hence therefore")
SEEMS = any_of("is was seems looks can could might may would")
HEDGING = any_of("maybe perhaps possibly alternatively")
ANOTHER = rf"(?:or|no|if\s+not|{CORRECTING}|{HEDGING})"
_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
_LISTS = {name: words.split() for name, words in re.findall(r"^(\w+) (.*(?:\n .*)*)", _TEXT, re.MULTILINE)}
PEOPLE = frozenset(_LISTS["people"])
UNITS = {name: group.partition("/")[0] for group in _LISTS["units"] for name in group.split("/")}
_ONE_LETTER_UNITS = frozenset("mgshlLKVWNJCF")
_KIND = {word: kind for kind, words in _LISTS.items() if len(kind) == 1 for word in words}
_VERB = re.compile(r"(\w+?)(?:(?<=[osxzh])es|s|d|(?:(?<=([bgmnprt]))\2)?ed)?")  # the "drop" of "dropped"
_HARMLESS = any_of("family supply jelly [fd]ish emily [bhjkmpsw][aeiou]lly lily carly italy")
_PARTS = any_of("four fif six seven eigh nin ten eleven twelf [a-z]+teen [a-z]+tie hundred thousand [mb]illion")
_ABOUT = any_of("以上 以下 左右 未満 정도 이상 이하 미만 초과 넘 쯤 가량 안팎 내외 남짓")
# Thousands, millions, billions and dozens in other languages.
_SCALES = any_of(
    r"""тыс млн млрд миллион миллиард дюжин mio\b mil(?:l?iard|jard|jo|ion|y(?:on|ar))
    [mb]ilh(?:[oõ]e|[aã]o) milhar duizend tus(?:en|ind)\b dutzend docena douzaine dozzin d[uú]zia tuzin"""
)
_CHANGES = re.compile(  # "hardly", "isn't", "18ish", "thousandths", "18万"
    rf"(?!{_HARMLESS}).*(?:n't|ly|ish)\Z|.*(?:[十百千万萬億亿兆]|{_ABOUT})|{_SCALES}|{_PARTS}ths?"
)
_VOWEL = re.compile("[aeiouæœø\u0400-\uffff]")  # Greek letters do not count

_NOUN = "[wAvtC]"  # many verbs are also nouns: the total cost
# Every part begins with a letter that continues no other part, so that there is one way to read a string.
# "left", "each day", "at the market", "to buy a house", but not "to be right"
_MORE = r"(?:[tm]|(?!ovd?A)[pPodE](?:s{0,2}|s?[wAvC]{1,4}s?)(?:a[wAv]{1,2})?)*(?<![pPod])"
_UNIT = rf"t?V?{_NOUN}{{1,3}}(?:a[wAvt])?"
_OF_WHICH = rf"(?:d?(?:s|{_NOUN}{{1,2}})v{{1,2}}{_MORE})?"  # "that she sells each day"
_NAME = (  # "she", "these", "she and her sister", "each of them", "the number of eggs"
    rf"(?:[tm]?s[wmE]?|d|sad?{_NOUN}{{1,3}}|E(?:p[sdw])?"
    rf"|[dE]?{_NOUN}{{1,5}}(?:[pPao](?:s|d?{_NOUN}{{1,3}})){{0,2}}{_OF_WHICH})"
)
_OPENING = rf"(?:[pPoE][dpE]{{0,2}}{_NOUN}{{1,4}}){{0,2}}"  # "after a busy week"
# "makes", "has to pay", "rose by", "took him and Tom"
_PREDICATE = rf"(?:[irv][irvE]*(?:o[iv]?|[ut]?P)?|[iv]*v(?:s(?:a[sw])?|d{_NOUN}?)[pP]?)"
_BEFORE = rf"{_OPENING}(?:{_NAME}m?{_PREDICATE}|[ir]+|d?A{{1,3}})?d?m*"  # "in May she sold", "it is", "the total"
_BEHIND = (  # "eggs each day", "eggs is the answer", "of the eggs are brown"
    rf"(?:(?:{_UNIT})?{_MORE}(?:[irv]+d?A+{_MORE}|r[wtv])?|{_UNIT}(?:p{_UNIT})?(?:[irv]+[ts]?|r{_NOUN}){_MORE})"
)
BEHIND = re.compile(_BEHIND)
_LEAD = rf"(?:[pP]|d?A{{1,3}}[ir])?{_NAME}(?:v+[sw]{{0,2}})?[ir]?[:=]"  # "After checking:", "The answer is x ="
_CLAUSE = re.compile(rf"c*(?:(?:{_BEFORE}|[^qQNY]*Y)N{_BEHIND}=?|{_LEAD}|pd|[iv]?{_MORE}=?)")  # Y: "in the year N"
_INTRODUCED = rf"(?:(?!w[va]){_NAME}(?:v?[ir]v?P?|v{{1,2}}|:)|[ir]+)"  # "The winner is", "it was discovered by"
TEXT = re.compile(  # "N", "The winner is N", "N is cheaper", "N, because it has more"; M is N in lower case
    rf"c*,*{_INTRODUCED}?(?:d?m*N|dMw)(?:[irv][^q]*|,*c[dswEn][^q]*)?,*"
)
REASON = re.compile(rf"(?:c|m?{_NAME}[irv]|iA)[^q]*")  # "it is", "the statement is true", "because she has more"
_MOST = 60  # words


def fits(grammar: re.Pattern[str], kinds: str) -> bool:
    """Return True if the kinds of the words of a phrase fit a grammar."""
    return len(kinds) <= _MOST and grammar.fullmatch(kinds) is not None


def is_statement(kinds: str) -> bool:
    """Return True if every clause of a phrase states its number, introduces it, or only continues."""
    return all(fits(_CLAUSE, clause.rstrip(",")) for clause in re.findall("c*[^,:=c]*[,:=]?", kinds))


def kind(word: str) -> str:
    """Return the letter for a word: w for a noun, an adjective or a name, q for one that changes, doubts or denies."""
    lower = word.lower()
    if lower in _KIND:
        return _KIND[lower]
    if len(word) == 1:
        return "w" if word > "\u3040" else "x"  # a Chinese word is not a variable
    if "-" in word:
        return next((letter for letter in map(kind, filter(None, word.split("-"))) if letter in "qQ"), "w")
    if verb := _VERB.fullmatch(lower):
        kinds = [_KIND.get(verb[1]), _KIND.get(verb[1] + "e"), _KIND.get(re.sub("ie?$", "y", verb[1]))]
        if "v" in kinds:
            return "v"
        if "q" in kinds and lower.endswith("ed"):  # "guessed"
            return "q"
    is_operator = GREEK.fullmatch(lower) or FUNCTION.fullmatch(lower) or lower.rstrip("s") in SCALES
    return "Q" if is_operator else "q" if _CHANGES.match(lower) else "w"


def unit_kind(word: str) -> str:
    """Return the letter for a word right after a number, where `m` is a unit, `xy` a product, and `reversed`
    (V) a change of the number unless a noun follows. `times` counts as a noun."""
    lower = word.lower()
    if word in _ONE_LETTER_UNITS or (len(word) > 1 and unit(word)) or lower == "times" or lower.rstrip("s") in SCALES:
        return "w"
    letter = kind(word)
    if letter == "w" and len(word) > 5 and lower.endswith("ed"):
        return "V"
    is_product = letter == "w" and len(word) < 4 and not _VOWEL.search(unicodedata.normalize("NFD", lower))  # "18 xy"
    return "x" if is_product or lower in SPOKEN else letter


def unit(word: str) -> str | None:
    """Return the first name of a unit: `cm` for `centimeters`."""
    lower = word.lower()
    return UNITS.get(lower) or UNITS.get(lower.rstrip("s"))
