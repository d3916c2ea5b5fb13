"""Runs every client against `baton serve` and prints tables: `make clients`.

Libraries use the demo model and a tiny one that takes images; coding agents, whose prompts do not fit these, one that
answers by a script (with_agents.py).

Each client gets an environment of its own under build/clients/, filled from its registry. A client that cannot be
installed is skipped with the reason; one that fails a check makes the exit code 1.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from tests.clients.checks import AGENT_CHECKS, ASKED, CHECKS, MARK
from tests.support.checkpoints import write_tokenizer
from tests.support.checkpoints_vision import write_vlm_checkpoint
from tests.support.live import serve
from tests.support.pooled import write_pooled

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
INSTALL_S, RUN_S = 900, 600


class InstallError(Exception):
    """The client could not be installed."""


@dataclass(frozen=True)
class Client:
    """A client, its package, and the script or project that uses it.

    `kind`: a package of PyPI with a script tests/clients/USES.py, or one of npm with a project tests/clients/node/USES;
    an agent is one of npm, started in a network namespace without outside.
    """

    name: str
    kind: Literal["python", "node", "agent"]
    package: str
    uses: str

    @property
    def checks(self) -> Sequence[str]:
        """The checks that its script runs."""
        return AGENT_CHECKS if self.kind == "agent" else CHECKS

    @property
    def _python(self) -> str:
        return str(BUILD / self.name / "bin" / "python")

    @property
    def _project(self) -> Path:
        return BUILD / "node" / self.uses

    def install(self) -> str:
        """Fill or update its environment; return the client's version. Raises InstallError."""
        if self.kind == "python":
            if not Path(self._python).exists():
                _call([sys.executable, "-m", "venv", str(BUILD / self.name)], ROOT)
            _call([self._python, "-m", "pip", "install", "--quiet", self.package], ROOT)
            package = re.split(r"[\[>]", self.package)[0]
            code = f"from importlib.metadata import version; print(version('{package}'))"
            return _call([self._python, "-c", code], ROOT)
        if self.kind == "agent":
            _call(["unshare", "--net", "true"], ROOT)  # fails where no network namespace can be made
        shutil.copytree(HERE / "node", BUILD / "node", dirs_exist_ok=True)
        _call(["npm", "install", "--no-audit", "--no-fund"], self._project)
        manifest = self._project / "node_modules" / self.package / "package.json"
        return str(json.loads(manifest.read_text(encoding="utf-8"))["version"])

    def command(self, url: str) -> tuple[list[str], Path]:
        """The script's command line, and the folder to run it in."""
        if self.kind == "python":
            return [self._python, "-m", f"tests.clients.{self.uses}", url], ROOT
        if self.kind == "node":
            return ["node", "main.mjs", url, str(HERE / "asked.json")], self._project
        programs = str(self._project / "node_modules" / ".bin")
        return ["unshare", "--net", sys.executable, "-m", "tests.clients.with_agents", self.name, programs], ROOT


CLIENTS = (
    Client("openai-python", "python", "openai>=3,<4", "with_openai"),
    Client("openai-node", "node", "openai", "openai_node"),
    Client("anthropic-python", "python", "anthropic>=1.17,<2", "with_anthropic"),
    Client("ollama-python", "python", "ollama>=0.6.3,<1", "with_ollama"),
    Client("ollama-node", "node", "ollama", "ollama_node"),
    Client("vercel-ai", "node", "ai", "vercel_ai"),
    Client("langchain-openai", "python", "langchain-openai>=1.7,<2", "with_langchain"),
    Client("litellm", "python", "litellm[mcp]>=1.100,<2", "with_litellm"),  # imports mcp for any tool call
    Client("instructor", "python", "instructor>=1.17,<2", "with_instructor"),
    Client("llm", "python", "llm>=0.36,<1", "with_llm"),
    Client("cohere", "python", "cohere>=5,<8", "with_cohere"),
    Client("claude", "agent", "@anthropic-ai/claude-code", "agents"),
    Client("codex", "agent", "@openai/codex", "agents"),
    Client("opencode", "agent", "opencode-ai", "agents"),
)


@dataclass
class Report:
    """One client's results."""

    name: str
    checks: Sequence[str]
    version: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)  # check |-> "ok", "skip" or "fail"
    reasons: dict[str, str] = field(default_factory=dict)  # check, or "" for the client |-> why skipped or failed
    is_good: bool = True


def run_client(client: Client, url: str, console: Console) -> Report:
    """Install it and run its script. A script that ends early, with an error or without all its checks has failed."""
    console.print(f"{client.name} ...")
    try:
        report = Report(client.name, client.checks, client.install())
    except InstallError as error:
        return Report(client.name, client.checks, reasons={"": f"skipped: {error}"})
    command, folder = client.command(url)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        report.reasons[""], report.is_good = f"did not end within {RUN_S} s", False
        return report
    for name, outcome, reason in _outcomes(done.stdout):
        report.outcomes[name] = outcome
        if reason:
            report.reasons[name] = reason
    is_whole = set(report.outcomes) == set(client.checks)
    report.is_good = is_whole and done.returncode == 0 and "fail" not in report.outcomes.values()
    if not is_whole:
        report.reasons[""] = f"ended early: {done.stderr.strip()[-400:]}"
    return report


def _outcomes(output: str) -> Iterator[tuple[str, str, str]]:
    for line in output.splitlines():
        mark, *rest = line.split(" ", 3)
        if mark == MARK and len(rest) == 3:
            yield rest[0], rest[1], rest[2]


def _call(command: list[str], folder: Path) -> str:
    """Returns its output. Raises InstallError."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    except FileNotFoundError as error:
        raise InstallError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{command[0]} took longer than {INSTALL_S} s") from error
    if done.returncode:
        raise InstallError((done.stderr.strip().splitlines() or ["no reason given"])[-1][:200])
    return done.stdout.strip()


@contextmanager
def _service(url: str) -> Iterator[str]:
    if url:
        yield url
        return
    images = write_vlm_checkpoint(BUILD / "images", "qwen2_5_vl")  # of random weights
    with tempfile.TemporaryDirectory() as folder:
        texts = write_tokenizer(Path(folder), 300)
        write_pooled(texts, "qwen3", "Qwen3Model", "lasttoken", normalizes=True)
        models = {ASKED["image"]["model"]: images, ASKED["embed"]["model"]: texts}
        flags = [f"--model={name}={model}" for name, model in models.items()]
        flags += ["--dtype=float32", f"--state-dir={folder}/state"]
        with serve("demo", *flags) as live:
            yield f"{live.url}/v1"


def show(reports: Sequence[Report], console: Console) -> None:
    """Print a table for each set of checks, and below them figures and the reasons of skips and failures."""
    for checks in dict.fromkeys(tuple(report.checks) for report in reports):
        table = Table("client", "version", *checks)
        for report in reports:
            if tuple(report.checks) == checks:
                table.add_row(report.name, report.version, *(report.outcomes.get(name, "-") for name in checks))
        console.print(table)
    for report in reports:
        for name, reason in report.reasons.items():
            console.print(f"{report.name} {name}: {reason}", markup=False, highlight=False)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help="only these: " + ", ".join(c.name for c in CLIENTS)
    )
    parser.add_argument("--url", default="", help="with /v1, of a running service of both models and a store")
    arguments = parser.parse_args()
    if unknown := set(arguments.clients) - {client.name for client in CLIENTS}:
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    os.environ.pop("PYTHONPATH", None)  # otherwise the clients' environments would find our packages
    BUILD.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = [client for client in CLIENTS if not arguments.clients or client.name in arguments.clients]
    libraries = [client for client in chosen if client.kind != "agent"]
    agents = [client for client in chosen if client.kind == "agent"]  # each starts a service of its own
    reports = []
    if libraries:
        with _service(arguments.url) as url:
            reports += [run_client(client, url, console) for client in libraries]
    reports += [run_client(client, "", console) for client in agents]
    show(reports, console)
    return 0 if all(report.is_good for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
