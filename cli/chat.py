"""`baton chat`: a chat in the terminal, over the service's OpenAI REST API."""

import base64
import io
import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.service import URL, ApiKey, CommandError, Service, Url
from wire.image_formats import MAX_FILE_BYTES, TAKEN, find_type

HELP = """/help                               this text
/stats                              time to first token and rate of the last answer
/image FILE                         send an image with the next message; repeat for several
/metrics                            the service's metrics
/reset                              forget the conversation
/set temperature=0.5;max_tokens=100 fields of the next requests; /set alone shows them, NAME= drops one
/exit                               leave, as Ctrl-D does
Ctrl-C stops an answer."""


@dataclass(slots=True)
class Stats:
    """Figures of one answer."""

    begun: float  # time.monotonic
    first: float | None = None  # when the first text came
    last: float | None = None
    num_chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        if self.first is None or self.last is None:
            return "no answer yet"
        tokens = self.usage.get("completion_tokens", self.num_chunks)
        seconds = self.last - self.first
        rate = f"{(tokens - 1) / seconds:.1f} tok/s" if seconds > 0 and tokens > 1 else "no rate from one token"
        prompt = self.usage.get("prompt_tokens", "?")
        return f"TTFT {(self.first - self.begun) * 1000:.0f} ms, {rate}, {prompt} prompt and {tokens} answer tokens"


class Conversation:
    """Owns the history. Calls of the service raise CommandError."""

    def __init__(self, service: Service, model: str, system: str) -> None:
        """`model`: empty asks the service."""
        self.service = service
        self._model = model
        self._start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.history = list(self._start)
        self.images: list[str] = []  # of the next message, as data URIs
        self.options: dict[str, Any] = {}  # request fields set by the user, such as temperature
        self.stats = Stats(time.monotonic())

    def reset(self) -> None:
        self.history = list(self._start)
        self.images = []

    def add_image(self, path: str) -> None:
        """Add an image to the next message. Raises CommandError."""
        if not path:
            raise CommandError("/image needs a file: /image FILE")
        try:
            with Path(path).expanduser().open("rb") as opened:
                file = opened.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError, RuntimeError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise CommandError(f"{path} cannot be read: {why}") from error
        if (kind := find_type(file)) is None:
            raise CommandError(f"{path} is no {TAKEN} file")
        if len(file) > MAX_FILE_BYTES:
            raise CommandError(f"{path} has more than {MAX_FILE_BYTES} bytes, which is the most for an image")
        self.images.append(f"data:{kind};base64,{base64.b64encode(file).decode()}")

    def model(self) -> str:
        """The model's name, asked from the service when none was given."""
        if not self._model:
            models = self.service.read_json("/v1/models")
            try:
                self._model = str(models["data"][0]["id"])
            except (LookupError, TypeError) as error:
                listed = json.dumps(models)[:100]
                raise CommandError(f"{self.service.url}/v1/models lists no model, but {listed}: set --url") from error
        return self._model

    def metrics(self) -> list[str]:
        """The service's own metrics, without histograms' buckets."""
        lines = self.service.get("/metrics").text.splitlines()
        return [
            line for line in lines if line.startswith("baton:") and "_bucket" not in line and "_created" not in line
        ]

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say `text`; yields the answer's text as it comes. Closing the generator stops the answer and keeps it."""
        parts = [{"type": "image_url", "image_url": {"url": image}} for image in self.images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        question: dict[str, Any] = {"role": "user", "content": content}
        self.images = []
        answer = ""
        try:
            for part in self._stream([*self.history, question]):
                answer += part
                yield part
        except CommandError as error:
            if parts and not answer:
                raise CommandError(f"{error}\nneither the message nor its images are kept") from error
            raise
        finally:
            if answer:
                self.history += [question, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, Any]]) -> Iterator[str]:
        asked = {"model": self.model(), "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        self.stats = Stats(time.monotonic())
        with self.service.call("POST", "/v1/chat/completions", asked | self.options) as response:
            for chunk in iterate_events(iterate_lines(response.iter_bytes())):
                self.stats.usage = chunk.get("usage") or self.stats.usage
                for choice in chunk.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        self.stats.last = time.monotonic()
                        self.stats.first = self.stats.first or self.stats.last
                        self.stats.num_chunks += 1
                        yield text


def iterate_lines(parts: Iterator[bytes]) -> Iterator[str]:
    """Lines of server-sent events, however they were cut. U+2028 and the like, where str.splitlines cuts, end none."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


def iterate_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to [DONE]. Raises CommandError for an error event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise CommandError(f"the service sent what is no JSON: {data[:100]!r}") from error
        if "error" in chunk:
            raise CommandError(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
        yield chunk


def chat(*, url: Url = URL, model: str = "", api_key: ApiKey = "", system: str = "") -> int:
    """Chat with a served model in the terminal.

    Args:
        model: Name of the model; empty asks the service.
        system: System message at the start of the conversation.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() a history and editing
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not text is refused alone; the chat goes on
    with closing(Service(url, api_key)) as service:
        conversation = Conversation(service, model, system)
        print(f"{conversation.model()} at {service.url}; /help lists commands")
        return talk(conversation)


def talk(conversation: Conversation) -> int:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D leaves")
            continue
        if line == "/exit":
            return 0
        if line:
            run_line(conversation, line)


def run_line(conversation: Conversation, line: str) -> None:
    """Answer one line, a command or a message; errors are printed."""
    try:
        if line.startswith("/"):
            print(run_command(conversation, line))
        else:
            print_answer(conversation, line)
    except CommandError as error:
        print(f"error: {error}")
    except KeyboardInterrupt:
        print("\n(stopped)")


def run_command(conversation: Conversation, line: str) -> str:
    """Run a /command and return the text to show. Raises CommandError."""
    name, _, rest = line.partition(" ")
    match name:
        case "/help":
            return HELP
        case "/stats":
            return conversation.stats.describe()
        case "/image":
            conversation.add_image(rest.strip().strip("'\""))  # terminals quote a file that is dropped on them
            return f"images of the next message: {len(conversation.images)}"
        case "/metrics":
            return "\n".join(conversation.metrics())
        case "/reset":
            conversation.reset()
            return "the conversation is forgotten"
        case "/set":
            set_options(conversation.options, rest)
            options = conversation.options.items()
            return " ".join(f"{key}={json.dumps(value)}" for key, value in options) or "nothing set"
    return f"unknown command {printable(name)}; /help lists them"


def set_options(options: dict[str, Any], text: str) -> None:
    """Apply `name=value;name=value`; values are JSON or plain words. Raises CommandError for anything else."""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    for name, separator, _value in pairs:
        if not separator or not name.strip().isidentifier():
            raise CommandError(f"{name.strip()!r} is no setting: write /set temperature=0.5;max_tokens=100")
    for name, _separator, value in pairs:
        if text := value.strip():
            options[name.strip()] = text
            with suppress(ValueError):
                options[name.strip()] = json.loads(text)
        else:
            options.pop(name.strip(), None)


def print_answer(conversation: Conversation, text: str) -> None:
    """Print an answer as it comes. Ctrl-C closes the stream, which stops the model."""
    with closing(conversation.ask(text)) as parts:
        for part in parts:
            print(printable(part), end="", flush=True)
    print()


def printable(text: str) -> str:
    """The text without control characters, which would change the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
