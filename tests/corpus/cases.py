"""The requests that are recorded: those of cases.txt, and some of them with wrong values in each of their fields."""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from protos import inference_pb2

TABLE = Path(__file__).with_name("cases.txt")
SHARES = {"plain": 0.25, "drafts": 0.05, "both": 0.05, "tight": 0.05, "alone": 0.02}  # service |-> of wrong values sent
WITH_ALL_HTTP = {"plain", "tight"}  # other services differ from these only in what headers do
GONE = object()  # the field is left out
NUMBERS: Sequence[Any] = (0, -1, 7, 1.5, 10**9, -(2**70), float("nan"))
WRONG: Sequence[Any] = (GONE, None, "", "x", "auto", *NUMBERS, True, [], ["x"], [[]], [None], {}, {"x": 1})
WRONG_IN_MESSAGES: Mapping[str, Sequence[Any]] = {  # type of a field's value |-> others that a message can hold
    "int": (GONE, 0, -1, 7, 10**9, 2**63 - 1, -(2**63)),
    "float": (GONE, 0.0, -1.0, 1.5, 1e300, "NaN", "Infinity"),
    "str": (GONE, "", "x", "auto", "y" * 1100, "é\0"),
    "bool": (GONE, True, False),
    "list": (GONE,),
    "dict": (GONE, {}),
}
POSTS = ("/v1/completions", "/v1/messages", "/v1/responses", "/tokenize")
ASKED = b'{"model": "demo", "prompt": "Hello", "max_tokens": 1}'
INFERENCE = "/baton.v1.Inference/"
Section = list[tuple[str, Any]]  # (name, value) of each line


@dataclass(frozen=True)
class Case:
    """One request: over HTTP, or with the method "rpc" a gRPC method's, or with "raw" any bytes."""

    name: str
    method: str
    path: str  # of gRPC: with the service
    body: bytes | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)  # None: without the service's own


def build_cases(service: str) -> list[Case]:
    """All requests to a service, the same at every call."""
    http: dict[str, Section] = {}
    cases: list[Case] = []
    for title, section in read_table():
        if title.startswith("http"):
            http[title] = section
        else:
            cases.extend(api_cases(title, section, service))
    cases += [*http_cases(http, service in WITH_ALL_HTTP), *rpc_cases(http["http headers"])]
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    return cases


def read_table() -> Iterator[tuple[str, Section]]:
    for text in TABLE.read_text().split("\n[")[1:]:
        title, *lines = text.splitlines()
        pairs = (line.partition(" ") for line in lines if line and not line.startswith("#"))
        yield title.rstrip("]"), [(name, expand(json.loads(value))) for name, _, value in pairs]


def expand(value: Any) -> Any:
    """A value of the table without its shorthands."""
    if isinstance(value, list):
        return [expand(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    inner = {key: expand(inner) for key, inner in value.items()}
    match inner:
        case {"$times": [repeated, count]}:
            return repeated * count
        case {"$join": parts}:
            return "".join(parts)
        case {"$nest": depth}:
            return json.loads("[" * depth + "]" * depth)
    return inner


def api_cases(title: str, section: Section, service: str) -> Iterator[Case]:
    """A section's requests, their streamed twins, and those with wrong values."""
    path, *kinds = title.removeprefix("rpc ").split()
    is_rpc = title.startswith("rpc ")
    (_, base), *rest = section
    for name, fields in rest:
        full = {key: value for key, value in {**base, **fields}.items() if value is not None}
        bodies = [(name, full)]
        if "twice" in kinds and "stream" not in full:
            bodies.append((f"{name} streamed", {**full, "stream": True}))
        if name in kinds:
            draw = random.Random(f"{service} {path} {name}")
            wrong = wrong_bodies(full, is_rpc)
            bodies += [(f"{name}: {label}", body) for label, body in wrong if draw.random() < SHARES[service]]
        for label, body in bodies:
            if not is_rpc:
                yield Case(f"{path} {label}", "POST", path, json.dumps(body).encode())
            elif (message := build_message(path, body)) is not None:
                yield Case(f"{path} {label}", "rpc", INFERENCE + path, message)


def wrong_bodies(full: dict[str, Any], is_rpc: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """All bodies in which one field is missing, has another value, or is unknown."""
    for path, old in find_fields(full, ()):
        values = WRONG_IN_MESSAGES[type(old).__name__] if is_rpc else WRONG
        for value in (*values, {**old, "extra": 1}) if isinstance(old, dict) and not is_rpc else values:
            body = copy.deepcopy(full)
            inner: Any = body
            for step in path[:-1]:
                inner = inner[step]
            if value is GONE:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield f"{'.'.join(map(str, path))} {'gone' if value is GONE else json.dumps(value)[:60]}", body


def find_fields(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*path, step), inner
        yield from find_fields(inner, (*path, step))


def build_message(rpc: str, body: dict[str, Any]) -> bytes | None:
    """None for a body that no message can hold."""
    message: Message = getattr(inference_pb2, f"{rpc}Request")()
    try:
        ParseDict(body, message)
    except ParseError:
        return None
    return message.SerializeToString(deterministic=True)


def http_cases(http: Mapping[str, Section], has_all: bool) -> Iterator[Case]:
    """Paths, methods, bytes and headers."""
    table = dict(http["http"])
    if has_all:
        for path in table["paths"]:
            for method in table["methods"]:
                yield Case(f"http {method} {path}", method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None)
        for path in table["paths"][: table["posts"]]:
            for name, text in http["http bodies"]:
                yield Case(f"http {path} body {name}", "POST", path, text.encode("latin-1"))
    for name, headers in http["http headers"]:
        for path in POSTS:
            yield Case(f"http POST {path} {name}", "POST", path, ASKED, headers)
        if "content-type" not in headers:
            for path in ("/v1/models", "/live", "/status"):
                yield Case(f"http GET {path} {name}", "GET", path, None, headers)
    for name, headers in http["http preflights"]:
        for path in ("/v1/chat/completions", "/live", "/none"):
            yield Case(f"http {path} preflight {name}", "OPTIONS", path, None, headers)
    for name, text in http["http raw"]:
        yield Case(f"http raw {name}", "raw", "", text.encode("latin-1"))


def rpc_cases(headers: Section) -> Iterator[Case]:
    """Bytes, metadata and services."""
    for rpc in ("Generate", "Chat", "Tokenize", "Detokenize", "ListModels", "None"):
        path = INFERENCE + rpc
        yield Case(f"{rpc} bytes that are no message", "rpc", path, b"\xff\xff\xff")
        yield Case(f"{rpc} an unknown field", "rpc", path, b"\xf8\x3f\x01")
        yield Case(f"{rpc} a field of another type", "rpc", path, b"\x08\x01")
        for name, metadata in headers:
            if name.startswith(("authorization", "x-request-id")) and name.isascii():
                yield Case(f"{rpc} metadata {name}", "rpc", path, b"", metadata)
    for service in ("", "baton.v1.Inference", "none"):
        body = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
        yield Case(f"health {service}", "rpc", "/grpc.health.v1.Health/Check", body, {"authorization": None})
    yield Case("health list", "rpc", "/grpc.health.v1.Health/List", b"")
    yield Case("health unauthorised", "rpc", "/grpc.health.v1.Health/List", b"", {"authorization": None})
    yield Case("other service", "rpc", "/baton.v1.Worker/Status", b"")
