"""What may follow a number: a unit, and nothing that changes the number or takes it back.

A unit is a symbol or a name of the table below, a currency, or words that name things (`apples`,
`red marbles`, `dollars per hour`, `cups of flour`). Words that multiply, deny, hedge or offer
another answer are none, nor are single letters, which are variables.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "milliard": 10**9,
    "trillion": 10**12,
    "lakh": 10**5,
    "lac": 10**5,
    "crore": 10**7,
    "dozen": 12,
    "mn": 10**6,
    "mln": 10**6,
    "bn": 10**9,
}
"""Words that multiply the number before them, in the singular."""
SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "MM": 10**6, "bn": 10**9, "B": 10**9}
"""Letters that multiply a number to which they are joined."""

CURRENCIES = "$¢£¥฿" + "".join(map(chr, range(0x20A0, 0x20D0)))
"""Signs of currencies."""

_WORDS_FILE = Path(__file__).with_name("words.toml")
_WORDS = tomllib.loads(_WORDS_FILE.read_text(encoding="utf-8"))
_SYMBOLS = {
    name: symbol
    for entry in " ".join(_WORDS["units"].casefold().split()).split("; ")
    for symbol, _, names in [entry.partition(":")]
    for name in (symbol, *names.split())
}
"""The symbol of each unit by its symbol and its names in the singular, in lower case."""
_MEGA = re.compile("^M(?=(?:Wh?|J|V|Pa)$)")
_LETTERS = frozenset("mghslLNJWVAΩ円元")
"""Single letters that are units; other letters are variables."""
_SHARED = frozenset(_WORDS["shared"].split())
_PLURALS = frozenset(_WORDS["plurals"].split())
_THINGS = frozenset(_WORDS["things"].split())
_NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
    *SCALES,
)
_NEVER = {
    *_WORDS["never"].split(),
    *(number + end for number in _NUMBERS for end in ("", "th", "fold")),
}
"""Words of no unit, whether in the singular or in the plural."""
_DENIALS = frozenset(_WORDS["denying"].split())
_TRAIL = re.compile(
    r"(?:^|\s+)(?:left(?: over)?|remaining|total|each|apiece|old|long|tall|wide|high|deep|away"
    r"|apart|altogether|in total|in all)$"
)
_COMPARATIVE = re.compile(
    r"(?<=\w)\s+(?:more|less|fewer|longer|shorter|taller|higher|lower|deeper|wider|heavier|lighter"
    r"|older|younger|faster|slower|farther|further|earlier|later)$"
)
_SHARE = re.compile(r"^of (?:an? |the )?(?=\S)")
_PER = re.compile(r"\s*/\s*|\s+per\s+|\s+an?\s+(?=\S+$)")
_LENGTHS = frozenset({"nm", "µm", "mm", "cm", "dm", "m", "km", "in", "ft", "yd", "mi", "unit"})
"""Symbols of which there are squares and cubes."""
_POWER = re.compile(r"(?P<unit>.*[^\W\d])(?:\^(?P<power>-?[1-4])|\s+(?P<word>squared|cubed))")
_JOINED = re.compile(r"(?P<unit>[^\W\d]+)(?P<power>[23])")
_SQUARE = re.compile(r"(?P<power>square|sq\.?|cubic|cu\.?)\s+(?P<unit>.+)")
_POWERS = {"squared": "2", "cubed": "3", "square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_WORD = re.compile(r"(?:[^\W\d_]{2,}|[^\W\d_](?=-))(?:['-][^\W\d_]+)*")
_LONGEST, _MOST_WORDS, _MOST_PARTS = 60, 4, 3
_MULTIPLE = re.compile(
    r"[^\W\d]+illion(?:s|e|es|en|th)?|milliarden"
    r"|(?:doubl|tripl|(?:quadr|quint|sext|sept|oct)upl|halv)(?:e|es|ed|ing)"
    r"|(?:kilo|mega|giga|tera|peta|hecto|deca|deci|centi|milli|micro|nano|pico)-?"
    r"|[a-z]{2,}(?:ful|ed|ab|ib|ous|ical|ant|ent)ly"
)
"""Numbers and what multiplies one (`septillion`, `quadrupled`, `kilo`), and adverbs."""
_COMPOUNDS = frozenset({"kilowatt", "megawatt", "watt", "ampere", "amp", "man", "person", "foot"})
"""Units that may stand before another: `man hours`."""


@dataclass(frozen=True)
class Unit:
    """What a text says as a unit, in one spelling; "" for no unit.

    A plain one can only be the unit of the number before it. Others count where the reference has
    the same.
    """

    name: str
    is_plain: bool


def read_unit(text: str, *, one: bool = False) -> Unit | None:
    """The unit that a text says after a number; None if it is no unit.

    `one` says whether the number is 1 or less, which stands before a singular.

    >>> read_unit("kilometers per hour")
    Unit(name='km/h', is_plain=True)
    >>> read_unit("red marbles"), read_unit("pairs")
    (Unit(name='red marble', is_plain=True), Unit(name='pair', is_plain=False))
    >>> read_unit("or eight"), read_unit("x")
    (None, None)
    """
    text = _COMPARATIVE.sub("", _TRAIL.sub("", " ".join(text.split())))
    text = _SHARE.sub("", text)
    if len(text) > _LONGEST:
        return None
    if not text:
        return Unit("", is_plain=True)
    parts = _PER.split(text)
    units = [_read_part(part, one=one, divides=number > 0) for number, part in enumerate(parts)]
    if len(parts) > _MOST_PARTS or None in units:
        return None
    found = [unit for unit in units if unit is not None]
    return Unit("/".join(unit.name for unit in found), all(unit.is_plain for unit in found))


def singular(word: str) -> str:
    """The singular of an English plural; other words as they are."""
    is_plural = len(word) > len("yes") and word.endswith("s") and word[-2] not in "su'"
    if not is_plural or word.endswith("is"):
        return word
    if word.endswith("ies") and len(word) > len("pies"):
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("xes", "ches", "shes", "sses")) else word[:-1]


def _read_part(text: str, *, one: bool, divides: bool) -> Unit | None:
    """A unit without a division, that follows 1 or divides another."""
    factors = [_factor(factor, divides=divides) for factor in re.split(r" ?\* ?", text)]
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(factors):
        name = "*".join(factor.name for factor in known)
        return Unit(name, is_plain=all(factor.is_plain for factor in known))
    if text in _SHARED:
        return Unit(text, is_plain=False)
    things, of, stuff = text.partition(" of ")
    words, rest = things.split(" "), stuff.split(" ") if of else []
    if len(words) > _MOST_WORDS or len(rest) > _MOST_WORDS:
        return None
    if not all(_WORD.fullmatch(word) and not is_refused(word) for word in (*words, *rest)):
        return None
    head = words[-1].casefold()
    noun = singular(head)
    if _is_two_units(words):
        return None
    name = " ".join([*words[:-1], _SYMBOLS.get(noun, noun)]).casefold()
    is_thing = (
        noun in _SYMBOLS
        or head in _PLURALS
        or noun != head
        or ((one or divides) and noun in _THINGS)
    )
    is_shared = any(singular(word.casefold()) in _SHARED for word in (*words, *rest))
    return Unit(name + of + stuff.casefold(), is_plain=is_thing and not is_shared)


def _symbol(text: str) -> str | None:
    """The symbol of a unit of the table or of a currency."""
    if len(text) == 1:
        known = text in _LETTERS or text in f"{CURRENCIES}°"
        return _SYMBOLS.get(text.casefold(), text) if known else None
    word = _MEGA.sub("mega", text.removesuffix(".")).casefold()
    degrees = re.fullmatch(r"(?:°|deg(?:rees?)?) ?(c|f)(?:elsius|ahrenheit)?", word)
    if degrees:
        return f"°{degrees[1]}"
    return _SYMBOLS.get(word) or _SYMBOLS.get(singular(word))


def _factor(text: str, *, divides: bool) -> Unit | None:
    """A symbol, or a power of one, e.g. `m^2`.

    Lengths have powers. Seconds have them only as divisors; powers of other units (`$^2`) count
    where the reference has the same.
    """
    symbol = _symbol(text)
    if symbol is not None:
        return Unit(symbol, is_plain=True)
    joined, match = _JOINED.fullmatch(text), _POWER.fullmatch(text)
    match = joined or match or _SQUARE.fullmatch(text.casefold())
    if match is None:
        return None
    base = match["unit"]
    symbol = "unit" if singular(base.casefold()) == "unit" else _symbol(base)
    if symbol is None or (joined and base.casefold() not in (_LENGTHS | {"s"})):
        return None
    found = {key: value for key, value in match.groupdict().items() if value and key != "unit"}
    (power,) = found.values()
    power = _POWERS.get(power.rstrip("."), power)
    is_plain = symbol in _LENGTHS or (symbol == "s" and divides != power.startswith("-"))
    return Unit(f"{symbol}^{power}", is_plain)


def _is_two_units(words: list[str]) -> bool:
    """Whether a unit stands before another, as in `cents dollars`."""
    symbols = [_symbol(word) for word in words]
    others = zip(words[:-1], symbols[:-1], strict=True)
    return symbols[-1] is not None and any(
        symbol is not None and word.casefold() not in _COMPOUNDS for word, symbol in others
    )


def is_refused(word: str) -> bool:
    """Whether a word multiplies, denies or hedges a number, or offers another."""
    word = word.casefold()
    parts = {word, *word.split("-")}
    return (
        word.endswith("n't")
        or any(_MULTIPLE.fullmatch(part) for part in parts)
        or bool(parts & _DENIALS)
        or any(part in _NEVER or singular(part) in _NEVER for part in parts)
    )
