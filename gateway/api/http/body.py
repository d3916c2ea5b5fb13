"""What all request bodies share: strict types, ignored fields, and the 400 for the first error.

Union tags begin with "~", so that error paths can omit them. Must not know any API.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PrivateAttr,
    Tag,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.errors import ApiError, bad_request
from gateway.request.left_out import ANY, TOOLS, Ignored
from gateway.request.rules import MAX_CACHE_SALT_CHARS
from wire.sampling import ABOVE_LOWEST, CLIENT_RANGES, SCALARS

_CODES = {"missing": "missing_field", "extra_forbidden": "unknown_field", "value_error": "invalid_value"}


class Body(BaseModel):
    """Part of a request. Values are not converted; unknown fields are refused.

    `ignored`: field |-> values, besides null, that are accepted without effect. Other values are refused, never dropped
    silently. None: pydantic refuses unknown fields. `left_out`: the same, and `warnings` names them. `types`: supported
    values of `type`, if the API has more; `types_rule`: the error message for the others.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    ignored: ClassVar[Ignored | None] = None
    left_out: ClassVar[Ignored] = {}
    types: ClassVar[Sequence[str]] = ()
    types_rule: ClassVar[str] = ""

    _given_left_out: tuple[str, ...] = PrivateAttr(())

    def warnings(self, path: str = "") -> Iterator[str]:
        """What is left out of this body and of those in it; `path` is its own, with a dot behind it."""
        for name in self._given_left_out:
            yield f"{path}{name} has no effect here"
        for name, value in self:
            if isinstance(value, Body):
                yield from value.warnings(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for index, one in enumerate(value):
                    yield from one.warnings(f"{path}{name}[{index}].")

    @model_validator(mode="wrap")
    @classmethod
    def _drop_ignored(cls, given: Any, build: ValidatorFunctionWrapHandler) -> Self:
        if not isinstance(given, dict):
            built: Self = build(given)
            return built
        kind = given.get("type")
        if cls.types and isinstance(kind, str) and kind not in cls.types:
            raise _fault("unsupported_field", "type", f"{{path}} is {kind[:40]!r}; {cls.types_rule}")
        taken = {**cls.ignored, **cls.left_out} if cls.ignored and cls.left_out else cls.ignored
        built = build(given if taken is None else cls._supported(given, taken))
        built._given_left_out = tuple(name for name in cls.left_out if given.get(name) is not None)
        return built

    @classmethod
    def _supported(cls, given: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
        supported = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in given.items():
            if name in supported:
                kept[name] = value
            elif name not in ignored:
                raise _fault("unknown_field", name[:100], "unknown field '{path}'; remove it")
            elif value is not None and not any(_is_same(value, allowed) for allowed in ignored[name]):
                rule = f" other than as {' or '.join(map(repr, ignored[name]))}" if ignored[name] else ""
                raise _fault("unsupported_field", name, f"'{{path}}' is not supported here{rule}; remove it")
        return kept


class LeftOutTool(Body):
    """A tool that the API's own service runs."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str

    def warnings(self, path: str = "") -> Iterator[str]:
        yield f"{path.removesuffix('.')} of the type {self.type[:40]!r} is left out: no tools run here"


def _fault(code: str, field: str, rule: str) -> PydanticCustomError:
    """`rule`: the error message; `{path}` in it stands for the field's path."""
    return PydanticCustomError(code, "{rule}", {"field": field, "rule": rule})


def _is_same(value: object, allowed: object) -> bool:
    if allowed is ANY:
        return True
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed


def any_value(*names: str) -> Ignored:
    """These fields have no effect, whatever their value."""
    return dict.fromkeys(names, (ANY,))


def only_null(*names: str) -> Ignored:
    """These fields are known, and not supported."""
    return dict.fromkeys(names, ())


def joined(content: str | list[Any]) -> str:
    """The text of a content: a string, or bodies with a field `text`."""
    return content if isinstance(content, str) else "".join([part.text for part in content])


class FirstErrorOnly(FailFast):
    """Stops at a list's first wrong element. Hashable, as members of unions must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Ids = Annotated[list[int], FirstErrorOnly()]
Texts = Annotated[list[str], FirstErrorOnly()]


def _one_or_list(value: object) -> str:
    return "~list" if isinstance(value, list) else "~one"


SomeList = TypeVar("SomeList")
# A string, or a list of this type.
TextOr = Annotated[Annotated[str, Tag("~one")] | Annotated[SomeList, Tag("~list")], Discriminator(_one_or_list)]

CACHE_SALT_FIELD: Any = Field(
    None,
    description="KV of prompts is shared only between requests with the same salt.",
    json_schema_extra={"maxLength": MAX_CACHE_SALT_CHARS},
)


def by_type(default: str | None = None) -> Discriminator:
    """Discriminates a union of bodies by `type`; the tags are `~type`. `default`: the type if none is given."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"~{default if kind is None else kind}"

    return Discriminator(tag)


def tool_type(api: str, *own: str) -> Discriminator:
    """Discriminates tools by `type`: the tags are `~type` of `own`, or `~left_out`; the first of `own` has the rest."""

    def tag(value: object) -> str:
        if isinstance(value, LeftOutTool):
            return "~left_out"
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if isinstance(kind, str) and TOOLS[api].fullmatch(kind):
            return "~left_out"
        return f"~{kind}" if kind in own else f"~{own[0]}"

    return Discriminator(tag)


def sampling_field(name: str) -> Any:
    """Returns the pydantic field of a sampling parameter with its range."""
    lowest, highest = CLIENT_RANGES[name]
    return Field(
        None, json_schema_extra={"exclusiveMinimum" if name in ABOVE_LOWEST else "minimum": lowest, "maximum": highest}
    )


def given_sampling(body: Body) -> dict[str, float]:
    """Returns the sampling parameters that a request sets."""
    return {name: value for name in SCALARS if (value := getattr(body, name, None)) is not None}


def first_fault(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns a 400 that names the first wrong field by its path (`messages[0].role`). `errors`: FastAPI's."""
    error = errors[0]
    kind, path = error["type"], _path(error["loc"][1:])
    if kind == "model_attributes_type":
        return bad_request(f"{path} must be an object", path, "invalid_type")
    if kind == "union_tag_invalid":
        return _wrong_type(error, path)
    if kind in ("unknown_field", "unsupported_field"):
        path = f"{path}.{error['ctx']['field']}".removeprefix(".")
        return bad_request(error["ctx"]["rule"].replace("{path}", path), path, kind)
    return bad_request(f"{path}: {error['msg'].removeprefix('Value error, ')}", path, _CODES.get(kind, "invalid_type"))


def _wrong_type(error: Mapping[str, Any], path: str) -> ApiError:
    """Returns the 400 for a value whose `type` matches no body of a `by_type` union."""
    if not isinstance(error["input"], dict):
        return bad_request(f"{path} must be an object", path, "invalid_type")
    kind = error["input"].get("type")
    expected = error["ctx"]["expected_tags"].replace("'", "").replace("~", "")
    message = f"{path}.type is {str(kind)[:40]!r}; it must be one of {expected}"
    return bad_request(message, f"{path}.type", "unsupported_field" if isinstance(kind, str) else "invalid_type")


def _path(loc: Sequence[int | str]) -> str:
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]" and not step.startswith("~"):  # pydantic's name for a dict's key
            path += f".{step[:100]}" if path else step[:100]
    return path
