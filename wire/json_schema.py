"""How the gateway and decode workers both read a JSON schema, so that what is enforced is also what is said. Pure.

Which parts of it are schemas, which keyword of a part decides where xgrammar follows only one, what a reference names,
and which expression a string has to match.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from wire.formats import FORMATS
from wire.patterns import MAX_REPEATS

Schema = Mapping[str, Any]

WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the first one decides; only `type` may stand beside it
_ABOUT = {  # type |-> keywords about it that grammars follow
    "object": ("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}  # fmt: skip
_TYPE_OF = {key: name for name, keys in _ABOUT.items() for key in keys}
_OWN = frozenset((*WHOLE, "type", "properties", "items", "prefixItems", "additionalProperties", "patternProperties"))
_NOTES = frozenset(("title", "description"))
TEXT_KEYS = ("format", "pattern", "minLength", "maxLength")

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name |-> schema
_LISTS = ("prefixItems", "items", "anyOf", "oneOf", "allOf")  # draft 7's items may be a list
_SINGLE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
)  # fmt: skip
_PLAIN_NAME = re.compile(r"[ !#-\[\]-~]*")
MAX_SHOWN = 64  # characters of a client's name


def inner_schemas(schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """The schemas directly in `schema`, each with the keys that lead to it."""
    for key in _SINGLE:
        if isinstance(part := schema.get(key), Mapping):
            yield (key,), part
    for key in _MAPS:
        if isinstance(inner := schema.get(key), Mapping):
            yield from (((key, name), part) for name, part in inner.items() if isinstance(part, Mapping))
    for key in _LISTS:
        if isinstance(inner := schema.get(key), list):
            yield from (((key, str(index)), part) for index, part in enumerate(inner) if isinstance(part, Mapping))


def written(keys: tuple[str, ...]) -> str:
    """A place as a pointer, with the beginnings of names, such as "#/properties/a"."""
    return "/".join(["#", *(key[:MAX_SHOWN] for key in keys)])


def deciding(schema: Schema) -> str | None:
    """The keyword that decides alone; None if `type` and the keywords about it do.

    Choices that say nothing of a value but what it requires, or the like, leave that to an object's own keywords.
    """
    whole = next((key for key in WHOLE if key in schema), None)
    if whole in ("anyOf", "oneOf", "allOf") and "properties" in schema:
        branches = schema[whole]
        if isinstance(branches, list) and all(isinstance(one, Mapping) and _OWN.isdisjoint(one) for one in branches):
            return None
    return whole


def own_types(schema: Schema) -> frozenset[str]:
    """The types that a part names, or the one that its first keyword of a type implies; empty if nothing shows them."""
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(name for name in named if isinstance(name, str))
    implied = [_TYPE_OF[key] for key in schema if key in _TYPE_OF and (key != "format" or str(schema[key]) in FORMATS)]
    return frozenset(implied[:1])


def find_target(root: object, ref: str) -> Any:
    """The part of `root` that a reference such as "#/$defs/a" names; None if there is none."""
    found = root if ref == "#" or ref.startswith("#/") else None
    for key in [unquote(part).replace("~1", "/").replace("~0", "~") for part in ref.split("/")[1:]]:
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def text_pattern(schema: Schema) -> str | None:
    """The expression that a string has to match to follow the first of its keywords; None if it has none."""
    match [schema.get(key) for key in TEXT_KEYS]:
        case [str(format), *_] if format in FORMATS:
            return f"^(?:{FORMATS[format]})$"
        case [_, str(pattern), *_]:
            return pattern
        case [_, _, None, None]:
            return None
        case [_, _, least, most] if all(number is None or _is_count(number) for number in (least, most)):
            fewest = min(int(least or 0), MAX_REPEATS)
            if most is None or fewest <= most:
                return f"^[^]{{{fewest},{'' if most is None else min(int(most), MAX_REPEATS)}}}$"
    return None


def _is_count(number: object) -> bool:
    return isinstance(number, (int, float)) and number >= 0 and number == int(number)


def names_pattern(schema: Schema) -> str | None:
    """The expression that an object's names have to match, where `propertyNames` can be followed; else None."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or not {"properties", "patternProperties"}.isdisjoint(schema):
        return None
    keys = names.keys() - _NOTES - {"type"}
    listed = names.get("enum")
    if names.get("type", "string") != "string":
        return None
    if keys == {"enum"} and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        return f"^(?:{'|'.join(map(re.escape, listed))})$"
    is_one = keys in ({"pattern"}, {"format"}) or (keys and keys <= {"minLength", "maxLength"})
    return text_pattern(names) if is_one else None


def has_odd_names(schema: Schema) -> bool:
    """Whether an object has names beyond its `properties` that xgrammar cannot tell from them: it compares bytes."""
    rest = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    named = [*schema.get("properties", ()), *schema.get("required", ())]
    return rest not in (None, False) and not all(_PLAIN_NAME.fullmatch(str(name)) for name in named)
