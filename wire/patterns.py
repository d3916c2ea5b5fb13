"""Regular expressions of JSON schemas and clients (ECMA-262's dialect) as ones that xgrammar follows exactly. Pure.

A schema's expression speaks of a string's value and may match anywhere in it; a grammar has to match the whole text of
the string as JSON writes it. So each set of characters becomes the ways to write them, and what is not anchored gets
any text around it. The result is ASCII and has classes, groups, alternatives and counts only.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias


class PatternError(ValueError):
    """The text is not a valid expression. The message is for the client."""


class NotEnforcedError(ValueError):
    """An expression that no grammar can follow. The message says what it has, such as "a lookahead"."""


MAX_GROUPS = 64  # in each other
MAX_CHARS = 1 << 20  # of the result
MAX_REPEATS = 999_999_999  # xgrammar's
_Set: TypeAlias = tuple[tuple[int, int], ...]  # ranges of characters, ends included, ascending and apart
_TOKEN = re.compile(
    r"(?P<text>[A-Za-z0-9_ ]+(?![*+?{]))|(?P<repeat>[*+?]\??|\{\d+(?:,\d*)?\}\??)"
    r"|(?P<open>\((?:\?(?:P?<[A-Za-z_$][\w$]*>|<?.)?)?)|(?P<set>\[(?:[^\]\\]|\\.)*\]?)"
    r"|(?P<escape>\\(?:u\{[0-9a-fA-F]+\}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|x[0-9a-fA-F]{2}|c[A-Za-z]|.)?)|(?P<one>.)",
    re.DOTALL,
)  # fmt: skip
_IN_SET = re.compile(rf"{_TOKEN.pattern[_TOKEN.pattern.index('(?P<escape>') :]}", re.DOTALL)
_LAST = 0x10FFFF
_SETS: dict[str, _Set] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": (
        (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ),
}  # fmt: skip
_LINE_ENDS: _Set = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_TEXT: _Set = ((0, 0xD7FF), (0xE000, _LAST))  # without halves of surrogate pairs, which UTF-8 cannot encode
_RAW: _Set = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))  # what a JSON string holds as it is
_CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_SHORT = {0x22: '"', 0x5C: "\\", 0x2F: "/", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_HEX = "[0-9a-fA-F]"
_NOT_ASCII = (  # as \u and digits
    rf"u(?:00[89a-fA-F]{_HEX}|0[1-9a-fA-F]{_HEX}{{2}}|[1-9a-ce-fA-CE-F]{_HEX}{{3}}"
    rf"|[dD](?:[0-7]{_HEX}{{2}}|[89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))"
)


@dataclass(slots=True)
class _Item:
    """A part of an alternative, which is a list of them: a text as the result has it, a group, or an anchor."""

    text: str = ""
    group: "list[list[_Item]] | None" = None
    repeat: str = ""
    is_anchor: bool = False
    has_anchor: bool = False  # in the group
    has_more: bool = False  # any number of times more than `repeat` says


def whole_pattern(pattern: str) -> str:
    """The expression for a text that must match from beginning to end. Raises PatternError or NotEnforcedError."""
    return _translated(pattern, _TEXT, is_whole=True)


def json_pattern(pattern: str) -> str:
    """The expression for a JSON string, between its quotes, whose value matches anywhere. Raises as `whole_pattern`."""
    return _translated(pattern, _RAW, is_whole=False)


def text_without(pattern: str, char: str) -> str:
    """The expression for a text that matches anywhere and never has the character. Raises as `whole_pattern`."""
    return _translated(pattern, _complement(_one(ord(char))), is_whole=False)


def literal_begin(pattern: str) -> str:
    """A text with which all that matches begins; empty if none is seen at a glance."""
    found = re.match(r"\^([\w-]+)(?![*?{|])", pattern)
    return found[1] if found and "|" not in pattern else ""


def _translated(pattern: str, plain: _Set, is_whole: bool) -> str:
    """`plain`: the characters that stand as they are. In JSON's strings, for which it is _RAW, others are escaped."""
    alternatives = _parsed(pattern, plain)
    around = None if is_whole else f"{_character('[^]', plain)}*"
    for side, anchor in ((0, "^"), (-1, "$")):
        _anchor(alternatives, side, anchor, around)
    return _joined(alternatives)


def _parsed(pattern: str, plain: _Set) -> list[list[_Item]]:
    levels: list[list[list[_Item]]] = [[[]]]  # the alternatives of each open group
    for token in _TOKEN.finditer(pattern):
        text, items = token[0], levels[-1][-1]
        match token.lastgroup:
            case "text":
                items.append(_Item(text))
            case "repeat":
                _repeat(items, text)
            case "open":
                if text not in ("(", "(?:") and not re.fullmatch(r"\(\?P?<[\w$]+>", text):
                    raise NotEnforcedError(_LOOKS.get(text, "a group with a modifier"))
                levels.append([[]])
                if len(levels) > MAX_GROUPS:
                    raise PatternError(f"it has groups deeper than {MAX_GROUPS} in each other")
            case _ if text == ")":
                if len(levels) == 1:
                    raise PatternError("it has a ')' without a '('")
                group = levels.pop()
                has_anchor = any(item.is_anchor or item.has_anchor for inner in group for item in inner)
                levels[-1][-1].append(_Item(group=group, has_anchor=has_anchor))
            case _ if text == "|":
                levels[-1].append([])
            case _ if text in "^$":
                items.append(_Item(text, is_anchor=True))
            case _:
                items.append(_Item(_character(text, plain)))
    if len(levels) > 1:
        raise PatternError("it has a '(' without a ')'")
    return levels[0]


_LOOKS = {"(?=": "a lookahead", "(?!": "a lookahead", "(?<=": "a lookbehind", "(?<!": "a lookbehind"}


def _repeat(items: list[_Item], text: str) -> None:
    if not items or items[-1].repeat or items[-1].is_anchor:
        raise PatternError(f"it has nothing to repeat before {text!r}")
    bounds = [int(bound) for bound in re.findall(r"\d+", text)]
    if bounds != sorted(bounds) or bounds[-1:] > [MAX_REPEATS]:
        raise PatternError(f"it has {text[:40]!r}, which needs numbers up to {MAX_REPEATS} in ascending order")
    if text[0] == "?":  # xgrammar's takes parts of what it makes optional: "a(bc*)?d" takes "acd"
        items[-1].repeat = "{0,1}"
    elif text.removesuffix("?")[-2:] != ",}":
        items[-1].repeat = text[0] if text[0] in "*+" else text.removesuffix("?")
    else:  # its "{2,}" takes parts of the last one
        items[-1].repeat, items[-1].has_more = f"{{{bounds[0]}}}", True


def _anchor(alternatives: list[list[_Item]], side: int, anchor: str, around: str | None) -> None:
    """Ends each alternative at one side: with nothing if it is anchored there, else with `around`."""
    for items in alternatives:
        more = around
        while items and items[side].is_anchor and items[side].text == anchor:
            items.pop(side)
            more = None
        if items and (group := items[side].group) is not None and items[side].has_anchor and not items[side].repeat:
            _anchor(group, side, anchor, more)
        elif more is not None:
            items.insert(0 if side == 0 else len(items), _Item(more))


def _joined(alternatives: list[list[_Item]]) -> str:
    return "|".join(["".join([_item_text(item) for item in items]) for items in alternatives])


def _item_text(item: _Item) -> str:
    if item.is_anchor:
        raise NotEnforcedError(f"{item.text!r} between other parts")
    text = item.text if item.group is None else f"(?:{_joined(item.group)})"
    if len(text) > MAX_CHARS:
        raise PatternError("it is too long when its repetitions are written out")
    return f"{text}{item.repeat}{text}*" if item.has_more else f"{text}{item.repeat}"


@lru_cache(maxsize=1024)
def _character(token: str, plain: _Set) -> str:
    """The expression for a token that stands for one character: a class, an escape, a dot or the character."""
    if token[0] == "[":
        found = _set(token)
    elif token[0] == "\\":
        found = _escaped(token, is_in_set=False)
    else:
        found = _complement(_LINE_ENDS) if token == "." else _one(ord(token))
    return _written(found, plain)


def _escaped(text: str, is_in_set: bool) -> _Set:
    """The characters that an escape stands for. Raises PatternError or NotEnforcedError."""
    kind = text[1:2]
    if kind.lower() in _SETS and kind:
        return _SETS[kind] if kind in _SETS else _complement(_SETS[kind.lower()])
    if kind in ("u", "x") and len(text) > 2:
        digits = [int(part, 16) for part in re.findall(r"[0-9a-fA-F]{2,}|[0-9a-fA-F]", text)]
        code = digits[0] if len(digits) == 1 else 0x10000 + ((digits[0] - 0xD800) << 10) + digits[1] - 0xDC00
        if code > _LAST:
            raise PatternError(f"it has {text[:20]!r}, which is no character")
        return _one(code)
    if kind == "c" and len(text) > 2:
        return _one(ord(text[2]) % 32)
    if kind in _CONTROL:
        return _one(_CONTROL[kind])
    if kind == "b" and is_in_set:
        return _one(0x08)
    if not kind:
        raise PatternError("it ends with '\\'")
    if kind.isalnum():
        raise NotEnforcedError(f"'\\{kind}'")
    return _one(ord(kind))


def _set(text: str) -> _Set:
    """The characters of a class such as "[a-z]". Raises PatternError or NotEnforcedError."""
    if len(text) < 2 or text[-1] != "]":
        raise PatternError("it has a '[' without a ']'")
    is_negated = text[1] == "^"
    tokens = [token[0] for token in _IN_SET.finditer(text[2 if is_negated else 1 : -1])]
    ranges: list[tuple[int, int]] = []
    index = 0
    while index < len(tokens):
        first = _member(tokens[index])
        if tokens[index + 1 : index + 2] == ["-"] and index + 2 < len(tokens):
            last = _member(tokens[index + 2])
            if len(first) == len(last) == 1 and first[0][0] == first[0][1] and last[0][0] == last[0][1]:
                if first > last:
                    raise PatternError(f"it has a range in the wrong order in {text[:40]!r}")
                first, index = ((first[0][0], last[0][1]),), index + 2
        ranges += first
        index += 1
    found = _complement(_merged(ranges)) if is_negated else _merged(ranges)
    if not found:
        raise PatternError(f"it has {text[:40]!r}, which no character matches")
    return found


def _member(token: str) -> _Set:
    return _escaped(token, is_in_set=True) if token[0] == "\\" else _one(ord(token))


def _one(code: int) -> _Set:
    return ((code, code),)


def _merged(ranges: list[tuple[int, int]]) -> _Set:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _complement(ranges: _Set) -> _Set:
    ends = [(-1, -1), *ranges, (_LAST + 1, _LAST + 1)]
    return tuple((one[1] + 1, other[0] - 1) for one, other in pairwise(ends) if one[1] + 1 < other[0])


def _both(one: _Set, other: _Set) -> _Set:
    return _complement(_merged([*_complement(one), *_complement(other)]))


def _written(found: _Set, plain: _Set) -> str:
    """An expression for one of these characters, as it may stand in a text or in a JSON string."""
    raw = _both(_both(found, _TEXT), plain)
    ways = [_class(raw)] if raw else []
    if plain is _RAW:
        ways += [rf"\\{way}" for way in _json_escapes(found)]
    if not ways:
        is_half = not _both(found, _TEXT)
        raise NotEnforcedError("half of a surrogate pair" if is_half else "a character that cannot be written there")
    return ways[0] if len(ways) == 1 and raw else f"(?:{'|'.join(ways)})"


def _json_escapes(found: _Set) -> list[str]:
    """Expressions for the escapes of these characters in JSON, without the backslash."""
    low = [code for code in (*range(0x20), 0x22, 0x2F, 0x5C) if any(first <= code <= last for first, last in found)]
    ways = [_class(_merged([(ord(_SHORT[code]),) * 2 for code in low if code in _SHORT]))] if low else []
    for tens in (0, 1):
        digits = [f"{code % 16:x}" for code in low if code // 16 == tens and code not in _SHORT]
        if digits:
            ways.append(f"u00{tens}[{''.join(sorted({*digits, *''.join(digits).upper()}))}]")
    if _both(found, _TEXT)[-1:] == ((0xE000, _LAST),) and any(a <= 0x80 and b >= 0xD7FF for a, b in found):
        ways.append(_NOT_ASCII)
    return [way for way in ways if way != "[]"]


def _class(ranges: _Set) -> str:
    return "[" + "".join([_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges]) + "]"


def _char(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\u{{{code:x}}}"
