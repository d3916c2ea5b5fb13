"""What clients can make the gateway hold and do: the table of docs/LIMITS.md, made from the constants that bound it.

`python -m tests.documents.bounds docs/LIMITS.md` writes it; a test compares. Bounds on fields are in docs/API.md.
"""

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from gateway.api.http.connection import KEEP_ALIVE_S, MAX_CONNECTIONS
from gateway.batches.lines import MAX_ALL_LINES, MAX_LINES
from gateway.batches.pace import RESERVE
from gateway.batches.runner import MAX_OPENING
from gateway.batches.store import MAX_FILE_BYTES, MAX_OPEN_BATCHES, MAX_RECORDS
from gateway.fair_turns import SHORT_BYTES
from gateway.held import IDLE_S, MAX_HELD_BYTES
from gateway.images import reader
from gateway.loop_watch import MAX_STEP_S
from gateway.request.rules import MAX_CHOICES, MAX_MESSAGES, TEXT_BYTES_PER_TOKEN
from gateway.shares import SHARE
from gateway.text import offload, template_process, templates
from gateway.text.tokenizer import RENDERED_BYTES_PER_TOKEN
from gateway.tools.json_text import MAX_DIGITS, MAX_ELEMENTS, JsonBudget
from gateway.tools.request import MAX_TOOLS, MAX_TOOLS_BYTES
from runtime.peer_input import MAX_JSON_DEPTH
from wire.images import MAX_IMAGES

_MARKS = re.compile(r"(?<=<!-- bounds -->\n).*?(?=<!-- /bounds -->)", re.DOTALL)
_A_SHARE = "[a share](#shares)"


@dataclass(frozen=True)
class Bound:
    """One row. Empty: no bound of its own."""

    what: str
    one_request: str = ""
    one_key: str = ""
    together: str = ""
    beyond: str = ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"


def build_bounds() -> list[Bound]:
    """All bounds that a client's requests share, and those that keep a request's step of the event loop short."""
    parts = JsonBudget()
    return [
        Bound("a step of the event loop", f"{MAX_STEP_S:g} s of CPU time, by design", beyond="counted and logged"),
        Bound(
            f"requests of more than {SHORT_BYTES >> 10} KiB that are read and checked",
            one_key="1",
            together="1; after each step, others have the event loop for as long as it took",
            beyond="waits; keys take turns",
        ),
        Bound(
            "JSON of a body, and again of texts of JSON in it (a call's arguments, gRPC's schemas)",
            f"{parts.containers:,} containers, {parts.strings:,} strings, {parts.elements:,} other elements (besides "
            f"token ids), {MAX_JSON_DEPTH} levels, numbers of {MAX_DIGITS} digits; counted before it is converted",
            beyond="400",
        ),
        Bound("numbers in repeated fields of gRPC", f"{MAX_ELEMENTS:,}, and as many as the context has", beyond="400"),
        Bound(
            "messages; tools",
            f"{MAX_MESSAGES:,}; {MAX_TOOLS}, of {MAX_TOOLS_BYTES >> 10} KiB together",
            beyond="400",
        ),
        Bound("text of a prompt", f"{TEXT_BYTES_PER_TOKEN} bytes a token of the context", beyond="400"),
        Bound(
            "answers: `n` times prompts",
            f"{MAX_CHOICES}",
            f"{_A_SHARE} of the queue",
            "`--max-queue` in the queue",
            "400, 429",
        ),
        Bound(
            "bodies under way and answers not read",
            "`--body-limit-bytes`",
            f"{_A_SHARE}, of bodies",
            _mib(MAX_HELD_BYTES),
            f"what was idle longest, {IDLE_S:g} s at least, gives way, with a warning; else 429",
        ),
        Bound(
            "connections",
            together=f"{MAX_CONNECTIONS:,}, and three quarters of the open files allowed",
            beyond="the oldest without a request is cut, with a warning",
        ),
        Bound(
            "connections of gRPC",
            together=f"{MAX_CONNECTIONS:,}, and an eighth of the open files allowed",
            beyond=f"new ones are refused; one without a call for {KEEP_ALIVE_S} s is closed",
        ),
        Bound(
            "long texts to tokenise or to decode, waiting",
            f"{offload.TIMEOUT_S:g} s",
            _A_SHARE,
            f"{offload.MAX_WAITING}",
            "429; the work ends with its request, or with the text in hand: about a second for each MB",
        ),
        Bound("threads for these", "1", f"{offload.THREADS - 1}", f"{offload.THREADS}", "waits; keys take turns"),
        Bound(
            "conversations to render by the model's chat template, waiting",
            f"{templates.TIMEOUT_S:g} s; then {template_process.CPU_S:g} s of CPU time, {template_process.WALL_S:g} s, "
            f"{_mib(template_process.MEMORY_BYTES)}, {RENDERED_BYTES_PER_TOKEN} bytes of text a token of the context",
            _A_SHARE,
            f"{templates.MAX_WAITING}",
            "429; beyond time, memory or text 400; the work ends with its request",
        ),
        Bound("forks that render these", "1", f"{template_process.FORKS - 1}", f"{template_process.FORKS}", "as above"),
        Bound(
            "images, waiting",
            f"{MAX_IMAGES}, {_mib(reader.MAX_ALL_BYTES)}, {reader.ALL_S:g} s",
            _A_SHARE,
            f"{reader.MAX_WAITING}",
            "400, 429",
        ),
        Bound("forks that read these", "", f"{reader.AT_ONCE - 1}", f"{reader.AT_ONCE}", "waits; keys take turns"),
        Bound(
            "a file for batches",
            f"{_mib(MAX_FILE_BYTES)}, {MAX_LINES:,} lines, {MAX_ALL_LINES:,} with empty ones",
            beyond="413, or the batch fails",
        ),
        Bound(
            "files and batches; batches that are not over", "", _A_SHARE, f"{MAX_RECORDS:,}; {MAX_OPEN_BATCHES}", "429"
        ),
        Bound(
            "bytes of files, of uploads as they arrive, and of output",
            "",
            _A_SHARE,
            "`--batch-dir-mib`",
            "413; lines wait",
        ),
        Bound("inputs of batches that are read", "", "1", f"{MAX_OPENING}", "waits"),
        Bound(
            "answers of batches' lines",
            "",
            "",
            f"all places but {RESERVE:.0%}, and what slows live answers by little",
            "waits for its turn",
        ),
    ]


def build_table() -> str:
    """As Markdown."""
    names = [one.name for one in fields(Bound)]
    head = [f"| {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * len(names) + "|"]
    rows = [f"| {' | '.join(getattr(bound, name) for name in names)} |" for bound in build_bounds()]
    return "\n".join([*head, *rows]) + f"\n\nA share: at most {SHARE} times what is then left free.\n"


def write(document: Path) -> None:
    """Puts the table between the document's marks."""
    document.write_text(_MARKS.sub(lambda _: build_table(), document.read_text()))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
