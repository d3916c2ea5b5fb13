"""A PostgreSQL cluster of a test's own, from the system's binaries."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.fleet import HOST, free_ports
from tests.support.live import wait_until

_PLACES = "/usr/lib/postgresql"
USER = "nobody"  # the server refuses root


def find_binaries() -> Path | None:
    """Where `initdb` and `postgres` are; the newest version that Debian has."""
    found = sorted(Path(_PLACES).glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    where = found[-1] if found else shutil.which("initdb")
    return Path(where).resolve().parent if where else None


class Postgres:
    """A running server that trusts this host's users."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
        (self._port,) = free_ports(1)
        self._as = {"user": USER, "group": pwd.getpwnam(USER).pw_gid, "extra_groups": []} if not os.geteuid() else {}
        self.url = f"postgresql://{USER}@{HOST}:{self._port}/postgres"
        folder.mkdir()
        if self._as:
            shutil.chown(folder, USER)
        command = [binaries / "initdb", "-D", folder / "data", "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", **self._as)  # type: ignore[call-overload]
        self.start()

    def start(self) -> None:
        command = [self._binaries / "postgres", "-D", self._folder / "data", "-p", str(self._port), "-h", HOST]
        options = ["-k", self._folder, "-c", "fsync=off"]
        self._process = subprocess.Popen(  # type: ignore[call-overload]
            [*command, *options], cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._as
        )
        wait_until(self._answers)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to all its processes. Idempotent."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        for pid in (self._process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)


@contextmanager
def run_postgres() -> Iterator[Postgres]:
    """Skips the test where there is no PostgreSQL; in CI it fails."""
    binaries = find_binaries()
    if binaries is None:
        message = "PostgreSQL is not installed (Debian: postgresql)"
        is_needed = os.environ.get("CI") == "true" and "BATON_WITHOUT_POSTGRES" not in os.environ
        (pytest.fail if is_needed else pytest.skip)(message)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # for its user
        server = Postgres(binaries, Path(folder) / "cluster")
        try:
            yield server
        finally:
            server.kill()
