"""Processes of ours without the seconds of CPU that their imports take: forks of one that has imported everything.

    this process ──socket──► template ──fork──► (helper) ──fork──► `python -m MODULE WORDS`

The helper ends at once, so the kernel makes the new process a child of the one that asked: it is waited for, signalled
and dies with its parent as if it had been started. Each has a template of its own, forked before it has any thread.
Only environment variables that libraries read when they are loaded are those of the first template.
"""

import atexit
import ctypes
import fcntl
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from engine.cpu.build import BuildError, load_kernel

PR_SET_CHILD_SUBREAPER = 36
READERS = ("gateway.text.template_process", "gateway.images.processor_process")
CHILDREN = (*READERS, "decode_worker.grammar.compiler_process")  # of a gateway and a decode worker
IMPORTS = (
    "cli.supervisor", "gateway.main", "prefill_worker.main", "decode_worker.main", "worker.ranks.main", *CHILDREN,
)  # fmt: skip
MODULES = (  # that are forked; others are started
    "cli.main", "baton", "worker.ranks.main", "tests.attack.folders", "tests.faults.corrupting_worker",
    "tests.support.pool_process", "tests.support.rank_follower", "tests.support.rank_process",
    "tests.support.stand_ins",
)  # fmt: skip
KERNELS = ("cpu_sampling", "cpu_linear", "cpu_paged", "cpu_states", "cpu_layers", "cpu_math")  # of most workers
TEST_IMPORTS = ("anthropic", "openai", "peft", "transformers.generation.utils")  # of more than one file of tests
TEST_PROCESS = "import sys;exec(eval(sys.stdin.readline()))"  # how xdist starts one
MESSAGE_BYTES, MOST_FDS = 1 << 17, 64
PLACE = "x" * 4096  # for longer words and variables, which a new process shows in the place of the template's
PARKED = 1 << 9  # first number of descriptors on their way to their own


class Start(msgspec.Struct):
    """Asks for a new process; its descriptors are sent beside it."""

    words: list[str]  # of the command line
    environment: dict[str, str]
    folder: str
    fds: list[int]  # their numbers, in the order of the descriptors
    has_group: bool


class Template:
    """The process that forks for this one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def fork(self, start: Start, descriptors: list[int]) -> int:
        """The pid of a new child of this process."""
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._sock, [msgspec.msgpack.encode(start)], descriptors)
                return int(self._sock.recv(MESSAGE_BYTES))
            finally:
                _adopt_orphans(False)


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks some modules."""

    template: Template | None = None
    modules: tuple[str, ...] = (*MODULES, *CHILDREN)

    def _execute_child(self, args: Any, *others: Any) -> None:
        if find_words(args, self.modules) is None:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        pass_fds, cwd, env = others[3:6]
        pipes = others[9:15]  # both ends of stdin, stdout and stderr, -1 for what is ours
        standard = [fd if fd >= 0 else number for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        start = Start(
            [os.fsdecode(word) for word in args], dict(env or os.environ), os.fspath(cwd or Path.cwd()),
            [0, 1, 2, *pass_fds], others[-1] == 0,
        )  # fmt: skip
        ForkedPopen.template = ForkedPopen.template or _start_template(IMPORTS)
        self.pid = ForkedPopen.template.fork(start, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class ForkedReaders(ForkedPopen):
    """In a test process: what it starts is only forked where it says so, but for those that import for seconds."""

    modules = READERS


class ForkedCode(ForkedPopen):
    """`python -c CODE WORDS`, of a test that says so."""

    modules = ("-c",)


def find_words(args: Any, modules: Iterable[str] = ForkedPopen.modules) -> list[str] | None:
    """The module and its arguments, of a command that is forked, or the code of a test process; or -c and code."""
    if isinstance(args, (str, bytes)) or args[0] != sys.executable or sys.platform != "linux":
        return None
    if args[-1] == TEST_PROCESS:
        return [TEST_PROCESS]
    if args[1:2] == ["-c"]:
        return list(args[1:]) if "-c" in modules else None
    if "-m" not in args:
        return None
    words = list(args[args.index("-m") + 1 :])
    return words if words[0] in modules else None


def fork_test_processes() -> None:
    """From now on, those of this process are; elsewhere than on Linux none is."""
    if sys.platform != "linux":
        return
    ForkedPopen.template = _start_template((*TEST_IMPORTS, *IMPORTS))
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


def _start_template(imports: Iterable[str]) -> Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main({theirs.fileno()}, {imports})"]
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "GOMP_SPINCOUNT": "2000", "PLACE": PLACE}
        subprocess.Popen([*command, PLACE], pass_fds=[theirs.fileno()], env=environment)
    return Template(ours)


def _adopt_orphans(does: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)


def _serve(sock: socket.socket) -> Start:
    """Forks what is asked for until the other end closes. Returns only in new processes."""
    while True:
        message, descriptors, *_ = socket.recv_fds(sock, MESSAGE_BYTES, MOST_FDS)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        helper = os.fork()
        if not helper:
            _fork_again(writing)
            start = msgspec.msgpack.decode(message, type=Start)
            sock.detach()
            _become(start, descriptors)
            return start
        os.waitpid(helper, 0)
        sock.send(os.read(reading, MESSAGE_BYTES))
        os.close(reading)
        os.close(writing)
        for fd in descriptors:
            os.close(fd)


def _fork_again(writing: int) -> None:
    """Returns in the new process, once its parent is the one that asked."""
    helper = os.getpid()
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    while os.getppid() == helper:
        time.sleep(0.0005)


def _become(start: Start, descriptors: list[int]) -> None:
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD, PARKED) for fd in descriptors]
    os.closerange(3, PARKED)
    for fd, number in zip(parked, start.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if start.has_group:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    places = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    _show(start.words, *places[:2])
    _show((f"{name}={value}" for name, value in start.environment.items()), *places[2:])


def _show(texts: Iterable[str], begin: int, end: int) -> None:
    """Where others read this process's command line, or its environment."""
    shown = os.fsencode("\0".join(texts))[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))


def _fork_template(fds: Iterable[int]) -> Template:
    """For a new process, which has no thread yet, and these descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        for fd in (ours.detach(), *(fd for fd in fds if fd > 2)):
            os.close(fd)
        _run(_serve(theirs))
    theirs.close()
    return Template(ours)


def _run(start: Start) -> NoReturn:
    """As `python -m`, to the end of the process; but it frees nothing, which would copy the pages that it shares."""
    words = find_words(start.words, (*ForkedPopen.modules, *ForkedCode.modules))
    assert words is not None
    if words[0] not in CHILDREN:  # these start no others
        ForkedPopen.template = _fork_template(start.fds)
    if words[0] == TEST_PROCESS:
        subprocess.Popen = ForkedReaders  # type: ignore[misc]
        exec(TEST_PROCESS, {"__name__": "__main__"})  # noqa: S102  as Python would
        _end(0)
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    sys.argv = words
    if words[1:2] == ["gateway"] or words[0].startswith("gateway."):
        _forget_torch()
    try:
        if words[0] == "-c":
            exec(words.pop(1), {"__name__": "__main__"})  # noqa: S102  as Python would
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def _end(code: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forget_torch() -> None:
    """Undo what transformers found at its import: a gateway has no torch."""
    from transformers.utils import generic, import_utils

    generic._is_torch_available = False
    sys.modules["torch"] = None  # type: ignore[assignment]
    for function in vars(import_utils).values():
        with suppress(AttributeError):
            function.cache_clear()


def _build_kernels() -> None:
    """Once, where none is cached: else each of the first workers would. Torch is imported, whose OpenMP they need."""
    with suppress(BuildError), ThreadPoolExecutor(2) as builders:
        list(builders.map(load_kernel, KERNELS))


def main(fd: int, imports: Iterable[str]) -> NoReturn:
    """The template of a process that was not forked itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        import_module(name)
    _build_kernels()
    gc.collect()
    gc.freeze()  # no new process looks through these, which would copy their pages
    start = _serve(socket.socket(fileno=fd))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run(start)
