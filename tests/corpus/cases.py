"""The requests that are recorded: those of cases.txt, each of their fields with wrong values, and bare HTTP."""

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

SERVICE_SHARES = {"plain": 0.25, "drafts": 0.05, "both": 0.05, "tight": 0.05, "alone": 0.02}  # of wrong values sent
GONE = object()  # the field is left out
WRONG: Sequence[Any] = (
    GONE, None, "", "x", "auto", 0, -1, 7, 1.5, 10**9, -(2**70), float("nan"), True, [], ["x"], [[]], {}, {"x": 1},
    [None],
)  # fmt: skip
WRONG_OF_PROTO: Mapping[str, Sequence[Any]] = {  # kind of a field's value |-> others that a message can hold
    "int": (0, -1, 7, 10**9, 2**63 - 1, -(2**63)),
    "float": (0.0, -1.0, 1.5, 1e300, "NaN", "Infinity"),
    "str": ("", "x", "auto", "y" * 1100, "é\0"),
    "bool": (True, False),
    "list": ([],),
    "dict": ({},),
}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
         "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/models", "/v1/models/demo", "/v1/models/no/one",
         "/v1/models/", "/live", "/ready", "/health", "/status", "/metrics", "/version", "/openapi.json", "/",
         "/page/style.css", "/page/app.js", "/page/examples.json", "/page/none", "/docs", "/v1", "/v1/embeddings",
         "//v1/models", "/v1/messages/", "/v1/%6dodels", "/v1/models?x=1")  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "FOO")
POSTS = tuple(path for path in PATHS[:8])
ASKED = '{"model": "demo", "prompt": "Hello", "max_tokens": 1}'
BODIES: Mapping[str, bytes] = {
    "empty": b"", "space": b"  ", "list": b"[]", "text": b'"x"', "null": b"null", "number": b"1", "open": b'{"model": ',
    "comma": b'{"model": "demo",}', "single": b"{'model': 'demo'}", "after": b'{"model": "demo"} x',
    "nan": b'{"n": NaN}',
    "bom": b"\xef\xbb\xbf{}", "utf16": '{"model": "demo"}'.encode("utf-16"), "latin1": b'{"model": "\xe9"}',
    "half": b'{"model": "\\ud800"}', "control": b'{"model": "a\nb"}', "twice": b'{"model": "demo", "model": "demo"}',
    "twice-inside": b'{"model": "demo", "x": [{"a": 1, "b": {"c": 1, "c": 2}}]}', "deep": b'{"x": ' + b"[" * 5000,
    "deep-closed": b'{"x": ' + b"[" * 300 + b"]" * 300 + b"}", "containers": b'{"x": [' + b"[]," * 25000 + b"[]]}",
    "strings": b'{"x": [' + b'"",' * 60000 + b'""]}', "large": b'{"x": "' + b"x" * 9_000_000 + b'"}',
    "number-long": b'{"n": ' + b"9" * 5000 + b"}", "medium": b'{"x": "' + b"x" * 20_000 + b'"}',
}  # fmt: skip
HEADERS: Sequence[Mapping[str, str | None]] = (
    *({"content-type": kind} for kind in (
        "text/plain", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json", "",
        "application/jsonx",        "multipart/form-data; boundary=x", "application/x-www-form-urlencoded")),
    {"authorization": None}, {"authorization": "Bearer wrong"}, {"authorization": "bearer key-two"},
    {"authorization": "Basic key-one"}, {"authorization": "Bearer"}, {"authorization": None, "x-api-key": "key-one"},
    {"authorization": None, "x-api-key": "wrong"}, {"x-request-id": "mine"}, {"x-request-id": "a" * 129},
    {"x-request-id": "\u00e9"}, {"origin": "https://a.example"}, {"origin": "https://b.example"}, {"origin": "null"},
    {"origin": "http://x"}, {"origin": "https://x:443"}, {"accept": "text/html"}, {"accept-encoding": "gzip"},
    {"content-encoding": "gzip"}, {"expect": "100-continue"}, {"traceparent": "00-xyz"}, {"connection": "close"},
    {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}, {"host": "evil.example"}, {"content-length": "-1"},
    {"content-length": "x"}, {"x-long": "a" * 70_000}, {"transfer-encoding": "gzip"},
    {"content-length": "99999999999999999999"},
)  # fmt: skip
PREFLIGHTS = tuple(
    {"origin": origin, "access-control-request-method": method, "access-control-request-headers": "authorization"}
    for origin in ("https://a.example", "https://b.example")
    for method in ("POST", "DELETE")
)
CHUNKED = (
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer key-one\r\n\r\n"
)
RAW: Mapping[str, str] = {
    "garbage": "\x00\x01\x02\r\n\r\n",
    "no-host": "GET /live HTTP/1.1\r\n\r\n",
    "http-1.0": "GET /live HTTP/1.0\r\n\r\n",
    "http-2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http-9": "GET /live HTTP/9.9\r\nHost: x\r\n\r\n",
    "absolute": "GET http://x/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk": "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "long-path": f"GET /{'a' * 3000} HTTP/1.1\r\nHost: x\r\n\r\n",
    "longer-path": f"GET /{'a' * 70000} HTTP/1.1\r\nHost: x\r\n\r\n",
    "header-without-colon": "GET /live HTTP/1.1\r\nHost x\r\n\r\n",
    "two-lengths": "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "chunked": f"{CHUNKED}{len(ASKED):x}\r\n{ASKED}\r\n0\r\n\r\n",
    "chunked-in-bytes": CHUNKED + "".join(f"1\r\n{char}\r\n" for char in ASKED) + "0\r\n\r\n",
    "chunked-badly": f"{CHUNKED}zz\r\n{ASKED}\r\n0\r\n\r\n",
    "upgrade": "GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@dataclass(frozen=True)
class Case:
    """One request: over HTTP with a head, else a gRPC method's."""

    name: str
    method: str
    path: str  # of gRPC: the full method; of raw HTTP: all its bytes as latin-1
    body: bytes | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)  # None: without the service's own


def build_cases(service: str) -> list[Case]:
    """All requests to a service, the same at every call."""
    cases = [*table_cases(service), *http_cases(service), *rpc_cases()]
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    return cases


def table_cases(service: str) -> Iterator[Case]:
    path, kinds, base, full = "", set[str](), {}, {}
    for line in Path(__file__).with_name("cases.txt").read_text().splitlines():
        if line.startswith("["):
            path, *words = line.strip("[]").removeprefix("rpc ").split()
            is_rpc, kinds = line.startswith("[rpc"), set(words)
        elif line and not line.startswith("#"):
            name, _, text = line.partition(" ")
            fields = expand(json.loads(text))
            if name == "base":
                base = fields
                continue
            full = {key: value for key, value in {**base, **fields}.items() if value is not None}
            draw = random.Random(f"{service} {path} {name}")
            wrong = wrong_bodies(full, draw, SERVICE_SHARES[service], is_rpc) if name in kinds else iter(())
            for label, body in [(name, full), *((f"{name}: {label}", body) for label, body in wrong)]:
                if is_rpc:
                    yield from rpc_case(f"{path} {label}", path, body)
                    continue
                yield Case(f"{path} {label}", "POST", path, json.dumps(body).encode())
                if "twice" in kinds and label == name and "stream" not in body:
                    yield Case(f"{path} {label} streamed", "POST", path, json.dumps({**body, "stream": True}).encode())


def expand(value: Any) -> Any:
    """A value of the table without its shorthands."""
    if isinstance(value, dict) and "$times" in value:
        repeated, count = value["$times"]
        return repeated * count
    if isinstance(value, dict) and "$nest" in value:
        return json.loads("[" * value["$nest"] + "]" * value["$nest"])
    if isinstance(value, dict):
        return {key: expand(inner) for key, inner in value.items()}
    return [expand(inner) for inner in value] if isinstance(value, list) else value


def wrong_bodies(full: dict[str, Any], draw: random.Random, share: float, is_rpc: bool) -> Iterator[tuple[str, Any]]:
    """This share of all bodies in which one field is missing, has another value, or is unknown."""
    for path in list(find_paths(full, ())):
        old = full
        for step in path:
            old = old[step]
        values = (GONE, *WRONG_OF_PROTO[type(old).__name__]) if is_rpc else WRONG
        if isinstance(old, dict) and not is_rpc:
            values = (*values, {**old, "extra": 1})
        for value in values:
            if draw.random() < share:
                body = copy.deepcopy(full)
                *way, last = path
                inner: Any = body
                for step in way:
                    inner = inner[step]
                if value is GONE:
                    del inner[last]
                else:
                    inner[last] = value
                shown = "gone" if value is GONE else json.dumps(value)[:60]
                yield f"{'.'.join(map(str, path))} {shown}", body


def find_paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield (*path, step)
        yield from find_paths(inner, (*path, step))


def rpc_case(name: str, rpc: str, body: dict[str, Any]) -> Iterator[Case]:
    """Nothing for a body that no message can hold."""
    message: Message = getattr(inference_pb2, f"{rpc}Request")()
    try:
        ParseDict(body, message)
    except ParseError:
        return
    yield Case(name, "rpc", f"/baton.v1.Inference/{rpc}", message.SerializeToString(deterministic=True))


def http_cases(service: str) -> Iterator[Case]:
    is_tried = service in ("plain", "tight")  # others differ from these only in what headers do
    for path in PATHS if is_tried else ():
        for method in METHODS:
            yield Case(f"http {method} {path}", method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None)
    for path in POSTS if is_tried else ():
        for name, body in BODIES.items():
            yield Case(f"http {path} body {name}", "POST", path, body)
    for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"):
        for headers in HEADERS:
            name = f"http {path} headers {json.dumps(headers)[:90]}"
            yield Case(name, "POST", path, ASKED.encode(), headers)
    for path in ("/v1/models", "/live", "/status"):
        for headers in HEADERS[8:]:
            yield Case(f"http {path} headers {json.dumps(headers)[:90]}", "GET", path, None, headers)
    for path in ("/v1/chat/completions", "/live", "/none"):
        for headers in PREFLIGHTS:
            yield Case(f"http {path} preflight {json.dumps(headers)}", "OPTIONS", path, None, headers)
    for name, text in RAW.items():
        yield Case(f"http raw {name}", "raw", text)


def rpc_cases() -> Iterator[Case]:
    for rpc in ("Generate", "Chat", "Tokenize", "Detokenize", "ListModels", "None"):
        path = f"/baton.v1.Inference/{rpc}"
        yield Case(f"{rpc} bytes that are no message", "rpc", path, b"\xff\xff\xff")
        yield Case(f"{rpc} an unknown field", "rpc", path, b"\xf8\x3f\x01")
        yield Case(f"{rpc} a field of another type", "rpc", path, b"\x08\x01")
        for headers in HEADERS[8:17]:
            if headers.get("x-request-id") != "\u00e9":  # clients cannot send it
                yield Case(f"{rpc} metadata {json.dumps(headers)[:90]}", "rpc", path, b"", headers)
    for service in ("", "baton.v1.Inference", "none"):
        body = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
        yield Case(f"health {service}", "rpc", "/grpc.health.v1.Health/Check", body, {"authorization": None})
    yield Case("health watch", "rpc", "/grpc.health.v1.Health/List", b"")
    yield Case("other service", "rpc", "/baton.v1.Decode/Status", b"")
