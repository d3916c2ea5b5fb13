"""`baton serve` with stub processes: its output, and that no process outlives it however it ends."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL

import pytest

from tests.support.forks import ForkedPopen
from tests.support.stand_ins import PROGRAM

WAIT_S = 60.0


class Service:
    """A supervisor with stub processes, in its own process, whose stderr is not a terminal."""

    def __init__(
        self, folder: Path, start_timeout_s: float = WAIT_S, stop_s: float = WAIT_S, stdout: int = DEVNULL,
        log_format: str = "auto", **modes: str,
    ) -> None:  # fmt: skip
        """modes: each role's behaviour, see stand_ins.py."""
        self.notes = folder / "notes"
        environment = {**os.environ, "STAND_IN_NOTES": str(self.notes), "BATON_PORT": "1234"}
        environment |= {f"STAND_IN_{role.upper()}": mode for role, mode in modes.items()}
        self.process = ForkedPopen(
            [*PROGRAM, "supervise", str(start_timeout_s), str(stop_s), log_format],
            stdout=stdout, stderr=subprocess.PIPE, text=True, bufsize=1, env=environment,
        )  # fmt: skip
        self.shown = ""  # all of its stderr read so far

    def read_until(self, text: str) -> None:
        """Read its output until a line has `text`; the test's own timeout bounds it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.shown += line
            if text in line:
                return
        raise AssertionError(f"{text!r} was never shown:\n{self.shown}")

    def finish(self) -> int:
        """Wait for the supervisor's end and read the rest; none of its processes may be left."""
        _, rest = self.process.communicate(timeout=WAIT_S)
        self.shown += rest
        assert self.survivors(WAIT_S) == []
        return self.process.returncode

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end."""
        self.process.send_signal(number)
        return self.finish()

    def events(self, name: str) -> list[dict[str, object]]:
        """Its own events so far."""
        lines = [json.loads(line) for line in self.shown.splitlines() if '"role": "serve"' in line]
        return [line for line in lines if line["event"] == name]

    def noted(self, kind: str) -> list[list[str]]:
        """Notes of one kind, in order."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line.split() for line in lines if line.startswith(kind)]

    def wait_state(self, state: str) -> list[str]:
        """Until the gateway has noted that its model is in this state; its note."""
        while not (noted := self.noted("state")) or noted[-1][1] != state:
            assert self.process.poll() is None
            time.sleep(0.02)
        return noted[-1]

    def waking_states(self) -> list[list[str]]:
        """The notes of a gateway about a model that wakes."""
        return [words[:5] for words in self.noted("state") if words[1] == "waking"]

    def last(self, role: str) -> list[str]:
        """The last note of the newest process of a role: "pid", its pid and command line."""
        return [words for words in self.noted("pid") if words[2] == role][-1]

    def survivors(self, wait_s: float) -> list[int]:
        """Processes that still run after `wait_s`, of all that were started."""
        return [int(words[1]) for words in self.noted("pid") if not has_ended(int(words[1]), wait_s)]


def has_ended(pid: int, wait_s: float) -> bool:
    """Whether a process is gone, or a zombie not yet reaped by its new parent."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], wait_s)[0])
    finally:
        os.close(handle)


Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a service (see `Service`) and cleans up in any case."""
    started: list[Service] = []

    def start(**options: object) -> Service:
        started.append(Service(tmp_path, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for service in started:
        with suppress(ProcessLookupError):
            service.process.kill()
        service.process.wait(WAIT_S)
        for pid in service.survivors(wait_s=1.0):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def service(start: Start) -> Service:
    """A running service."""
    service = start()
    service.read_until('"serving"')
    return service


def test_machines_get_one_json_line_an_event(service: Service) -> None:
    ready = {str(event["process"]): event for event in service.events("ready")}
    assert set(ready) == {"prefill-0", "prefill-1", "decode-0", "gateway"}
    serving = service.events("serving")[0]
    assert (serving["url"], serving["no_hand_off"]) == (f"http://{ready['gateway']['address']}", "cores are shared")
    assert ready["decode-0"]["device"] == "cpu" and str(ready["decode-0"]["pid"]) == service.last("decode")[1]
    assert len(service.events("loaded")) == 4
    assert service.stop() == 0
    events = [json.loads(line)["event"] for line in service.shown.splitlines() if line.startswith("{")]
    assert events.count("ready") == events.count("log of [x]") == 4, "each once"
    gateway = service.last("gateway")
    assert gateway[-2:] == ["secret", "None"], "the key is in the environment, the service's own port is not"
    assert not any("secret" in word for word in gateway[:-2])
    assert sum(word.startswith("--prefill=") for word in gateway) == 2
    assert len(service.noted("pid")) == len(service.noted("ended")) == 4
    assert service.noted("ended")[0] == ["ended", "gateway"], "it ends first"


def test_people_at_a_terminal_read_lines(start: Start) -> None:
    screen, inner = pty.openpty()
    service = start(stdout=inner)
    os.close(inner)
    service.read_until('"serving"')
    address = service.events("ready")[-1]["address"]
    shown = ""
    while "Ctrl-C stops" not in shown:
        shown += os.read(screen, 4096).decode()
    os.close(screen)
    for name in ("prefill-0", "prefill-1", "decode-0", "gateway"):
        assert f"{name} is ready at 127.0.0.1:" in shown
    assert f"curl http://{address}/v1/chat/completions" in shown and f"baton chat --url http://{address}" in shown
    assert shown.count("cores are shared") == 1, "once for all"
    assert '"model": "baton-demo"' in shown and "$BATON_API_KEY" in shown


def test_the_format_of_logs_is_what_was_asked_for(start: Start) -> None:
    screen, inner = pty.openpty()
    asked = start(stdout=inner, log_format="json")
    os.close(inner)
    asked.read_until('"serving"')
    assert asked.stop() == 0
    with suppress(OSError):  # a terminal's end is an error
        assert os.read(screen, 1) == b"", "nothing but JSON lines, which go to stderr"
    os.close(screen)
    text = start(log_format="text")
    text.read_until("Ctrl-C stops")
    assert text.stop() == 0
    assert "decode-0 is ready at 127.0.0.1:" in text.shown and "info log of [x] n=1" in text.shown
    assert not any(line.startswith("{") for line in text.shown.splitlines())


def test_a_signal_while_loading_leaves_nothing(start: Start) -> None:
    service = start(decode="slow")
    service.read_until('"prefill-1"')
    assert service.stop(signal.SIGINT) == 0


def test_kill_9_of_the_supervisor_leaves_nothing(start: Start) -> None:
    service = start(decode="stubborn")
    service.read_until('"serving"')
    service.process.kill()
    service.finish()
    assert len(service.noted("pid")) == 4


def test_a_process_that_ignores_sigterm_is_killed_after_a_while(start: Start) -> None:
    service = start(decode="stubborn", stop_s=0.3)
    service.read_until('"serving"')
    assert service.stop() == 0
    assert "decode-0 did not end by itself" in service.shown


def test_a_crash_while_loading_shows_its_lines_and_stops_all(start: Start) -> None:
    service = start(decode="crash", prefill="slow")
    assert service.finish() == 1, "it waited for a helper's end"
    assert service.shown.count("crash line 49\n") == 1
    reason = service.shown.index("decode-0 ended with exit status 7 before it was ready; its log says why; to run it")
    assert reason > service.shown.index("crash line 49\n")
    assert len(service.noted("pid")) >= 2, "the stub and the helper it started"


def test_a_start_that_takes_too_long_is_given_up(start: Start) -> None:
    service = start(decode="slow", start_timeout_s=0.5)
    assert service.finish() == 1
    assert "decode-0 did not become ready within 0.5 s: set --start-timeout-s" in service.shown


def test_a_worker_that_was_asked_to_end_stays_ended_and_the_service_ends_with_its_gateway(service: Service) -> None:
    os.kill(int(service.last("decode")[1]), signal.SIGTERM)
    service.read_until("decode-0 ended with exit status 0; 2 workers are left; it stays ended, as it was asked to")
    assert service.process.poll() is None
    os.kill(int(service.last("gateway")[1]), signal.SIGKILL)
    assert service.finish() == 1
    assert "the gateway ended with signal SIGKILL" in service.shown


def test_a_model_is_put_to_sleep_and_woken(start: Start) -> None:
    service = start(gateway="asks")
    service.read_until('"event": "awake"')
    service.wait_state("awake")
    assert service.events("asleep")[0]["model"] == service.events("awake")[0]["model"] == "baton-demo"
    assert [words[:5] for words in service.noted("state")] == [
        ["state", "asleep", "0", "0", "0"],
        *service.waking_states(),
        ["state", "awake", "2", "1", "0"],
    ]
    assert service.waking_states()[-1][4] == "100"
    assert len(service.noted("pid")) == 7 and len(service.noted("ended")) == 3
    assert service.stop() == 0
    assert len(service.noted("ended")) == 7


def test_a_worker_that_is_killed_while_its_model_wakes_starts_again(start: Start) -> None:
    service = start(gateway="asks", decode="killed")
    service.read_until("decode-0 ended with signal SIGKILL while it was waking; it starts again in 0.5 s")
    service.wait_state("awake")
    decode = service.last("decode")
    os.kill(int(decode[1]), signal.SIGKILL)
    service.read_until("decode-0 ended with signal SIGKILL; 2 workers are left; it starts again in 0.5 s")
    assert service.stop() == 0


def test_a_model_whose_workers_do_not_start_again_is_not_woken(start: Start) -> None:
    service = start(gateway="asks", decode="broken", stop_s=1.0)
    service.read_until('"reason": "decode-0 ended with exit status 7 before it was ready')
    assert service.wait_state("failed")[5:8] == ["decode-0", "ended", "with"], "with the reason"
    assert len([words for words in service.noted("pid") if words[2] == "decode"]) == 1 + 3, "it was tried three times"
    assert all(has_ended(int(words[1]), WAIT_S) for words in service.noted("pid") if words[2] == "prefill")
    assert service.process.poll() is None, "other models may be served"
    assert service.stop() == 0


def test_a_worker_that_does_not_end_for_its_models_sleep_is_killed(start: Start) -> None:
    service = start(gateway="asks", decode="stubborn", stop_s=0.5)
    service.read_until("decode-0 did not end by itself and is killed")
    service.wait_state("awake")
    assert service.stop() == 0


def test_a_service_whose_reader_leaves_starts_workers_again_and_ends_when_asked(service: Service) -> None:
    assert service.process.stderr is not None
    service.process.stderr.close()
    first = service.last("decode")
    os.kill(int(first[1]), signal.SIGUSR1)
    while service.last("decode") == first:
        assert service.process.poll() is None
        time.sleep(0.05)
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(WAIT_S) == 0
    assert len(service.noted("ended")) == 4, "each was asked to end and given the time"
    assert service.survivors(0.0) == []


NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--pid", "--fork", "--kill-child"]


def test_as_the_first_process_of_a_container_sigterm_ends_it_while_it_starts(tmp_path: Path) -> None:
    """The kernel ignores signals there that have no handler, which `docker stop` would wait for in vain."""
    try:
        subprocess.run([*NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no PID namespace can be made here: {error}")
    config = tmp_path / "config.toml"
    os.mkfifo(config)
    program = [sys.executable, "-P", "-m", "baton", "serve", f"--config={config}"]
    unshare = subprocess.Popen([*NAMESPACE, *program])
    try:
        with config.open("wb"):  # once it reads its settings, for which it waits
            (first,) = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            assert unshare.wait(WAIT_S) == 128 + signal.SIGTERM
    finally:
        unshare.kill()
        unshare.wait()
