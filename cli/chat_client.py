"""A conversation with a served model over its OpenAI REST API: requests, history and figures; no terminal.

Must not know how text is shown: it yields text and raises errors that people can act on.
"""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from cli.connect import AddressError, open_client

TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0)


class ChatError(Exception):
    """The service cannot be reached or refused; says what to do."""


@dataclass(slots=True)
class Stats:
    """Figures of one answer."""

    begun: float  # time.monotonic
    first: float | None = None  # when the first text came
    last: float | None = None
    num_chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    def saw_text(self, now: float) -> None:
        """A piece of the answer came."""
        self.first = self.first or now
        self.last = now
        self.num_chunks += 1

    def describe(self) -> str:
        """One line for people."""
        if self.first is None or self.last is None:
            return "no answer yet"
        tokens = self.usage.get("completion_tokens", self.num_chunks)
        seconds = self.last - self.first
        rate = f"{(tokens - 1) / seconds:.1f} tok/s" if seconds > 0 and tokens > 1 else "no rate from one token"
        prompt = self.usage.get("prompt_tokens", "?")
        return f"TTFT {(self.first - self.begun) * 1000:.0f} ms, {rate}, {prompt} prompt and {tokens} answer tokens"


class Conversation:
    """Owns the history and the connection."""

    def __init__(self, url: str, model: str, api_key: str, system: str, transport: httpx.BaseTransport | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            self._client = open_client(self.url, api_key, TIMEOUT, transport)
        except AddressError as error:
            raise ChatError(str(error)) from error
        self._model = model
        self._start = [{"role": "system", "content": system}] if system else []
        self.history: list[dict[str, str]] = list(self._start)
        self.options: dict[str, Any] = {}  # request fields set by the user, such as temperature
        self.stats = Stats(time.monotonic())

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def reset(self) -> None:
        """Forget everything said."""
        self.history = list(self._start)

    def model(self) -> str:
        """The model's name, asked from the service when none was given."""
        if not self._model:
            answer = self._get("/v1/models")
            try:
                self._model = str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{answer.url} lists no model, but {answer.text[:100]!r}: set --url") from error
        return self._model

    def metrics(self) -> list[str]:
        """The service's own metrics, without histograms' buckets."""
        lines = self._get("/metrics").text.splitlines()
        return [
            line for line in lines if line.startswith("baton:") and "_bucket" not in line and "_created" not in line
        ]

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say `text`; yields the answer in pieces. Closing the iterator stops the answer; what came so far is kept."""
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            for piece in self._stream([*self.history, question]):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.history += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {
            "model": self.model(),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        try:
            request = self._client.build_request("POST", "/v1/chat/completions", json=body)
        except ValueError as error:
            raise ChatError(f"this cannot be sent ({error}); /set shows the settings, /set NAME= drops one") from error
        self.stats = Stats(time.monotonic())
        try:
            with closing(self._client.send(request, stream=True)) as response:
                _raise_refusal(response)
                for chunk in iterate_events(iterate_lines(response.iter_bytes())):
                    self.stats.usage = chunk.get("usage") or self.stats.usage
                    for choice in chunk.get("choices", ()):
                        if piece := choice.get("delta", {}).get("content"):
                            self.stats.saw_text(time.monotonic())
                            yield piece
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _get(self, path: str) -> httpx.Response:
        try:
            with self._client.stream("GET", path) as response:
                _raise_refusal(response)
                response.read()
                return response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ChatError(f"nobody answers at {self.url}: start `baton serve`, or set --url ({error})")
        return ChatError(f"the connection to {self.url} broke: {error or type(error).__name__}")


def iterate_lines(pieces: Iterator[bytes]) -> Iterator[str]:
    """Lines of server-sent events, however they were cut. U+2028 and the like, where str.splitlines cuts, end none."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


def iterate_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]. Raises ChatError for an error event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise ChatError(f"the service sent what is no JSON: {data[:100]!r}") from error
        if "error" in chunk:
            raise ChatError(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
        yield chunk


def _raise_refusal(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
        text = f"{error['message']}" + (f" (param {error['param']})" if error.get("param") else "")
    except (ValueError, KeyError, TypeError):
        text = response.text[:200] or response.reason_phrase
    raise ChatError(f"the service refused with {response.status_code}: {text}" + _advice(response))


def _advice(response: httpx.Response) -> str:
    match response.status_code:
        case 401:
            return "; set --api-key or BATON_API_KEY"
        case 404:
            return "; --model and --url must name a model and a service that exist"
        case 429 | 503:
            return f"; try again in {response.headers.get('retry-after', 'a few')} s"
    return ""
