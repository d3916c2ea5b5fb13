"""The base of all request bodies: strict types, fields without effect, and the 400 for the first error.

Union tags begin with "~", so that error paths can omit them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PrivateAttr,
    Tag,
    ValidatorFunctionWrapHandler,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.errors import ApiError, bad_request, check_count
from gateway.images.parts import Content, ImagePart
from gateway.request.rules import LAST_PRIORITY, MAX_CACHE_SALT_CHARS, MAX_DEADLINE_MS, MAX_SESSION_CHARS
from gateway.tools.history import join_parts
from wire.sampling import SCALARS

ANY: Final[object] = object()  # every value
_WARNED = (ANY, "warned of")
Ignored = Mapping[str, tuple[object, ...]]  # unknown field |-> values, besides null, that are taken without effect

_CODES = {"missing": "missing_field", "extra_forbidden": "unknown_field", "value_error": "invalid_value"}


def any_value(*names: str) -> Ignored:
    """These fields have no effect, whatever their value."""
    return dict.fromkeys(names, (ANY,))


def warned(*names: str) -> Ignored:
    """These fields have no effect either, and the answer's warnings name them."""
    return dict.fromkeys(names, _WARNED)


class _Instead(str):
    """No value: what clients should do where a field is not supported."""


def only_null(*names: str, instead: str = "") -> Ignored:
    """These fields are known, and not supported."""
    return dict.fromkeys(names, (_Instead(instead),) if instead else ())


class Body(BaseModel):
    """Part of a request. Values are not converted.

    `ignored`: the only unknown fields and values that are taken; others are refused, never dropped silently. None:
    pydantic refuses all. `types`: supported values of `type`, if the API has more; `types_rule`: the error for others.
    `takes_ids`: it may hold as many numbers as prompts of token ids have.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    ignored: ClassVar[Ignored | None] = None
    types: ClassVar[Sequence[str]] = ()
    types_rule: ClassVar[str] = ""
    takes_ids: ClassVar[bool] = False

    def warnings(self, path: str = "") -> Iterator[str]:
        """Warnings of fields without effect, in this body and those in it. `path`: its own, with a dot behind it."""
        for name, value in vars(self).items():
            if value is None or isinstance(value, str):  # almost all of thousands of messages; the next check is slower
                continue
            if isinstance(value, Body):
                yield from value.warnings(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for index, one in enumerate(value):
                    yield from one.warnings(f"{path}{name}[{index}].")

    @model_validator(mode="wrap")
    @classmethod
    def _drop_ignored(cls, given: Any, build: ValidatorFunctionWrapHandler) -> Self:
        built: Self
        kind = given.get("type") if isinstance(given, dict) else None
        if cls.types and isinstance(kind, str) and kind not in cls.types:
            raise _fault("unsupported_field", "type", f"{{path}} is {kind[:40]!r}; {cls.types_rule}")
        if cls.ignored is None or not isinstance(given, dict) or given.keys() <= (supported := _names(cls)):
            built = build(given)
            return built
        for name, value in given.items():
            if name not in supported:
                _check_ignored(name, value, cls.ignored)
        built = build({name: value for name, value in given.items() if name in supported})
        if isinstance(built, WarningBody):
            warned_of = [name for name, taken in cls.ignored.items() if taken is _WARNED]
            built._warned = tuple(name for name in warned_of if given.get(name) is not None)
        return built


class WarningBody(Body):
    """A body with fields that are `warned` of. Its own class, as messages, of which there are thousands, have none."""

    _warned: tuple[str, ...] = PrivateAttr(())

    def warnings(self, path: str = "") -> Iterator[str]:
        yield from (f"{path}{name} has no effect here" for name in self._warned)
        yield from super().warnings(path)


@cache
def _names(body: type[Body]) -> frozenset[str]:
    """The names of its fields in requests."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _check_ignored(name: str, value: object, ignored: Ignored) -> None:
    if name not in ignored:
        raise _fault("unknown_field", name[:100], "unknown field '{path}'; remove it")
    hints = [taken for taken in ignored[name] if isinstance(taken, _Instead)]
    taken = [allowed for allowed in ignored[name] if allowed not in hints]
    is_taken = value is None or any(
        allowed is ANY or (isinstance(value, bool) == isinstance(allowed, bool) and value == allowed)
        for allowed in taken
    )
    if not is_taken:
        rule = f" other than as {' or '.join(map(repr, taken))}" if taken else ""
        hint = hints[0] if hints else "remove it"
        raise _fault("unsupported_field", name, f"'{{path}}' is not supported here{rule}; {hint}")


def _fault(code: str, field: str, rule: str) -> PydanticCustomError:
    """`rule`: the error message; `{path}` in it stands for the field's path."""
    return PydanticCustomError(code, "{rule}", {"field": field, "rule": rule})


class LeftOutTool(Body):
    """A tool that the API's own service runs."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str

    def warnings(self, path: str = "") -> Iterator[str]:
        yield f"{path.removesuffix('.')} of the type {self.type[:40]!r} is left out: no tools run here"


class _FirstErrorOnly(FailFast):
    """Stops at a list's first wrong element. Hashable, as members of unions must be."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Element = TypeVar("Element")
Many = Annotated[list[Element], _FirstErrorOnly()]
Ids = Many[int]
Texts = Many[str]
SomeList = TypeVar("SomeList")
# A string, or a list of this type.
TextOr = Annotated[
    Annotated[str, Tag("~one")] | Annotated[SomeList, Tag("~list")],
    Discriminator(lambda value: "~list" if isinstance(value, list) else "~one"),
]
Word = TypeVar("Word")
Named = TypeVar("Named")
# One of these words, or an object of this type.
WordOr = Annotated[
    Annotated[Word, Tag("~word")] | Annotated[Named, Tag("~named")],
    Discriminator(lambda value: "~word" if isinstance(value, str) else "~named"),
]


def by_type(*own: str, default: str | None = None, left_out: re.Pattern[str] | None = None) -> Discriminator:
    """Discriminates a union of bodies by `type`; the tags are `~type`.

    `own`: if given, the only types with a body, of which the first has the rest; `default`: the type if none is given;
    `left_out`: the types of LeftOutTool, whose tag is `~left_out`.
    """

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if left_out is not None and isinstance(kind, str) and left_out.fullmatch(kind):
            return "~left_out"
        kind = default if kind is None else kind
        return f"~{own[0] if own and kind not in own else kind}"

    return Discriminator(tag)


class ImageBody(Body):
    """A part of a content that is an image."""

    ignored: ClassVar[Ignored] = {}

    def image(self, path: str) -> ImagePart:
        """`path`: its own, for errors. Raises ApiError."""
        raise NotImplementedError


DETAIL_FIELD: Any = Field(None, description="Not used: the model's own processor decides how large an image is read.")


def joined(content: str | Sequence[Any], path: str) -> Content:
    """Texts and images of a content: a string, or bodies that are images or have a field `text`. `path`: its field."""
    if isinstance(content, str):
        return content
    parts = [one.image(f"{path}[{at}]") if isinstance(one, ImageBody) else one.text for at, one in enumerate(content)]
    found: Content = join_parts(parts)
    return found


MAX_REASONING_FIELD: Any = Field(
    None, description="Most tokens to reason; then the answer follows.", json_schema_extra={"minimum": 0}
)
CACHE_SALT_FIELD: Any = Field(
    None,
    description="KV of prompts is shared only between requests with the same salt.",
    json_schema_extra={"maxLength": MAX_CACHE_SALT_CHARS},
)
SESSION_FIELD: Any = Field(
    None,
    description="Names the conversation: its turns go to the same workers.",
    json_schema_extra={"maxLength": MAX_SESSION_CHARS},
)
USER_FIELD: Any = Field(None, description="A text: whose share of the service the request counts for.")
SEED_FIELD: Any = Field(None, json_schema_extra={"minimum": -(2**63), "maximum": 2**64 - 1})
_TOP_K_FIELD: Any = Field(None, description="0 and -1 keep all tokens.", json_schema_extra={"minimum": -1})
SomeBody = TypeVar("SomeBody", bound=Body)


def sampling_field(name: str) -> Any:
    """Returns the pydantic field of a sampling parameter with its range."""
    clients = SCALARS[name].clients
    if clients is None:
        return _TOP_K_FIELD
    least = "exclusiveMinimum" if clients.excludes_lowest else "minimum"
    return Field(None, json_schema_extra={least: clients.lowest, "maximum": clients.highest})


def with_sampling(body: type[SomeBody]) -> type[SomeBody]:
    """Adds a field for each sampling parameter but `seed` behind the body's own fields."""
    types = {name: int if scalar.dtype.startswith("i") else float for name, scalar in SCALARS.items() if name != "seed"}
    given: dict[str, Any] = {name: (kind | None, sampling_field(name)) for name, kind in types.items()}
    return create_model(body.__name__, __base__=body, __module__=body.__module__, **given)


def given_sampling(body: Body) -> dict[str, float]:
    """Returns the sampling parameters that a request sets."""
    return {name: value for name in SCALARS if (value := getattr(body, name, None)) is not None}


MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512  # OpenAI's


def check_metadata(given: Mapping[str, Any]) -> None:
    """Raises ApiError unless these are a few short texts with short names."""
    check_count("metadata", len(given), MAX_METADATA, "entries")
    for name, value in given.items():
        check_count("metadata", len(name), MAX_KEY_CHARS, "characters in a key")
        if not isinstance(value, str):
            raise bad_request(f"metadata.{name} must be a text", "metadata", "invalid_type")
        check_count("metadata", len(value), MAX_VALUE_CHARS, "characters in a value")


def needs_store(name: str) -> ApiError:
    """400: the field `name` asks for what only a store of answers can give."""
    why = f"{name} needs a store of answers: start the gateway with --state-dir DIR, or --state-url URL"
    return bad_request(why, name, "unsupported_field")


class OrderFields(WarningBody):
    """When an answer is wanted; null means not given."""

    priority: int | None = Field(
        None,
        description="Order among waiting requests: 0 goes first; 5 if not given.",
        json_schema_extra={"minimum": 0, "maximum": LAST_PRIORITY},
    )
    deadline_ms: int | None = Field(
        None,
        description="Milliseconds from the request's arrival in which its answer must begin; else it is refused.",
        json_schema_extra={"minimum": 1, "maximum": MAX_DEADLINE_MS},
    )

    def order(self) -> dict[str, Any]:
        """Fields of GenerateRequest that are given."""
        fields = {name: value for name in OrderFields.model_fields if (value := getattr(self, name)) is not None}
        user = getattr(self, "user", None)
        return fields | ({"user": user} if user else {})


def first_fault(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns a 400 that names the first wrong field by its path (`messages[0].role`). `errors`: FastAPI's."""
    error, path = errors[0], ""
    for step in error["loc"][1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step != "[key]" and not step.startswith("~"):  # pydantic's name for a dict's key
            path += f".{step[:100]}" if path else step[:100]
    kind = error["type"]
    if kind == "model_attributes_type" or (kind == "union_tag_invalid" and not isinstance(error["input"], dict)):
        return bad_request(f"{path} must be an object", path, "invalid_type")
    if kind == "union_tag_invalid":  # no body of a `by_type` union
        given = error["input"].get("type")
        expected = error["ctx"]["expected_tags"].replace("'", "").replace("~", "")
        message = f"{path}.type is {str(given)[:40]!r}; it must be one of {expected}"
        return bad_request(message, f"{path}.type", "unsupported_field" if isinstance(given, str) else "invalid_type")
    if kind in ("unknown_field", "unsupported_field"):
        path = f"{path}.{error['ctx']['field']}".removeprefix(".")
        return bad_request(error["ctx"]["rule"].replace("{path}", path), path, kind)
    return bad_request(f"{path}: {error['msg'].removeprefix('Value error, ')}", path, _CODES.get(kind, "invalid_type"))
