"""The gateway with the packages of its image alone, which has no torch: what it serves, and what it cannot do."""

import os
import socket
import subprocess
import venv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from deploy.lock import find_requirements
from tests.support.checkpoints import write_config, write_tokenizer
from tests.support.checkpoints_vision import VISIONS, write_reading
from tests.support.families import FAMILIES, VOCAB
from tests.support.fleet import HOST, Process, ProcessFleet, run_fleet
from tests.support.gguf_files import write_gguf_models
from tests.support.hub import REPOSITORY, serve_hub
from tests.support.live import CHECKOUT, HTTP, WAIT_S, build_environment, wait_until
from tests.support.tiny_tokenizer import write_sentencepiece
from tests.support.vision import data_uri, picture

IMAGES: tuple[str, ...] = ("qwen3_vl",)  # TEST_FAMILIES=1: all, and every family that has none (`make families`)
TEXTS: tuple[str, ...] = ()
if os.environ.get("TEST_FAMILIES") == "1":
    IMAGES, TEXTS = tuple(VISIONS), tuple(FAMILIES.keys() - VISIONS.keys())
IMAGE = {"type": "image_url", "image_url": {"url": data_uri(picture(size=(56, 40)))}}
HELLO = {"type": "text", "text": "Hello"}


def find_packages(texts: Iterable[str]) -> dict[str, metadata.Distribution]:
    """What these requirements need, by name: those of this environment, not the lock's versions."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [Requirement(text) for text in texts]
    while wanted:
        one = wanted.pop()
        package = found[one.name] = metadata.distribution(one.name)
        needed = map(Requirement, package.requires or ())
        extras = one.extras or {""}
        wanted += [
            other for other in needed if other.name not in found
            and (other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras))
        ]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with links to the packages that the image has. Installing them takes 40 s of CPU."""
    folder = tmp_path_factory.mktemp("gateway")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for package in find_packages(find_requirements()["gateway"]).values():
        for name in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(package.locate_file(name)))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A name |-> a folder."""
    root = tmp_path_factory.mktemp("models")
    for name in TEXTS:
        write_tokenizer(write_config(root / name, name), VOCAB)
    for name in IMAGES:
        write_reading(write_config(root / name, name), name)
    write_sentencepiece(root / "pieces")
    write_config(root / "pieces", "llama")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def fleet(python: Path, models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """The demo model has a worker; the others can be asked for tokens."""
    folder = tmp_path_factory.mktemp("files")
    path, _ = write_gguf_models(folder, "Q4_0")
    named = [f"--model={name}={path}" for name, path in models.items()]
    flags = {"gateway": ["--model=demo", f"--model=gguf={REPOSITORY}:Q4_0", *named]}
    with serve_hub() as hub, run_fleet(0, 1, flags, starts=False, forks=True) as running:
        hub.files["tiny-Q4_0.gguf"] = path.read_bytes()
        running.gateway.python, running.gateway.forks = python, False
        running.gateway.env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        for process in running.processes.values():
            process.start()
        yield running


def is_listening(gateway: Process) -> bool:
    """Which it does before it knows workers for all models."""
    assert gateway.is_running, gateway.read_log()
    with suppress(OSError), socket.create_connection((HOST, gateway.port)):
        return True
    return False


def ask(fleet: ProcessFleet, path: str, **body: Any) -> Any:
    answer = HTTP.post(f"{fleet.url}{path}", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, f"{answer.text}\n{fleet.gateway.read_log()[-3000:]}"
    return answer.json()


def test_it_answers_and_reads_all_that_clients_send(fleet: ProcessFleet, models: Mapping[str, Path]) -> None:
    """Byte-level and sentencepiece vocabularies, a GGUF file on a hub, images: none needs torch."""
    wait_until(lambda: is_listening(fleet.gateway), explain=fleet.gateway.read_log)
    for name in ("gguf", *models):
        content = [HELLO, IMAGE] if name in IMAGES else "Hello"
        found = ask(fleet, "/tokenize", model=name, messages=[{"role": "user", "content": content}])
        assert found["count"] > (14 if name in IMAGES else 5), name  # images have 9 tokens or more
    question = {"role": "user", "content": "What is 12 plus 30?"}
    answer = ask(fleet, "/v1/chat/completions", model="baton-demo", messages=[question], temperature=0)
    assert "42" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("words", [("doctor",), ("decode", "--model=demo")])
def test_what_computes_models_says_that_it_cannot(python: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [python, "-m", "cli.main", *words], capture_output=True, text=True, timeout=WAIT_S, cwd=CHECKOUT,
        env=build_environment({}), check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("baton: this needs "), done.stderr
    assert done.stderr.count("\n") == 1 and "is not installed here: run it where workers run" in done.stderr
