"""The grammar of what may be said around a number: `Janet makes $18 a day` states 18, and `hardly 18` does not.

A phrase is written as a string of letters, one for the kind of each word, and a regular expression over these letters
says what is a statement. Verbs and the small words of English are listed; any other word is a noun or an adjective. So
a word that nobody has thought of refuses a number, unless it stands where a noun may stand.
"""

import re
import unicodedata

from trainer.answers.equation import FUNCTION, GREEK

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# "one" is left out, because in prose it is mostly a pronoun.
_TO_TEN = "two three four five six seven eight nine ten"
_TO_NINETEEN = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
SPOKEN = {word: value for value, word in enumerate(f"{_TO_TEN} {_TO_NINETEEN}".split(), 2)}
SPOKEN |= {"zero": 0} | {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHORT_UNITS = word_set(
    "cm mm km kg mg ml kl lb lbs oz ft in yd yds mi hr hrs min mins sec secs mph kph kmh am pm st nd rd th pts pcs "
    "sq wk wks yr yrs mos tsp tbs fl qt qts cl dl cc px pct ct cts pk pkg pkgs mcg nm kv mw hp dz pp usd eur gbp chf "
    "brl gb mb kb tb kwh kw hz khz mhz ghz rpm psi kj rs kr zł kč"
)
_ONE_LETTER_UNITS = frozenset("mgshlLKVWNJCF")
_KINDS = {  # of which N is a number, w any other word, and x what may be a variable
    "s": "i you he she it we they there me him us them",
    "d": "the a an his her its their my our your every this these those that some both another",
    "E": "each apiece",
    "m": "about around approximately approx roughly exactly precisely only just simply really actually originally "
    "initially eventually currently",
    "p": "of in per on by from among during within into across between after than",
    "P": "at for with",
    "o": "to",
    "u": "up",
    "a": "and",
    "c": "so thus hence therefore then finally because since as which",
    "r": "are were",
    "i": "is was equals it's that's there's es son ist sind est sont é são 是 答案是",
    "t": "all apart left over remaining remain remains more fewer extra total altogether overall combined again now "
    "away old long tall wide deep high together daily weekly monthly yearly annually today tomorrow",
    "C": "change",  # but 18 dollars and change is more than 18
    "A": "answer result total solution correct right final",
    "v": "be been being am has have had having will would can should must do does did made got sold bought took "
    "taken ate ran drove spent paid lost won threw gave given kept brought built caught cut drank found held grew "
    "rode slept swam taught wore wrote equal able "
    "last gives make earn spend pay cost need get sell buy take eat run walk drive travel read use weigh save owe "
    "collect receive finish contain produce lose leave work watch bake plant pick score win throw give gain add drink "
    "cook carry hold keep bring build catch charge complete cover donate fill find fit hike invest jump learn lift "
    "live measure move turn gather harvest deliver serve climb consume deposit borrow type order own play practice "
    "print put raise require return ride sew share ship sleep solve start stay study swim teach visit arrive end "
    "begin want wash wear write grow come amount",
    "q": "not no nope nor never none cannot nobody nothing neither either or but if unless otherwise maybe perhaps "
    "could may might except without besides least most best worst first almost under above below near beyond "
    "upward upwards whenever fold fail fails onwards "
    "down off plus minus divided multiplied less remainder power root once thrice double doubled "
    "triple tripled quadruple halved halves third thirds quarter quarters tens lakh lakhs crore crores mil mille "
    "tausend millones millionen short shy close far too tops max maximum minimum something odd ish give wrong "
    "false incorrect untrue invalid mistaken mistake error guess doubt unsure uncertain unknown joke kidding jk "
    "theory dreams what who whom whose when where while until before though although however instead rather such "
    "like point negative choose pi different followed wait oops sorry hmm scratch lie lies",
}
_KIND = {word: kind for kind, words in _KINDS.items() for word in words.split()}
_VERB = re.compile(r"(\w+?)(?:(?<=[sxzh])es|s|d|ed)?")
_CHANGES = re.compile(  # hardly, isn't, 18ish, thousandths, and thousands in other languages
    r"(?!family|supply|jelly|fish|dish).*(?:n't|ly|ish)\Z|.*[十百千万萬億亿兆]|тыс|млн|млрд|миллион|миллиард"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand|[mb]illion)ths?"
)
_VOWEL = re.compile("[aeiouæœø\u0400-\uffff]")  # no Greek letter is one

_NOUN = "[wAvtC]"  # many verbs are nouns, too: the total cost
# Every part begins with a letter that no part goes on with, so that there is one way to read a string.
_MORE = r"(?:[tm]|[pPodE]s?[wAvC]{0,4}(?:a[wAv]{1,2})?)*(?<![pPod])"  # left, each day, at the market, to buy a house
_UNIT = rf"t?{_NOUN}{{1,3}}(?:a[wAvt])?"
_OF_WHICH = rf"(?:d?(?:s|{_NOUN}{{1,2}})v{{1,2}}{_MORE})?"  # that she sells each day
_NAME = (
    rf"(?:[tm]?s[wm]?|d|sad?{_NOUN}{{1,3}}|E(?:p[sdw])?"
    rf"|[dE]?{_NOUN}{{1,5}}(?:[pPao](?:s|d?{_NOUN}{{1,3}})){{0,2}}{_OF_WHICH})"
)
_BEFORE = (
    rf"(?:[pPo][dpE]{{0,2}}{_NOUN}{{1,4}})?"
    rf"(?:{_NAME}(?:[irv]+(?:o[iv]?|[ut]?P)?|[iv]*v(?:s(?:a[sw])?|d{_NOUN}?)[pP]?)|[ir]+)?d?m*"  # It takes Sam 18
)
_BEHIND = rf"(?:(?:{_UNIT})?{_MORE}(?:[irv]+d?A+{_MORE})?|{_UNIT}(?:p{_UNIT})?(?:[irv]+[ts]?|r{_NOUN}){_MORE})"
_UNITS = re.compile(_BEHIND)
_CLAUSE = re.compile(rf"c*(?:{_BEFORE}N{_BEHIND}=?|{_NAME}[:=]|pd|[iv]?{_MORE}=?)")
_MOST = 60  # words


def is_statement(kinds: str) -> bool:
    """Return True if every clause of a phrase says what its number is, names it, or only goes on."""
    clauses = re.findall("c*[^,:=c]*[,:=]?", kinds)
    return len(kinds) <= _MOST and all(_CLAUSE.fullmatch(clause.rstrip(",")) for clause in clauses)


def are_units(words: list[str]) -> bool:
    """Return True for words behind a number that leave it as it is: units, nouns, `per day`, `is the answer`."""
    return len(words) <= _MOST and _UNITS.fullmatch("".join(map(unit_kind, words))) is not None


def kind(word: str) -> str:
    """Return the letter for a word: w for a noun, an adjective or a name, q for what changes or doubts a number."""
    lower = word.lower()
    if lower in _KIND:
        return _KIND[lower]
    if len(word) == 1:
        return "w" if word > "\u3040" else "x"  # a Chinese word is no variable
    if "-" in word:
        return "q" if "q" in map(kind, filter(None, word.split("-"))) else "w"
    verb = _VERB.fullmatch(lower)
    if verb and "v" in (_KIND.get(verb[1]), _KIND.get(verb[1] + "e")):
        return "v"
    is_operator = GREEK.fullmatch(lower) or FUNCTION.fullmatch(lower) or lower.rstrip("s") in SCALES
    return "q" if is_operator or _CHANGES.match(lower) else "w"


def unit_kind(word: str) -> str:
    """Return the letter for a word right behind a number, where `m` is a unit, and `xy` a product."""
    lower = word.lower()
    if word in _ONE_LETTER_UNITS or {lower, lower.rstrip("s")} & (SHORT_UNITS | SCALES.keys()):
        return "w"
    found = kind(word)
    is_product = found == "w" and len(word) < 4 and not _VOWEL.search(unicodedata.normalize("NFD", lower))  # 18 xy
    return "x" if is_product or lower in SPOKEN or lower == "one" else found
