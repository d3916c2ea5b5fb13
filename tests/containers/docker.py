"""A Docker daemon, the images, and one fleet of the compose file.

Where no daemon runs, one is started with all that is its own below build/; where no registry of images is reached, it
gets a Python image that debootstrap makes.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from tests.support.live import CHECKOUT, HTTP, read_workers, wait_until

FOLDER = CHECKOUT / "build/containers"
DOCKERFILE = CHECKOUT / "deploy/Dockerfile"
COMPOSE_FILE = CHECKOUT / "deploy/docker-compose.yaml"
BASE = "python:3.11-slim-bookworm"
BASE_PACKAGES = "python3,python3-venv,python3-distutils,ca-certificates"
DOCKER = os.environ.get("DOCKER", "docker")  # 20.10, or newer with buildx
COMPOSE = Path(sys.executable).with_name("docker-compose")
INDEX_PORT = 47113  # always the same: layers of an image are kept by it
START_S, BUILD_S, UP_S, ASK_S = 60.0, 3600.0, 300.0, 120.0


class NoDockerError(Exception):
    """No daemon answers, and none can be started: says why."""


def run(*words: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120.0, check: bool = True) -> str:
    """What a program prints. Raises RuntimeError with its last lines."""
    done = subprocess.run(
        words, env={**os.environ, **(env or {})}, timeout=timeout_s, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


docker = partial(run, DOCKER)


@contextmanager
def open_daemon() -> Iterator[str]:
    """Sets DOCKER_HOST if it starts one. Yields what runs. Raises NoDockerError."""
    if shutil.which(DOCKER) is None:
        raise NoDockerError(f"{DOCKER} is not installed")
    if version := find_version():
        yield f"Docker {version}"
        return
    if os.geteuid() or shutil.which("dockerd") is None:
        raise NoDockerError("no Docker daemon answers, and only root with dockerd can start one")
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ["DOCKER_HOST"] = f"unix://{FOLDER}/socket"
    folders = f"--data-root={FOLDER}/data", f"--exec-root={FOLDER}/run", f"--pidfile={FOLDER}/pid"
    with (FOLDER / "dockerd.log").open("w") as log:
        host, driver = f"--host={os.environ['DOCKER_HOST']}", "--exec-opt=native.cgroupdriver=cgroupfs"
        daemon = subprocess.Popen(["dockerd", host, driver, *folders], stdout=log, stderr=log)
    try:
        wait_until(lambda: bool(find_version()) or daemon.poll() is not None, START_S)
        if daemon.poll() is not None:
            raise NoDockerError(f"dockerd does not start here: {(FOLDER / 'dockerd.log').read_text()[-500:]}")
        if not docker("images", "--quiet", BASE):
            get_base()
        yield f"a daemon of its own, Docker {find_version()}"
    finally:
        daemon.terminate()
        daemon.wait(START_S)


def find_version() -> str:
    """Of the daemon; empty if none answers."""
    with suppress(RuntimeError):
        return docker("version", "--format", "{{.Server.Version}}").strip()
    return ""


def get_base() -> None:
    """The Python image, from its registry or made of Debian's packages."""
    with suppress(RuntimeError):
        docker("pull", BASE, timeout_s=BUILD_S)
        return
    root, packages = FOLDER / "base", FOLDER / "packages"
    shutil.rmtree(root, ignore_errors=True)
    packages.mkdir(exist_ok=True)
    run(
        "debootstrap", "--variant=minbase", f"--cache-dir={packages}", f"--include={BASE_PACKAGES}", "bookworm", root,
        timeout_s=BUILD_S,
    )  # fmt: skip
    for useless in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / useless)
        (root / useless).mkdir()
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    trusted = "etc/ssl/certs/ca-certificates.crt"  # where this machine's network has an authority of its own
    shutil.copy(f"/{trusted}", root / trusted)
    (root / "etc/pip.conf").write_text(f"[global]\ncert = /{trusted}\n")
    run("sh", "-c", f"tar -C {root} -c . | {DOCKER} import - {BASE}", timeout_s=BUILD_S)
    shutil.rmtree(root)


@contextmanager
def find_torch() -> Iterator[str]:
    """An index with torch for CPUs: TORCH_INDEX, or the wheel that pip finds for this machine; empty: there is none."""
    if given := os.environ.get("TORCH_INDEX"):
        yield given
        return
    lock = (CHECKOUT / "deploy/worker-cpu-requirements.lock").read_text()
    (wanted,) = [line.split()[0] for line in lock.splitlines() if line.startswith("torch==")]
    index = FOLDER / "index"
    (index / "torch").mkdir(parents=True, exist_ok=True)
    if not list((index / "torch").iterdir()):
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", index / "torch", wanted, timeout_s=BUILD_S)
    if not list((index / "torch").glob("*+cpu*")):
        yield ""
        return
    with ThreadingHTTPServer(
        ("127.0.0.1", INDEX_PORT), partial(SimpleHTTPRequestHandler, directory=str(index))
    ) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def build(target: str, torch_index: str) -> tuple[float, float]:
    """Build an image. Returns its megabytes, and the seconds that it took."""
    started = time.monotonic()
    docker(
        "build", "--network=host", f"--file={DOCKERFILE}", f"--target={target}", f"--tag=baton-{target}",
        f"--build-arg=TORCH_INDEX={torch_index}", str(CHECKOUT), env={"DOCKER_BUILDKIT": "1"}, timeout_s=BUILD_S,
    )  # fmt: skip
    size = docker("image", "inspect", "--format", "{{.Size}}", f"baton-{target}")
    return int(size) / 1e6, time.monotonic() - started


@dataclass
class Fleet:
    """The compose file's containers, with each prompt handed over."""

    ports: list[int]  # of the gateway
    secret: str = field(default_factory=lambda: os.urandom(16).hex())
    settings: dict[str, str] = field(default_factory=dict)  # of the compose file, for the next `up`
    override: str = ""  # another compose file's text, for the next `up`

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def call(self, *words: str, check: bool = True) -> str:
        (FOLDER / "override.yaml").write_text(self.override or "services: {}\n")
        files = f"--file={COMPOSE_FILE}", f"--file={FOLDER}/override.yaml"
        env = {
            "COMPOSE_PROJECT_NAME": "baton-test", "BATON_FLEET_SECRET": self.secret, "PORT": str(self.ports[0]),
            "GRPC_PORT": str(self.ports[1]), "BATON_LOCAL_PREFILL_MAX_TOKENS": "0", "MODEL_DIR": str(FOLDER / "models"),
            **self.settings,
        }  # fmt: skip
        return run(COMPOSE, *files, "--profile=cpu", *words, env=env, timeout_s=UP_S, check=check)

    def up(self, *words: str, override: str = "", **settings: str) -> float:
        """Seconds until all are healthy and the gateway serves by both roles."""
        started = time.monotonic()
        self.settings, self.override = settings, override
        self.call("up", "--detach", "--wait", *words)
        self.wait_until_served()
        return time.monotonic() - started

    def wait_until_served(self) -> None:
        wait_until(self._is_served, UP_S, lambda: self.call("ps", "--all"))

    def _is_served(self) -> bool:
        try:
            return {one["role"] for one in self.workers() if one["alive"]} == {"prefill", "decode"}
        except httpx.HTTPError:
            return False

    def workers(self) -> list[dict[str, Any]]:
        return read_workers(self.url)

    def ask(self, path: str = "completions", **body: Any) -> Any:
        """The answer to a request, greedy if nothing else is said."""
        body = {"temperature": 0, "include_timing": True, **body}
        answer = HTTP.post(f"{self.url}/v1/{path}", json=body, timeout=ASK_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def inspect(self, name: str, what: str) -> str:
        return docker("inspect", "--format", f"{{{{{what}}}}}", f"baton-test-{name}").strip()

    def docker(self, verb: str, name: str, *words: str) -> str:
        """`docker VERB` of a container."""
        return docker(verb, *words, f"baton-test-{name}")

    def exec(self, name: str, *words: str, check: bool = True) -> str:
        """What a program in a container prints."""
        return docker("exec", f"baton-test-{name}", *words, check=check)

    def down(self) -> None:
        self.call("down", "--volumes", "--timeout=5")
