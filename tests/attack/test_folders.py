"""A few mutated folders, and what the fuzzer relies on: that it sees what is wrong."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.fork import Limits
from tests.attack import folders
from tests.attack.folders import Base, run_case
from wire.files import check_folder

ROOT = Path(__file__).parents[2]
PACKAGES = ("bench", "cli", "decode_worker", "demo", "engine", "gateway", "kvtransfer", "prefill_worker", "worker")


def test_mutated_folders_are_served_or_refused_by_name() -> None:
    """More by hand: see folders.py. In a process of its own: forks of this one, which has threads, may crash."""
    command = [sys.executable, "-m", "tests.attack.folders", "--seed=31", "--cases=12", "--seconds=300", "--jobs=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and done.stdout.startswith("12 folders:"), (done.stdout, done.stderr[-2000:])


def test_the_fuzzer_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LIMITS", Limits(0.5, 5.0, 1 << 30))
    monkeypatch.setattr(folders, "mutate", lambda dice, folder: None)
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")

    def loop(folder: Path) -> None:
        while True:
            pass

    def refuse(named: bool) -> None:
        raise ValueError("config.json is wrong" if named else "something is wrong")

    steps = {
        "taken": lambda folder: json.loads((folder / "config.json").read_text()),
        "refused": lambda folder: refuse(True),
        "unnamed": lambda folder: refuse(False),
        "traceback": lambda folder: {}[folder],
        "hang": loop,
        "crash": lambda folder: os.abort(),
    }
    for kind, step in steps.items():
        _, outcome = run_case([Base(tmp_path / "good", [step])], tmp_path, 1, 1)
        assert outcome.kind == kind


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.model", "x.gguf"])
def test_files_that_are_none_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{name} is a FIFO, expected a file"):
        check_folder(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{name} is a device"):
        check_folder(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    check_folder(tmp_path)
    path.unlink()
    path.mkdir()
    if name.endswith((".json", ".model")):
        with pytest.raises(ValueError, match=f"{name} is a folder"):
            check_folder(tmp_path)


def test_no_checkpoints_code_is_ever_asked_for() -> None:
    """On a terminal transformers asks whether to run it, unless it is told not to."""
    calls = 0
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="from_pretrained" | "from_config"), keywords=keywords):
                    given = [one.value for one in keywords if one.arg == "trust_remote_code"]
                    assert [ast.unparse(value) for value in given] == ["False"], f"{path}:{node.lineno}"
                    calls += 1
    assert calls > 10
