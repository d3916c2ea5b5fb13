"""The README's commands, as they are written, in a copy of the checkout and a network where port 8000 is free."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.commands import read_commands
from tests.support.live import CHECKOUT

NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
README = (CHECKOUT / "README.md").read_text()
RUN_S = 1800  # more than all limits of tests/documents/commands.py together, so that it stops what it has started
NEEDED = ("unshare", "ip", "curl", "git", "make")
PIP = """#!/bin/sh
case "$*" in
    *"config list"*) echo "$CONFIG" ;;
    *show*torch*) exit 1 ;;
    *install*) echo installs ;;
esac
"""


def copy_checkout(folder: Path) -> None:
    """What a clone of this state has, and the environment that runs the tests as its .venv."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (CHECKOUT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".installed"):
            (folder / ".venv" / path.name).symlink_to(path)
    for stamp in (".installed", ".installed-dev"):
        (folder / ".venv" / stamp).touch()


@pytest.mark.nightly
@pytest.mark.timeout(RUN_S + 60)
def test_commands_work_as_they_are_written(tmp_path: Path) -> None:
    if not all(map(shutil.which, NEEDED)) or subprocess.run([*NETWORK, "true"], capture_output=True).returncode:
        pytest.skip(f"no network namespace can be made here, or one of {NEEDED} is missing")
    copy_checkout(tmp_path)
    variables = {"PYTHONPATH": str(tmp_path), "MAKEFLAGS": "", "ARGS": ""}  # not those of a make that runs this
    done = subprocess.run(
        [*NETWORK, sys.executable, "-m", "tests.documents.commands"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | variables, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    asked, _, rest = done.stdout.partition("$ baton status")
    [answer] = re.findall(r"The answer is `([^`]+)`", README)
    assert answer in asked.partition("$ curl")[2]
    assert "decode" in rest.partition("\n$ ")[0]
    assert len(rest.partition("base_url")[2].partition("\nEND\n")[2].partition("\n$ ")[0].strip()) > 10


def test_only_what_needs_more_than_a_clone_is_marked() -> None:
    commands = list(read_commands(README))
    marked = [command.text for command in commands if command.is_marked]
    assert 2 * len(marked) < len(commands), marked
    for text in marked:
        begins = ("make serve MODEL=", "make test", "baton launch", "docker compose")
        assert text.startswith(begins), text


@pytest.mark.parametrize("command", [one.text for one in read_commands(README) if one.text.startswith("make")])
def test_targets_exist(command: str) -> None:
    done = subprocess.run(["make", "--dry-run", *command.split()[1:2]], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("config", "arguments", "has_gpu", "installs"),
    [
        ("", (), False, False),
        ("global.extra-index-url='x'", (), False, True),
        ("", ("PIP_ARGS=-q",), False, True),
        ("", (), True, True),
    ],
)
def test_make_asks_for_an_index_before_gigabytes_for_gpus_come(
    config: str, arguments: tuple[str, ...], has_gpu: bool, installs: bool, tmp_path: Path
) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(CHECKOUT / name, tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("grep", "make", "touch", *(["true"] if has_gpu else [])):
        (programs / ("nvidia-smi" if name == "true" else name)).symlink_to(str(shutil.which(name)))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    variables = {"PATH": str(programs), "CONFIG": config}
    command = ["make", *arguments, ".venv/.installed"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == (0 if installs else 2), done.stderr
    assert ("installs" in done.stdout.splitlines()) == installs
    assert ("PIP_EXTRA_INDEX_URL" in done.stderr) == (not installs)
