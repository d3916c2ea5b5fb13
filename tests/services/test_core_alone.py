"""Without any satellite the service answers: a copy of the tree in which they are deleted, and no file names them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.paths import TARGET_DIR
from engine.llm import LLM
from tests.support import core_alone
from tests.support.decoding import decode
from tests.support.fleet import Process, free_ports
from tests.support.live import CHECKOUT, START_S, build_environment
from wire.sampling import SamplingParams
from worker.params import SequenceParams

PACKAGES = ("decode_worker", "engine", "gateway", "kvtransfer", "prefill_worker", "protos", "runtime", "wire", "worker")
SATELLITES = {
    "engine": (
        "adapters", "catalogue.py", "cpu", "cuda", "experts", "fallback", "formats", "heads", "hub.py", "hybrids",
        "latent", "pooling", "new_weights.py", "rank_group.py", "varied", "vision",
    ),
    "worker": (
        "adapters", "chunks.py", "images", "itl_goal.py", "new_weights.py", "ranks", "startup", "states", "tiers",
    ),
    "decode_worker": ("grammar", "speculation"),
}  # fmt: skip
ROUTER = ("__init__.py", "errors.py", "router")  # the gateway's core: the rest is what clients say and read
COMPOSED = {"engine": "engine_compose", "worker": "worker_compose", "decode_worker": "decode_compose"}
PROMPT, MAX_TOKENS = list(range(5, 105)), 24
SETTINGS = {
    "model": str(TARGET_DIR), "dtype": "float32", "device": "cpu", "page_tokens": 8, "max_running": 4,
    "max_context_tokens": 256,
}  # fmt: skip
CHUNKS = {"prefill": "chunk_tokens", "decode": "local_prefill_chunk_tokens"}


def copy_core(into: Path) -> None:
    """The tree without satellites."""
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, into / package, ignore=shutil.ignore_patterns("__pycache__"))
    for package, names in SATELLITES.items():
        for name in names:
            delete(into / package / name)
    for path in (into / "gateway").iterdir():
        if path.name not in ROUTER:
            delete(path)
    own = Path(core_alone.__file__).parent
    shutil.copytree(own, into / "tests" / "support" / own.name)
    for package, name in COMPOSED.items():
        shutil.copy(own / f"{name}.py", into / package / "compose.py")


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, Process]]:
    """Of the copy, by role."""
    copy_core(tmp_path)
    ports, found = free_ports(4), dict[str, Process]()
    for role, chunk in CHUNKS.items():
        port, ops_port = ports.pop(), ports.pop()
        settings = json.dumps({**SETTINGS, chunk: 32, "port": port, "ops_port": ops_port})
        found[role] = Process(
            role, role, port, ops_port, (settings,), tmp_path / f"{role}.log", ("tests.support.core_alone",), tmp_path
        )
    try:
        for process in found.values():
            process.start()
        for process in found.values():
            process.wait_ready()
        yield found
    finally:
        for process in found.values():
            if process.is_running:
                process.kill()


def test_the_demo_model_answers_by_hand_off(workers: dict[str, Process], tmp_path: Path) -> None:
    asked = json.dumps(
        {"prefill": workers["prefill"].address, "decode": workers["decode"].address, "prompt": PROMPT,
         "max_tokens": MAX_TOKENS}
    )  # fmt: skip
    gateway = subprocess.run(
        [sys.executable, "-m", "tests.support.core_alone", "gateway", asked], cwd=tmp_path,
        env=build_environment({}, tmp_path), capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    assert gateway.returncode == 0, gateway.stderr[-3000:]
    whole = decode(LLM(str(TARGET_DIR), dtype="float32", device="cpu", context_tokens=256).engine, [request()])
    assert json.loads(gateway.stdout.splitlines()[-1]) == next(iter(whole.tokens.values()))
    assert workers["decode"].metric("offers_accepted_total") >= 1
    assert workers["decode"].metric("prompt_tokens_total") == 0, "all of the prompt came from the prefill worker"


def request() -> SequenceParams:
    prompt = np.array(PROMPT, np.int32).tobytes()
    return SequenceParams(
        "one", prompt, len(PROMPT) - 1, MAX_TOKENS, gateway="g", handle=1, sampling=SamplingParams(temperature=0.0)
    )
