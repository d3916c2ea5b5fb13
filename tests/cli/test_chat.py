"""`baton chat`, `launch`, `status` and `drain` against a fake service with canned answers, and with odd input."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.chat import (
    Conversation,
    chat,
    iterate_events,
    iterate_lines,
    printable,
    run_command,
    run_line,
    set_options,
)
from cli.drain import drain, read_secret
from cli.launch import AGENTS, AgentName
from cli.rollout import rollout
from cli.service import CommandError, Service
from cli.status import COLUMNS, build_table, keep_watching, status
from tests.support.command_line import call, run
from wire.image_formats import MAX_FILE_BYTES

WAIT_S = 60.0
AGAIN_S = 3.0  # interval between presses of Ctrl-C
STRANGER = {"another worker than was meant answers at decode:9000": "give each its own address"}
LAST = {
    "role": "decode", "address": "[fd00::1]:9001", "incarnation": "[red]", "transport": "none", "alive": True,
    "weaknesses": STRANGER, "kv_token_bytes": 1152, "head_token_bytes": 81_920,
}  # fmt: skip
OTHERS = [
    {"role": "decode", "address": "h:2", "transport": "shm", "alive": False, "adapters": {"one": "loaded"}},
    {"role": "prefill", "address": "h:3", "transport": "shm", "alive": True},
    {"role": "decode", "address": "h:4", "transport": "shm", "alive": True, "model": "large"},
]
WORKERS = [LAST | {"model": "small"}, *OTHERS]
STATUS = {
    "workers": WORKERS,
    "trouble": "no prefill worker is alive; decode workers prefill",
    "no_hand_off": "the workers share cores",
    "models": {"small": "awake", "large": "waking 40 %"},
}


REVISIONS = {
    "revisions": {
        "new": {"share": 0.1, "prefill": 1, "decode": 2, "running": 7},
        "[red]": {"share": None, "prefill": 0, "decode": 1, "running": 0},
    }
}


class FakeService(ThreadingHTTPServer):
    """Repeats each message, word by word; "wait" starts an answer and never ends it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = threading.Event()  # a client left in mid-answer
        self.key = ""  # from the last GET
        self.odd_answers: dict[str, str] = {}  # path |-> its answer instead


class FakeHandler(BaseHTTPRequestHandler):
    """One request of the fake service."""

    server: FakeService

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        answers = {
            "/v1/models": json.dumps({"data": [{"id": "fake"}]}),
            "/metrics": '# HELP x\nbaton:requests 3\nbaton:seconds_bucket{le="1"} 2\npython_info 1\n',
            "/status": json.dumps(STATUS),
            "/v1/revisions": json.dumps(REVISIONS),
        }
        answers |= self.server.odd_answers
        self.server.key = self.headers.get("authorization", "")
        self._answer(200, answers[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.path == "/v1/revisions":
            self._answer(200, json.dumps(REVISIONS))
            return
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        if body.get("temperature", 0) > 2:
            message = {"message": "temperature is 9; at most 2", "param": "temperature"}
            self._answer(400, json.dumps({"error": message}))
            return
        self.send_response(200)
        self.end_headers()
        for word in text.split(" "):
            self._send({"choices": [{"delta": {"content": word + " "}}]})
        if text == "break":
            self._send({"error": {"message": "worker lost"}})
            return
        if text == "wait":
            self._wait_for_hang_up()
            return
        self._send({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()

    def _wait_for_hang_up(self) -> None:
        readable, _, _ = select.select([self.connection], [], [], WAIT_S)
        if readable and not self.connection.recv(1):
            self.server.hung_up.set()


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService() as fake:
        threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True).start()
        yield fake
        fake.shutdown()


@pytest.fixture
def conversation(service: FakeService) -> Iterator[Conversation]:
    with closing(Service(service.url + "/v1/", "")) as client:
        yield Conversation(client, "", "be brief")


# -- a conversation --------------------------------------------------------------------------------------------------


def test_what_was_said_is_kept_and_what_was_refused_is_not(service: FakeService, conversation: Conversation) -> None:
    assert conversation.stats.describe() == "no answer yet"
    assert "".join(conversation.ask("one two")) == "one two "
    assert "".join(conversation.ask("a b c d")) == "a b c d "
    said = conversation.stats.describe()
    assert said.startswith("TTFT ") and said.endswith("5 prompt and 4 answer tokens"), "by the service's own count"
    roles = [message["role"] for message in service.bodies[1]["messages"]]
    assert (roles, service.bodies[1]["model"]) == (["system", "user", "assistant", "user"], "fake")
    with pytest.raises(CommandError, match="broke off: worker lost"):
        list(conversation.ask("break"))
    assert conversation.history[-1] == {"role": "assistant", "content": "break "}, "what came of it"
    kept = list(conversation.history)
    conversation.options["temperature"] = 9
    with pytest.raises(CommandError, match=r"400: temperature is 9; at most 2$"):
        list(conversation.ask("hello"))
    assert conversation.history == kept
    conversation.reset()
    assert conversation.history == [{"role": "system", "content": "be brief"}]


def test_images_go_with_the_next_message(service: FakeService, conversation: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    image = b"\xff\xd8\xff"  # a JPEG's first bytes, whatever its name says
    file.write_bytes(image)
    (tmp_path / "notes.png").write_text("abc")
    (tmp_path / "long.png").write_bytes(image.ljust(MAX_FILE_BYTES + 1))
    assert run_command(conversation, f"/image '{file}'") == "images of the next message: 1"
    for name, why in (
        ("", "needs a file"), ("nowhere.png", r"nowhere.png cannot be read: No such file or directory$"),
        ("notes.png", "notes.png is no PNG, JPEG, WebP or GIF file"),
        ("long.png", "has more than 20971520 bytes"),
    ):  # fmt: skip
        with pytest.raises(CommandError, match=why):
            run_command(conversation, f"/image {tmp_path / name if name else name}")
    conversation.options["temperature"] = 9
    with pytest.raises(CommandError, match="at most 2\nneither the message nor its images are kept"):
        list(conversation.ask("see"))
    del conversation.options["temperature"]
    run_command(conversation, f"/image {file}")
    list(conversation.ask("see"))
    list(conversation.ask("again"))
    part = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/"}}
    said = [message["content"] for message in service.bodies[2]["messages"] if message["role"] == "user"]
    assert said == [[part, {"type": "text", "text": "see"}], "again"]


def test_settings_are_parsed() -> None:
    options: dict[str, Any] = {"seed": 1}
    set_options(options, "temperature=0.5; max_tokens=100;stop=END;seed=")
    assert options == {"temperature": 0.5, "max_tokens": 100, "stop": "END"}
    with pytest.raises(CommandError, match="'warm' is no setting"):
        set_options(options, "warm")


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jé\n\t😀\x07") == "a[2Jé\n\t😀"


def test_events_end_at_done_and_lines_at_line_feeds_only(conversation: Conversation) -> None:
    assert list(iterate_events(iter([": ping", "data: {}", "", "data: [DONE]", "data: x"]))) == [{}]
    with pytest.raises(CommandError, match="no JSON"):
        list(iterate_events(iter(["data: x"])))
    text = "data: é\u2028\u2029\x85\v\x1cb\r\n\ndata: c\n".encode()
    expected = ["data: é\u2028\u2029\x85\v\x1cb\r", "", "data: c"]
    for size in (1, 2, 3, len(text)):
        parts = (text[begin : begin + size] for begin in range(0, len(text), size))
        assert list(iterate_lines(parts)) == expected
    assert "".join(conversation.ask("a\u2028b\u2029c\x85d e")) == "a\u2028b\u2029c\x85d e "


@pytest.mark.parametrize("setting", ["temperature=NaN", "temperature=-Infinity", 'stop="\\ud800"'])
def test_a_setting_that_cannot_be_sent_costs_one_line(
    service: FakeService, conversation: Conversation, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    for line in (f"/set {setting}", "hello", f"/set {setting.split('=')[0]}=", "still here"):
        run_line(conversation, line)
    said = capsys.readouterr().out
    assert "error: this cannot be sent (" in said and "/set NAME= drops one" in said
    assert said.endswith("still here \n")
    assert [body["messages"][1:] for body in service.bodies] == [[{"role": "user", "content": "still here"}]]


def test_bytes_that_are_no_text_cost_one_line(service: FakeService) -> None:
    lines = b"caf\xe9\n/\xff\nstill here\n\xc3"
    done = run("chat", "--url", service.url, typed=lines, PYTHONIOENCODING="utf-8:strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("error: this cannot be sent (") == 2
    assert "unknown command /;" in done.stdout and "still here " in done.stdout


# -- services and connections to them --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["<html>", "", "[]", "3", "{}", '{"data": []}', '{"data": [{}]}', '{"data": 1}'])
def test_a_service_of_another_kind_is_reported_in_a_line(service: FakeService, answer: str) -> None:
    service.odd_answers["/v1/models"] = service.odd_answers["/status"] = answer
    for command, wanted in ((chat, "/v1/models "), (status, "/status ")):
        with pytest.raises(CommandError) as refusal:
            command(url=service.url)
        said = str(refusal.value)
        assert wanted in said and "set --url" in said and "\n" not in said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h:port", "is no URL"),
        ("http://a\x00b", "is no URL"),
        ("h", "missing an 'http://'"),
        ("http://127.0.0.1:1", "does not answer"),
    ],
)
def test_an_address_that_cannot_be_used_is_reported_in_a_line(url: str, said: str) -> None:
    for command in (chat, status):
        with pytest.raises(CommandError) as refusal:
            command(url=url)
        assert (said in str(refusal.value) and "--url" in str(refusal.value)) or "http://" in said


def test_a_key_may_have_any_letters(service: FakeService) -> None:
    with closing(Service(service.url, "schlüssel")) as client:
        assert Conversation(client, "", "").model() == "fake"
    assert service.key.encode("latin-1").decode() == "Bearer schlüssel"


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "odd://x", "http://h:port"])
def test_this_machine_is_asked_by_no_proxy_and_others_by_one_that_can_be_used(service: FakeService, proxy: str) -> None:
    done = call("status", "--url", service.url, ALL_PROXY=proxy)
    assert done.returncode == 0 and "share cores" in done.stdout, done.stderr
    done = call("status", "--url=http://203.0.113.1:8000", ALL_PROXY=proxy)
    assert done.returncode == 1
    assert done.stderr.startswith("baton status: the proxy that the environment names cannot be used (")
    assert "set ALL_PROXY" in done.stderr and done.stderr.count("\n") == 1


# -- status and drain ------------------------------------------------------------------------------------------------


def test_status_shows_the_workers(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(url=service.url, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == STATUS
    assert status(url=service.url) == 0
    printed = capsys.readouterr().out
    assert "shm" in printed and "decode workers prefill" in printed and "share cores" in printed
    assert "small: awake\nlarge: waking 40 %" in printed
    assert "[fd00::1]:9001: another worker than was meant answers at decode:9000" in printed.replace("\n", " ")
    assert "small: 1.12 KiB of KV a token, 71 times less than its heads" in printed.replace("\n", " ")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(build_table(WORKERS))
    assert "[fd00::1]:9001" in shown.get() and "[red]" in shown.get(), "addresses are not markup"
    assert "not used yet" in shown.get() and "none" not in shown.get()
    assert "one: loaded" in shown.get() and "revision" not in shown.get()
    with console.capture() as shown:
        console.print(build_table([one | {"revision": f"r{n}"} for n, one in enumerate(WORKERS)]))
    assert "revision" in shown.get() and "r0" in shown.get()
    assert all(column.replace("_", " ") in shown.get() for column in COLUMNS)


def test_a_rollout_is_shown_begun_and_ended(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout(url=service.url) == 0 and not service.bodies
    printed = capsys.readouterr().out
    assert re.search(r"new\W+0.1\W+1\W+2\W+7", printed) and "[red]" in printed and "what is left" in printed
    assert rollout("new=0.25", "a=b=0.5", url=service.url) == 0
    assert rollout(end=True, url=service.url) == 0
    assert service.bodies == [{"new": 0.25, "a=b": 0.5}, {}]
    for wrong, said in ((("new",), "REVISION=SHARE"), (("new=x",), "REVISION=SHARE")):
        with pytest.raises(CommandError, match=said):
            rollout(*wrong, url=service.url)
    with pytest.raises(CommandError, match="--end drops all shares"):
        rollout("new=1", end=True, url=service.url)
    service.odd_answers["/v1/revisions"] = "[]"
    with pytest.raises(CommandError, match="without revisions"):
        rollout(url=service.url)


def test_status_watch_redraws_the_load_and_survives_a_service_that_is_away(service: FakeService) -> None:
    frames: list[str] = []

    def pause(_seconds: float) -> None:
        frames.append(written.getvalue()[sum(map(len, frames)) :])
        if len(frames) == 1:
            busy = LAST | {"role": "decode", "used_pages": 95, "free_pages": 5, "running": 7, "prefix_hits": 0.5}
            gone = busy | {"alive": False, "trouble": "[no] answer"}
            service.odd_answers["/status"] = json.dumps({"workers": [busy, gone]})
        elif len(frames) == 2:
            service.odd_answers["/status"] = "[]"
        else:
            raise KeyboardInterrupt

    written = StringIO()
    console = Console(file=written, width=120, force_terminal=True, color_system=None)
    assert keep_watching(Service(service.url, ""), console, pause) == 0
    assert "prefill-0" in frames[0] and "share cores" in frames[0]
    assert "KV 95%  7 running, 50% from the prefix cache" in frames[1] and "━" in frames[1]
    assert "decode-1" in frames[1] and "[no] answer" in frames[1]
    assert "is no Baton gateway" in frames[2]


def test_the_last_decode_worker_is_not_drained_by_mistake(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    """At none of these addresses is a worker that may be drained."""
    with pytest.raises(
        CommandError, match=r"is the only decode worker of small: without it every request gets a 503.*--force"
    ):
        drain("[fd00::1]:9001", url=service.url)
    for url in (service.url, "http://127.0.0.1:1"):
        with pytest.raises(CommandError, match=r"127\.0\.0\.1:1 does not answer \(UNAVAILABLE"):
            drain("127.0.0.1:1", url=url)
    said = capsys.readouterr().out
    assert said.count("it is not known whether other workers are left: http://127.0.0.1:1 does not answer") == 1
    service.odd_answers["/status"] = json.dumps({"workers": [LAST | {"address": "127.0.0.1:1", "pid": 1}]})
    with pytest.raises(CommandError, match="only decode worker"):
        drain("127.0.0.1:1", url=service.url)
    with pytest.raises(CommandError, match="does not answer"):
        drain("127.0.0.1:1", url=service.url, force=True)


def test_a_drawn_secret_is_read_from_the_worker_of_this_machine() -> None:
    command, pipe = [sys.executable, "-c", "print(flush=True); input()"], subprocess.PIPE
    env = {"A": "B", "BATON_FLEET_SECRET": "drawn"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env) as worker:
        assert worker.stdout is not None and worker.stdout.readline()  # before it runs, the system shows no variables
        assert read_secret("127.0.0.1:9001", worker.pid) == "drawn"
        assert read_secret("elsewhere:9001", worker.pid) == "", "a pid is meaningless on another host"
        worker.communicate(b"\n")
    assert read_secret("127.0.0.1:9001", worker.pid) == read_secret("127.0.0.1:9001", 1) == ""


# -- in a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """`baton chat` in its own terminal."""

    def __init__(self, url: str) -> None:
        self.screen, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli.main", "chat", "--url", url],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "no_proxy": "*"},
        )
        os.close(inner)
        self.seen = ""

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self.screen, line.encode() + b"\n")

    def expect(self, text: str) -> None:
        """Read until `text` appears, and drop everything up to its end."""
        while text not in self.seen:
            assert self._read(WAIT_S), f"{text!r} did not appear in {self.seen!r}"
        self.seen = self.seen.split(text, 1)[1]

    def _read(self, wait_s: float) -> bool:
        """Whether more text appeared in time."""
        readable, _, _ = select.select([self.screen], [], [], wait_s)
        if readable:
            self.seen += os.read(self.screen, 4096).decode()
        return bool(readable)

    def interrupt(self) -> None:
        """Press Ctrl-C until something appears: one that precedes the process's wait does not end that wait."""
        for _ in range(int(WAIT_S / AGAIN_S)):
            os.kill(self.process.pid, signal.SIGINT)
            if self._read(AGAIN_S):
                return
        raise AssertionError("Ctrl-C does nothing")

    def close(self) -> None:
        """End it in any state."""
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self.screen)


@pytest.fixture
def terminal(service: FakeService) -> Iterator[Terminal]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without one
    opened = Terminal(service.url)
    signal.signal(signal.SIGINT, before)
    yield opened
    opened.close()


def test_a_conversation_in_a_terminal(terminal: Terminal, service: FakeService) -> None:
    terminal.expect("fake at http://127.0.0.1")
    terminal.type("hello there")
    terminal.expect("\nhello there ")
    terminal.type("/set temperature=0.5;max_tokens=100")
    terminal.expect("temperature=0.5 max_tokens=100\r\n")
    terminal.type("/stats")
    terminal.expect("TTFT")
    terminal.type("/metrics")
    terminal.expect("baton:requests 3")
    terminal.type("/nonsense")
    terminal.expect("unknown command /nonsense")
    terminal.type("wait")
    terminal.expect("\nwait ")
    terminal.interrupt()
    terminal.expect("(stopped)")
    assert service.hung_up.wait(WAIT_S)
    terminal.type("still here")
    terminal.expect("\nstill here ")
    assert service.bodies[-1]["max_tokens"] == 100
    terminal.type("/exit")
    assert terminal.process.wait(WAIT_S) == 0


# -- coding agents ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stubs(tmp_path: Path) -> str:
    """A PATH of programs with the agents' names, each of which prints its command line and variables as JSON."""
    for name in AGENTS:
        code = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(7)\n"
        (tmp_path / name).write_text(f"#!{sys.executable}\n{code}")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("agent", list(AGENTS))
def test_an_agent_replaces_the_command_and_asks_the_service(service: FakeService, stubs: str, agent: AgentName) -> None:
    models = [{"id": "fake", "max_model_len": 65536}, {"id": "other", "max_model_len": 65536}]
    service.odd_answers["/v1/models"] = json.dumps({"data": models})
    own = ("--model", "its own", "--config", "c", "--", "-x")
    done = run(
        "launch", agent, "--", *own, PATH=stubs, BATON_URL=f"{service.url}/v1", ANTHROPIC_API_KEY="k", BATON_API_KEY="s"
    )
    words, variables = json.loads(done.stdout)
    assert (done.returncode, tuple(words[-len(own) :])) == (7, own)
    settings = {"claude": read_claude, "codex": read_codex, "opencode": read_opencode}[agent](words, variables)
    assert settings == (service.url, "fake", "s", 65536)
    done = run("launch", agent, "--model=other", PATH=stubs, BATON_URL=service.url)
    words, variables = json.loads(done.stdout)
    settings = {"claude": read_claude, "codex": read_codex, "opencode": read_opencode}[agent](words, variables)
    assert settings == (service.url, "other", "none", 65536)


def read_claude(_words: list[str], variables: dict[str, str]) -> tuple[object, ...]:
    assert "ANTHROPIC_API_KEY" not in variables
    names = {value for name, value in variables.items() if "MODEL" in name and name.startswith(("ANTHROPIC", "CLAUDE"))}
    (name,) = names
    window = int(variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"])
    return variables["ANTHROPIC_BASE_URL"], name, variables["ANTHROPIC_AUTH_TOKEN"], window


def read_codex(words: list[str], variables: dict[str, str]) -> tuple[object, ...]:
    lines = [word for before, word in pairwise(words) if before == "-c"]
    found = tomllib.loads("\n".join(lines))
    provider = found["model_providers"][found["model_provider"]]
    assert provider["wire_api"] == "responses"
    url = provider["base_url"].removesuffix("/v1")
    return url, found["model"], variables[provider["env_key"]], found["model_context_window"]


def read_opencode(_words: list[str], variables: dict[str, str]) -> tuple[object, ...]:
    found = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = found["model"].partition("/")
    options = found["provider"][provider]["options"]
    context = found["provider"][provider]["models"][model]["limit"]["context"]
    return options["baseURL"].removesuffix("/v1"), model, options["apiKey"], context


def test_an_agent_that_cannot_work_is_not_started(service: FakeService, stubs: str, tmp_path: Path) -> None:
    service.odd_answers["/v1/models"] = json.dumps({"data": [{"id": "fake", "max_model_len": 4096}]})
    url = f"--url={service.url}"
    done = call("launch", "claude", url, PATH=stubs)
    assert done.returncode == 1 and "claude needs a context of 40000 tokens or more" in done.stderr
    assert "fake is served with 4096" in done.stderr and "--max-context-tokens" in done.stderr
    done = call("launch", "codex", url, "--model=x", PATH=stubs)
    assert "serves fake, not x: set --model" in done.stderr
    done = call("launch", "codex", url, PATH=str(tmp_path / "empty"))
    assert "codex is not on the PATH: install it by npm install -g @openai/codex" in done.stderr
    service.odd_answers["/v1/models"] = json.dumps({"data": [{"id": "fake"}]})
    assert "lists no models of Baton: set --url" in call("launch", "codex", url, PATH=stubs).stderr
