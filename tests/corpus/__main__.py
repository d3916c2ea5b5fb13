"""Records the product's answers to fixed requests, and compares two such records.

    python -m tests.corpus record OUT.jsonl [SERVICE ...]
    python -m tests.corpus compare A.jsonl B.jsonl

What differs from run to run is made equal when it is recorded, by the rules below and nowhere else.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from protos import inference_pb2
from tests.corpus.cases import Case, build_cases
from tests.corpus.services import FLAGS, Service, call, send, start

LEFT_OUT_HEADERS = {"date"}
# Values of these keys become the name of their type: times, what depends on times, and what each start draws anew.
VOLATILE_KEYS = re.compile(
    r"created|created_at|completed_at|pid|incarnation|\w+_seconds|draft_tokens|accepted_tokens|prefix_hits"
    r"|(free|used|cached)_pages|running|transfer_bytes|transport"
)
VOLATILE_TEXT = (
    (re.compile(r"\b(req|chatcmpl|cmpl)-[0-9a-f]{24}"), r"\1-ID"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "HOST:PORT"),
)
# Ids under these keys are numbered in the order in which an answer has them.
ID_KEYS = {"id", "call_id", "item_id", "tool_use_id"}
DRAWN_ID = re.compile(r"((chatcmpl|cmpl)-|(msg|resp|rs|fc|ctc|call|toolu)_)[0-9A-Za-z]{9,}|[0-9A-Za-z]{9}")
# In streams, events of choices are grouped by choice; neighbours that differ only under these keys become one event in
# which the texts and lists of these keys are joined. Deltas without text count as such of any key, and the ids of a
# completion's prompt as an event of their own; a chat's log-probabilities come after all. Sequence numbers that count
# the events are right.
JOINED_KEYS = {
    "text", "content", "reasoning_content", "reasoning", "arguments", "delta", "partial_json", "thinking", "token_ids",
    "logprobs", "tokens", "token_logprobs", "top_logprobs", "text_offset",
}  # fmt: skip
# Metrics are sorted and have no values; one of which there are samples only after a race is left out.
METRIC_VALUE = re.compile(r"^([^#\s][^ {]*(\{.*\})?) \S+$")
RACING_METRIC = "baton:cancelled_"
TOLERANCE = 2e-4  # log-probabilities change with the batch in which a token was computed
SHOWN_CHARS, SHOWN_PLACES, KEPT_BYTES = 160, 4, 3000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("services", nargs="*", default=list(FLAGS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(read(args.a), read(args.b))
    with args.out.open("w") as out:
        for name in args.services:
            started = time.monotonic()
            with start(name) as service:
                ready = time.monotonic()
                count = Counter[str]()
                for record in record_service(service):
                    out.write(json.dumps(record) + "\n")
                    count[record["name"].split()[1]] += 1
            took = f"{ready - started:.0f} s to start, {time.monotonic() - ready:.0f} s to answer"
            print(f"{name}: {count.total()} requests, {took}: {dict(count)}", file=sys.stderr)
    return 0


def record_service(service: Service) -> Iterator[dict[str, Any]]:
    with grpc.insecure_channel(service.grpc) as channel:
        for case in build_cases(service.name):
            answer = record_rpc(service, channel, case) if case.method == "rpc" else record_http(service, case)
            body = case.body or b""
            asked = body.decode("utf-8", "backslashreplace")[:KEPT_BYTES]
            request = {
                "method": case.method,
                "path": case.path,
                "headers": dict(case.headers),
                "body": asked,
                "bytes": len(body),
            }
            yield {"name": f"{service.name} {case.name}", "request": request, **answer}
    for process, address in sorted(service.ops.items()):
        for path in ("/live", "/ready", "/metrics", "/none"):
            answer = record_http(Service(service.name, address), Case("", "GET", path))
            yield {"name": f"{service.name} ops {process} {path}", "request": {"path": path}, **answer}


def record_http(service: Service, case: Case) -> dict[str, Any]:
    head, method = b"", "GET"
    if case.method != "raw":
        own = {"host": "localhost", **service.metadata}
        if case.body is not None:
            own |= {"content-type": "application/json", "content-length": str(len(case.body))}
        headers = {key: value for key, value in {**own, **case.headers}.items() if value is not None}
        lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
        head, method = "\r\n".join([*lines, "", ""]).encode("latin-1"), case.method
    status, given, content = send(service.http, head, case.body or b"", method)
    headers = {key.lower(): tidy_text(value) for key, value in given if key.lower() not in LEFT_OUT_HEADERS}
    if headers.get("content-length") == str(len(content)):
        headers["content-length"] = "right"
    if "allow" in headers:  # methods of a set
        headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))
    text, kind = content.decode("utf-8", "backslashreplace"), headers.get("content-type", "")
    body: Any = tidy_text(text)
    if kind.startswith("application/json") and text:
        body = Tidier().tidy(json.loads(text))
    elif kind.startswith("text/event-stream"):
        body = tidy_stream(text)
    elif "version=" in kind:
        lines = [METRIC_VALUE.sub(r"\1", line) for line in body.splitlines()]
        body = sorted(line for line in lines if RACING_METRIC not in line)
    return {"status": status, "headers": headers, "body": body}


def record_rpc(service: Service, channel: grpc.Channel, case: Case) -> dict[str, Any]:
    metadata = {key: value for key, value in {**service.metadata, **case.headers}.items() if value is not None}
    running, messages = call(channel, case.path, case.body or b"", metadata)
    given = dict((*running.initial_metadata(), *running.trailing_metadata()))
    status = status_pb2.Status.FromString(given.pop("grpc-status-details-bin", b""))
    kind = getattr(inference_pb2, f"{case.path.rpartition('/')[2]}Response", None)
    if kind:
        joined = join_messages([to_dict(kind.FromString(one)) for one in messages])
        body = Tidier().tidy(json.loads(json.dumps(joined, sort_keys=True)))  # the order of fields means nothing
    else:
        body = [one.hex() for one in messages]
    return {
        "status": running.code().name,
        "headers": {key: tidy_text(str(value)) for key, value in given.items()},
        "message": tidy_text(running.details() or ""),
        "details": [read_detail(one) for one in status.details],
        "body": body,
    }


def to_dict(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def read_detail(packed: AnyMessage) -> Any:
    kind = packed.TypeName().rpartition(".")[2]
    detail = getattr(error_details_pb2, kind)()
    packed.Unpack(detail)
    return {kind: MessageToDict(detail)}


def tidy_text(text: str) -> str:
    for pattern, replacement in VOLATILE_TEXT:
        text = pattern.sub(replacement, text)
    return text


class Tidier:
    """Applies the rules to the values of one answer."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def tidy(self, value: Any, key: str = "") -> Any:
        if VOLATILE_KEYS.fullmatch(key) and isinstance(value, int | float | str):
            return type(value).__name__ if isinstance(value, str) else "number"
        if isinstance(value, dict):
            return {name: self.tidy(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.tidy(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if key in ID_KEYS and DRAWN_ID.fullmatch(value):
            prefix = re.match(r"[a-z]*[-_]|", value)
            return self._ids.setdefault(value, f"{prefix[0] if prefix else ''}{len(self._ids)}")
        return tidy_text(value)


def tidy_stream(text: str) -> list[Any]:
    tidier = Tidier()
    events: list[Any] = []
    logprobs: dict[int, list[Any]] = {}  # choice |-> of all its chunks
    for block in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":"))
        if not lines:
            continue  # a comment, or the end
        data = lines.get("data", "")
        value = tidier.tidy(json.loads(data)) if data.startswith("{") else data
        if isinstance(value, dict) and value.get("sequence_number") == len(events):
            value["sequence_number"] = "right"
        choice = value["choices"][0] if isinstance(value, dict) and value.get("choices") else {}
        if "prompt_token_ids" in choice:
            ids = {"index": choice["index"], "prompt_token_ids": choice.pop("prompt_token_ids")}
            events.append({"data": {"choices": [ids]}})
        if (choice.get("logprobs") or {}).get("content"):  # of a chat: which chunk has a marker's is left to chance
            logprobs.setdefault(choice["index"], []).extend(choice["logprobs"]["content"])
            choice["logprobs"] = None
        if choice.get("delta") == {"content": ""}:
            choice["delta"] = {}
        delta = choice.get("delta", {})
        if isinstance(value, dict) and {"reasoning_content", "content"} <= delta.keys():  # tokens that came together
            first = {key: choice[key] if key == "index" else None for key in choice}
            first["delta"] = {"reasoning_content": delta.pop("reasoning_content")}
            events.append({**lines, "data": {**value, "choices": [first]}})
        events.append({**lines, "data": value})
    joined: list[Any] = []
    for _, run in groupby(events, key=lambda event: choice_of(event) is not None):
        for event in sorted(run, key=lambda event: choice_of(event) or 0):
            merged = merge(joined[-1], event) if joined else None
            joined[-1:] = [merged] if merged is not None else [*joined[-1:], event]
    return [*joined, *map(list, sorted(logprobs.items()))]


def choice_of(event: Mapping[str, Any]) -> int | None:
    data = event["data"]
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0]["index"] if choices else None


def merge(a: Any, b: Any, key: str = "") -> Any:
    """Two values as one; None if they differ in more than what is joined."""
    if key == "finish_reason" and a is None:
        return b
    if key == "delta" and {} in (a, b) and "role" not in (a or b):
        return a or b
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        merged = {name: merge(a[name], b[name], name) for name in a}
        return None if any(merged[name] is None and a[name] is not None for name in a) else merged
    if key in JOINED_KEYS and type(a) is type(b) and type(a) in (str, list):
        return a + b
    if key in JOINED_KEYS and (a is None or b is None):
        return b if a is None else a
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [merge(one, other) for one, other in zip(a, b, strict=True)]
        return None if any(one is None for one in pairs) else pairs
    return a if a == b else None


def join_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a gRPC stream as one for each choice, then the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = [{"usage": message.pop("usage")} for message in messages if "usage" in message]
    for message in messages:
        mine = choices.setdefault(message.get("index", 0), {})
        for key, value in message.items():
            mine[key] = mine[key] + value if key in mine and isinstance(value, str | list) else value
    return [*(choices[index] for index in sorted(choices)), *usage]


def read(path: Path) -> dict[str, Any]:
    return {record.pop("name"): record for record in map(json.loads, path.read_text().splitlines())}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Print each request whose answers differ. Returns the exit code."""
    differing = Counter[str]()
    for name in {**a, **b}:
        if name not in a or name not in b:
            places = [f"is in {'A' if name in a else 'B'} only"]
        else:
            places = list(differences(a[name], b[name], ""))
        if places:
            differing[name.split()[0]] += 1
            print(name, *places[:SHOWN_PLACES], sep="\n    ")
    print(f"{len(a)} and {len(b)} answers, {differing.total()} differ {dict(differing) or ''}")
    return 1 if differing else 0


def differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        if [key for key in a if key in b] != [key for key in b if key in a]:
            yield f"{path}: keys in another order"
        for key in {**a, **b}:
            yield from differences(a.get(key, "(none)"), b.get(key, "(none)"), f"{path}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(a, float) and isinstance(b, float) and abs(a - b) < TOLERANCE:
        return
    elif a != b or type(a) is not type(b):
        yield f"{path}: {show(a, b)} | {show(b, a)}"


def show(value: Any, other: Any) -> str:
    """A value from where it begins to differ from the other."""
    text, reference = json.dumps(value, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
    same = next((at for at, (one, two) in enumerate(zip(text, reference, strict=False)) if one != two), 0)
    begin = max(0, same - SHOWN_CHARS // 4)
    return ("..." if begin else "") + text[begin : begin + SHOWN_CHARS]


if __name__ == "__main__":
    sys.exit(main())
