"""The `baton` program for tests: as a process, or only its command line."""

import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.main import app, main
from cli.sources import use_sources
from tests.support.forks import ForkedPopen

WAIT_S = 120.0  # generous: the machine may be busy


def run(*words: str, typed: str | bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    """The program as a process that is forked, with no settings or proxies except those in `environment`."""
    inherited = {
        name: value for name, value in os.environ.items()
        if not name.startswith("BATON_") and not name.lower().endswith("_proxy")
    }  # fmt: skip
    command, pipe = [sys.executable, "-P", "-m", "cli.main", *words], subprocess.PIPE
    with ForkedPopen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=inherited | environment) as process:
        try:
            typed = typed.encode() if isinstance(typed, str) else typed
            stdout, stderr = process.communicate(typed, WAIT_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, stdout.decode(), stderr.decode())


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same within this process: for commands that start nothing and keep nothing."""
    stdout, stderr, unset = StringIO(), StringIO(), re.compile("BATON_|.*_proxy$", re.IGNORECASE)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        for name in filter(unset.match, list(os.environ)):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["baton", *words])
        if "torch" in sys.modules:
            patch.setitem(sys.modules, "torch", sys.modules["torch"])  # a gateway leaves it out for good
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(words, int(end.value.code or 0), stdout.getvalue(), stderr.getvalue())


def bind(*words: str, file: Path | None = None) -> dict[str, Any]:
    """The arguments that a command line stands for."""
    use_sources(app, words[0], file)
    _function, bound, _ignored = app.parse_args(list(words), exit_on_error=False, print_error=False)
    return bound.arguments


def parse(*words: str, file: Path | None = None) -> Any:
    """The settings that a command line stands for; None for all defaults."""
    return bind(*words, file=file).get("config")
