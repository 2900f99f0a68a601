"""Parses a text that states one number, with or without a unit.

Expressions are not numbers. An equation states its right side, if it is true.
"""

from __future__ import annotations

import ast
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from rewards.units import CURRENCIES, SCALES, SUFFIXES, is_refused, read_unit, singular

PERCENT = "%"
"""Unit of a percentage."""
_LONGEST = 200
_CHARACTERS = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\u2044\u2215÷\u00d7·⋅≈≅\u2019\t",
    "-------///***≈≈' ",
) | str.maketrans({"℃": "°C", "℉": "°F"})
_RAISED = dict(zip(map(ord, "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"), "0123456789+-", strict=True))
_EXPONENT = re.compile(f"[{''.join(map(chr, _RAISED))}]+")
_BOXES = (
    "text|mathrm|textbf|mathbf|boxed|fbox|mbox|underline|boldsymbol|bm|textit|mathit|textrm|emph"
)


def _fraction(match: re.Match[str]) -> str:
    return f" {match[1].strip('{ }')}/{match[2].strip('{ }')}"


# Markup and LaTeX that surround or separate a number; mathematics is for rewards/latex.py. What is
# removed leaves two spaces: one may separate thousands.
_MARKUP: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"</?(?:b|strong|i|em|u|code|span|p|br)\s*/?>", re.IGNORECASE), "  "),
    (re.compile(r"([*_]{1,3})`([^*_`\n]+)`(?=\1)"), r"\1\2"),
    (re.compile(r"^([*_`]{1,3})\s*([^*_`\n]+?)\s*\1$"), r"  \2  "),
    (re.compile(r"(?<![\w*`])([*_`]{1,3})(?=\S)([^*_`\n]+)(?<=\S)\1(?![\w*`])"), r"  \2  "),
    (re.compile(r"(?<!\\)(\$\$?)((?:\\.|[^$\n\\])+)\1"), r"  \2  "),
    (re.compile(r"\\[cdt]?frac\s*\{\s*-\s*(\d+)\s*\}"), r"-\\frac{\1}"),
    (re.compile(r"\\[cdt]?frac\s*(\d|\{\s*\d+\s*\})\s*(\d(?!\d)|\{\s*\d+\s*\})"), _fraction),
    (re.compile(r"\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})|\\degree(?![a-z])"), "°"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,:; ]|,\\!)(?=\d{3})"), ","),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "*"),
    (re.compile(r"\\approx(?![a-z])"), "≈"),
    (
        re.compile(
            r"\\(?:(?:displaystyle|q?quad|therefore)(?![a-z])|[()\[\],!:; ])|(?<=[\d{])~(?=\D)"
        ),
        "  ",
    ),
    (re.compile(rf"\\({_BOXES})\s*\{{\s*\{{([^{{}}]*)\}}\s*\}}"), r"\\\1{\2}"),
    *[(re.compile(rf"\\(?:{_BOXES})\s*\{{([^{{}}]*)\}}"), r"  \1  ")] * 2,
    (re.compile(r"^\s*\\left\s*\(([^()]*)\\right\s*\)\s*$"), r"  \1  "),
    (re.compile(r"^\s*\{\s*\\bf(?![a-z])([^{}]*)\}\s*$"), r"  \1  "),
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"^\s*(?:[-=]>|[→⇒∴])"), ""),
    (re.compile(r"(?<=[^\W\d]{2})!$|。$"), ""),
    (re.compile(r"\s*\^\s*"), "^"),
)
_LEAD_WORDS = (
    "the|my|our|this|that|it|its|final|correct|numeric|numerical|answer|result|solution|output"
    r"|ans|a(?=\s*:)|conclusion|total|sum|difference|product|value|number|amount|costs?|price|count|so|thus"
    "|therefore|hence|is|are|equals?|there|here|we|i|he|she|they|have|has|get|got|about"
    r"|approximately|approx\.?|around|roughly|you|needs?|takes?"
)
_LEAD = re.compile(rf"(?:\s|[#:~]|,(?=\s)|(?:{_LEAD_WORDS})(?![^\W_]))*", re.IGNORECASE)
_QUESTION = re.compile(
    r"(?:is|are|was|were|do|does|has|have)\s+(?:the|it|this|that|there|we|i|he|she|they|you|[a-z]\s)",
    re.IGNORECASE,
)
_GREEK = (
    "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho"
    "|sigma|tau|upsilon|(?:var)?phi|chi|psi|omega"
)
_VARIABLE = re.compile(
    rf"(?:m?\\angle\s*)?(?:[^\W\d_]{{1,3}}|\\(?:{_GREEK}))(?:_(?:\w|\{{\w+\}}))?"
    r"|[^\W\d_]'*\s?\(-?\d{1,5}(?:,\s?-?\d{1,5})?\)",
    re.IGNORECASE,
)
_MOST_WORDS = 5
_SUBJECT = re.compile(
    r"(?P<words>(?:[^\W\d_]+(?:'s)?\s+){0,8}?(?:[^\W\d_]+(?:'s)?))(?:\s*:\s|\s+(?:will\s+)?"
    r"(?:is|are|was|were|equals|has|have|had|needs?|takes?|gets?|got|earns?|earned|makes?|made"
    r"|spends?|spent|pays?|paid|saves?|saved|sells?|sold|buys?|bought|costs?|weighs?)\s)\s*",
    re.IGNORECASE,
)
_WORDS_OTHER = """
possible unknown claim power magnitude nobody nothing who what which how where when whether why
suppose assume let say opposite square cube root double bound limit lower upper reverse old previous
last next another other others distractor trap typo error few many some any all only log ln lg exp
sin cos tan cot sec csc sqrt abs max min det gcd lcm lim mod floor ceil round
"""
_OTHERS = frozenset(_WORDS_OTHER.split())
"""Words of a subject that is not the answer."""
_POINTING = frozenset({"it", "this", "that", "they", "is", "of"})
_QUANTITY = re.compile(
    rf"""
    (?P<sign>[+-]?)[ ]*
    (?P<currency>(?:US)?[{CURRENCIES}]|USD|EUR|GBP|JPY|INR|CNY|CHF|CAD|AUD|Rs\.?)?
    [ ]*(?P<inner>[+-]?)
    (?:
        (?:(?P<mixed>\d{{1,20}})[ ]+(?:and[ ]+)?)?(?P<over>\d{{1,20}})[ ]?/[ ]?(?P<under>\d{{1,20}})
        |10(?:\^|\*\*)(?P<power>-?\d{{1,3}})
        |
        (?:
            (?P<points>\d{{1,3}}(?:[. ]\d{{3}})+),(?P<comma>\d{{1,2}})
            |
            (?P<whole>
                \d{{1,3}}(?P<separator>[,_' ])\d{{3}}(?:(?P=separator)\d{{3}})*
                |\d{{1,2}}(?:,\d\d)+,\d{{3}}
                |\d{{1,3}}(?:\.\d{{3}}){{2,}}
                |\d+
            )?
            (?P<part>\.\d+)?
        )
        (?:e(?P<e>[+-]?\d{{1,3}})|[ ]*[x*][ ]*10(?:\^|\*\*)(?P<ten>[+-]?\d{{1,3}}))?
    )
    (?P<rest>(?![\d.,])[^\n]*)
    """,
    re.VERBOSE | re.ASCII | re.IGNORECASE,
)
_IN_PARENTHESES = re.compile(rf"([{CURRENCIES}]?)\(-?\s*([{CURRENCIES}]?\s*[\d.,]+\s*%?)\)")
_OPTIONAL = re.compile(r"^\s*\(([^()]+)\)$")
_PERCENT = re.compile(r"\s*(?:%|percent|per cent|pct\.?)", re.IGNORECASE)
_SHARE = re.compile(
    r"\s*(?:%|percent|per cent|pct\.?)\s+(?:of\s+(?:all|the|his|her|its|their|my|our)\s+(?P<of>"
    r"[^\W\d_]+(?:\s+[^\W\d_]+){0,3})|increase|decrease|discount|chance|probability"
    r"|profit|loss|gain|growth|interest|tax|tip|reduction|rise|drop|markup)",
    re.IGNORECASE,
)
_PLAIN_NUMBER = re.compile(r"\D*\d+(?:\.(?P<decimals>\d+))?\D*")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_MULTIPLIED = re.compile(r"(?<=[\d)%])\s*(?=\()")
_HUNDRED = re.compile(r"\*\s*\(?\s*100\b|\b100\s*\*")
_LARGEST_BASE, _LARGEST_POWER = 10**6, 30
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Quantity:
    """A number and its unit, as in `rewards.units.Unit`; 50% has the value 50 and the unit "%"."""

    value: Fraction
    unit: str
    is_plain: bool = True


def parse_quantity(text: str) -> Quantity | None:
    """Parses a number with an optional unit; None if the text is something else.

    >>> parse_quantity("The total is -1,234.5 km/h.")
    Quantity(value=Fraction(-2469, 2), unit='km/h', is_plain=True)
    >>> parse_quantity("9 + 9 = 18")
    Quantity(value=Fraction(18, 1), unit='', is_plain=True)
    >>> parse_quantity("18 or 19"), parse_quantity("9 + 9"), parse_quantity("9 + 8 = 18")
    (None, None, None)
    """
    if len(text) > _LONGEST:
        return None
    first, *others = re.split(r"\s*([=≈])\s*", _plain(text).strip())
    if _QUESTION.match(first):
        return None
    first = _without_subject(without_lead(first))
    if not others:
        return _read(first)
    found, sides = _read(others[-1]), [first, *others[1:-1:2]]
    if not first or _is_name(first):
        sides[0] = others[-1]
    for number, side in enumerate(sides):
        is_near = "≈" in others[2 * number :]
        if found is None or not _equals(side, found, others[-1], is_near=is_near):
            return None
    return found


def without_lead(text: str) -> str:
    """The text without words such as "The answer is" before it."""
    return _LEAD.sub("", text, count=1)


def _without_subject(text: str) -> str:
    """The text without a subject such as `Tom has` or `area is`."""
    match = _SUBJECT.match(text)
    if match is None:
        return text
    words = [word for word in match["words"].split() if word != "and"]
    if any(_is_other(word) for word in words):
        return text
    return without_lead(text[match.end() :])


def _is_other(word: str) -> bool:
    """Whether a word of a subject says that what follows is not the answer."""
    word = re.sub("'s$", "", word.casefold())
    return word in _OTHERS or word.endswith("ly") or (word not in _POINTING and is_refused(word))


def _is_name(text: str) -> bool:
    """Whether the left side of an equation is the name of its value: `x`, `f(2)`, `Area`."""
    words = text.split()
    is_phrase = len(words) <= _MOST_WORDS and all(re.fullmatch(r"[^\W\d_]+", one) for one in words)
    if is_phrase:
        return not any(_is_other(word) for word in words)
    return _VARIABLE.fullmatch(text) is not None


def raised(text: str) -> str:
    """The text with superscript digits as powers: `m²` as `m^{2}`."""
    return _EXPONENT.sub(lambda match: f"^{{{match.group().translate(_RAISED)}}}", text)


def _plain(text: str) -> str:
    """The text without markup, in ASCII as far as numbers are concerned."""
    text = re.sub(r"\^\{([-+]?\d{1,3})\}", r"^\1", raised(text.strip()))
    text = "".join(map(_character, text)).translate(_CHARACTERS).strip()
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    text = text.strip()
    if len(text) > 1 and text[0] + text[-1] in {'""', "''", "“”"}:
        text = text[1:-1].strip()
    return text.removesuffix(".")


def _character(character: str) -> str:
    if character.isascii():
        return character
    category, form = unicodedata.category(character), unicodedata.decomposition(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Cf":  # shows nothing
        return ""
    if category == "Zs":
        return " "
    if form.startswith("<fraction>"):
        return f" {unicodedata.normalize('NFKC', character)}"
    wide = form.startswith(("<wide>", "<narrow>", "<font>"))
    return unicodedata.normalize("NFKC", character) if wide else character


def _read(text: str) -> Quantity | None:
    """A number with an optional unit, without markup."""
    accounting = _IN_PARENTHESES.fullmatch(text)
    if accounting:
        found = _read(f"{accounting[1]}{accounting[2].strip()}")
        return None if found is None else Quantity(-found.value, found.unit)
    match = _QUANTITY.fullmatch(text)
    value = None if match is None or (match["sign"] and match["inner"]) else _value(match)
    if match is None or value is None:
        return None
    rest, currency = _OPTIONAL.sub(r" \1", match["rest"]), match["currency"] or ""
    if _PERCENT.fullmatch(rest):
        return None if currency else Quantity(value, PERCENT)
    if _is_share(rest):
        return None if currency else Quantity(value, PERCENT)
    value, rest = _scaled(value, rest)
    is_one = abs(value) <= 1
    unit = read_unit(f"{currency} {rest}", one=is_one)
    if unit is None and currency:  # "$5 dollars"
        unit = read_unit(rest, one=is_one)
        unit = unit if unit == read_unit(currency) else None
    return None if unit is None else Quantity(value, unit.name, unit.is_plain)


def _is_share(rest: str) -> bool:
    """Whether what follows a number is a percent sign and what it is a share of."""
    match = _SHARE.fullmatch(rest)
    return match is not None and not any(_is_other(word) for word in (match["of"] or "").split())


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match without its scale; None if there is none."""
    exponent = int(match["e"] or match["ten"] or match["power"] or 0)
    if match["over"]:
        if int(match["under"]) == 0:
            return None
        value = int(match["mixed"] or 0) + Fraction(int(match["over"]), int(match["under"]))
    elif match["power"]:
        value = Fraction(1)
    elif match["points"]:
        value = Fraction(f"{re.sub('[. ]', '', match['points'])}.{match['comma']}")
    elif match["whole"] or match["part"]:
        whole = re.sub("[^0-9]", "", match["whole"] or "0")
        value = Fraction(f"{whole}{match['part'] or ''}")
    else:
        return None
    value *= Fraction(10) ** exponent
    return -value if "-" in match["sign"] + match["inner"] else value


def _scaled(value: Fraction, rest: str) -> tuple[Fraction, str]:
    """The number times the scales that follow it, and what follows them."""
    joined = re.match(r"[A-Za-z]+(?=\s|$)", rest)
    if joined and joined.group() in SUFFIXES:
        value, rest = value * SUFFIXES[joined.group()], rest[joined.end() :]
    first, _, others = rest.strip().partition(" ")
    while singular(first.casefold()) in SCALES:
        value, rest = value * SCALES[singular(first.casefold())], others
        first, _, others = rest.strip().partition(" ")
    return value, rest


def _equals(side: str, found: Quantity, last: str, *, is_near: bool) -> bool:
    """Whether the side of an equation equals its last side.

    A side may differ by the rounding of the last if it is an operation and the last a decimal, or
    if the sign is ≈.
    """
    if side == last:
        return True
    text = re.sub(rf"(?<=\d),(?=\d{{3}})|[{CURRENCIES}]", "", side)
    text = re.sub(r"(?<=\d)\s*x\s*(?=\d)", "*", text, flags=re.IGNORECASE)
    text = _MULTIPLIED.sub("*", _without_unit(text, found.unit).replace("^", "**"))
    value = _value_of(text.replace("%", "/100"))
    if value is None:
        return False
    plain = _PLAIN_NUMBER.fullmatch(last.replace(",", ""))
    slack = Fraction(0)
    if plain and (is_near or (plain["decimals"] and re.search(r"\d[^\d.]+\d", text))):
        slack = Fraction(1, 2 * 10 ** len(plain["decimals"] or ""))
    if found.unit == PERCENT and ("%" in text or not _HUNDRED.search(text)):
        is_share = "%" in text or "/" in text or "." in text  # not 18 = 1800%
        return is_share and abs(value - found.value / 100) <= slack / 100
    return abs(value - found.value) <= slack


def _without_unit(text: str, unit: str) -> str:
    """A sum without the unit of its result, if it is the only one."""
    words = {match.group() for match in _WORDS.finditer(text)}
    units = {read_unit(word, one=True) for word in words}
    if len(units) != 1:
        return text
    (found,) = units
    if found is None or not found.is_plain or unit not in {"", found.name}:
        return text
    return _WORDS.sub("", text)


def _value_of(text: str) -> Fraction | None:
    """The value of a sum or product of numbers; None if it is something else."""
    if not re.fullmatch(r"[\d.+\-*/() ]+", text, re.ASCII):
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    """The value of sums, products and powers of numbers; ValueError if it is something else."""
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(repr(node.value))
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(node.operand)
        case ast.BinOp(op=ast.Pow()):
            base, power = _evaluate(node.left), _evaluate(node.right)
            if abs(base) > _LARGEST_BASE or abs(power) > _LARGEST_POWER or power.denominator > 1:
                raise ValueError("a large power")
            return base ** int(power)
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not a sum, a product or a power")
