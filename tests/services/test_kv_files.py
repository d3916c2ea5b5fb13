"""KV beyond the pool: it survives restarts and eviction in files, and no token depends on whether these can be used."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from kvtransfer.page_files import LOCK, host_folder
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.live import Live, serve_calmly, wait_until
from tests.support.oracle import Oracle, random_prompt
from tests.support.surface import Surface

VOCAB, COUNT, PAGE = 320, 12, 8


class Service(NamedTuple):
    live: Live
    surface: Surface
    oracle: Oracle

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """Tokens, which are the right ones, and how many of the prompt were cached."""
        told = self.surface.ask_one(prompt, max_tokens=COUNT)
        assert told.tokens == self.oracle.answer(prompt, COUNT, guess=told.tokens)
        return told.tokens, told.timing.cached_tokens

    def metric(self, role: str, name: str) -> float:
        return self.live.metric(f"{role}-0", name)

    def read(self, name: str, source: str) -> float:
        """Prompt tokens whose KV a worker has read from there."""
        return self.live.metric(name, "kv_tokens_read_total", {"source": source})

    def wait_until_saved(self, least: int = 0) -> None:
        """So many pages and slots, and nothing more for a while: files are written when nothing else runs."""
        wait_until(lambda: self.num_saved() >= least)
        before, saved = -1.0, self.num_saved()
        while before != saved:
            time.sleep(0.3)
            before, saved = saved, self.num_saved()

    def num_saved(self) -> float:
        return sum(self.metric(role, "kv_pages_saved_total") for role in ("prefill", "decode"))

    def kill(self, *names: str) -> None:
        """Each comes back with nothing in its pool, and the gateway has seen it."""
        killed = {name: self.live.find(name)["incarnation"] for name in names}
        for name in names:
            self.live.send(name, signal.SIGKILL)
        wait_until(lambda: all(self.live.find(name)["incarnation"] != killed[name] for name in names))
        self.live.wait_until_whole()


def write_model(folder: Path, model_type: str) -> Path:
    return write_tokenizer(write_checkpoint(folder, model_type, vocab=VOCAB), VOCAB)


@contextmanager
def served(model: Path, *flags: str) -> Iterator[Service]:
    flags = ("--dtype=float32", f"--page-tokens={PAGE}", "--draft-model=none", "--chunk-tokens=32", *flags)
    with serve_calmly(model, *flags) as live, grpc.insecure_channel(live.grpc_address) as channel:
        yield Service(live, Surface(channel), Oracle(model))
        live.wait_until_unused()


def test_conversations_go_on_after_the_death_of_every_worker(tmp_path: Path) -> None:
    """Of a model with pages and states, on ranks."""
    model, disk = write_model(tmp_path / "model", "qwen3_5_text"), tmp_path / "kv"
    prompts = [random_prompt(100 + index, VOCAB, seed=index) for index in range(3)]
    saved = list[set[Path]]()  # after each prompt
    with served(model, "--decode-tp=2", f"--kv-disk={disk}") as service:
        for index, prompt in enumerate(prompts):
            tokens, cached = service.ask(prompt)
            assert not cached
            prompts[index] = [*prompt, *tokens, *random_prompt(30, VOCAB, seed=99)]  # the next turn
            service.wait_until_saved(28 * (index + 1))
            saved.append({path for path in disk.rglob("*") if path.is_file() and path.name != LOCK})
        damage(sorted(saved[-1] - saved[0]))
        service.kill("prefill-0", "decode-0")
        found = [service.ask(prompt)[1] for prompt in prompts]
        assert found[0] >= 96 > max(found[1:])
        assert all(service.read(f"{role}-0", "files") >= 96 for role in ("prefill", "decode"))
        assert service.metric("decode", "kv_files_bad") > 0


def damage(files: list[Path]) -> None:
    """Tear, change or swap most of them."""
    rng = random.Random(1)
    assert len(files) > 25
    for path in files:
        content = path.read_bytes()
        at = rng.randrange(len(content))
        kinds = (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], files[0].read_bytes(), b"")
        path.write_bytes(rng.choice(kinds))


@pytest.mark.nightly
def test_what_a_small_pool_evicts_is_read_back_from_memory(tmp_path: Path) -> None:
    """Both roles have room for one conversation; turns of three alternate."""
    model = write_model(tmp_path / "model", "llama")
    prompts = [random_prompt(200, VOCAB, seed=index) for index in range(3)]
    with served(model, "--kv-host-gib=1", "--kv-memory-mib=1", "--max-context-tokens=400") as service:
        for _ in range(3):
            for index, prompt in enumerate(prompts):
                tokens, _ = service.ask(prompt)
                prompts[index] = [*prompt, *tokens, *random_prompt(5, VOCAB, seed=99)]
                service.wait_until_saved()
        assert service.read("decode-0", "files") > 0
        folder = host_folder()
        assert any(folder.iterdir())
    assert not [path for path in folder.glob("*/*/*") if path.name != LOCK]


@pytest.mark.nightly
def test_a_prefill_worker_answers_from_the_pages_of_another(tmp_path: Path) -> None:
    """Prompts that begin alike come at once: the worker that has their beginning is busy, so the other one reads it."""
    model = write_model(tmp_path / "model", "qwen3_5_text")
    names, numbers = ("prefill-0", "prefill-1"), count()
    with served(model, "--prefill-workers=2") as service, ThreadPoolExecutor(6) as pool:

        def borrowed() -> list[float]:  # also from the decode worker, which has a page more
            return [service.read(name, "prefill") + service.read(name, "decode") for name in names]

        def ask_together(seed: int, kill: str = "") -> None:
            ends = [random_prompt(80, VOCAB, seed=next(numbers)) for _ in range(6)]
            prompts = [[*random_prompt(600, VOCAB, seed=seed), *end] for end in ends]
            asked = [pool.submit(service.surface.ask_one, prompt, max_tokens=COUNT) for prompt in prompts]
            if kill:
                service.live.send(kill, signal.SIGKILL)
            for prompt, told in zip(prompts, [one.result() for one in asked], strict=True):
                assert told.tokens == service.oracle.answer(prompt, COUNT, guess=told.tokens)

        def has_borrowed() -> bool:
            """Each time of a beginning that one worker has: where requests come slowly, that one is not busy."""
            seed = 1000 + next(numbers)
            service.ask(random_prompt(600, VOCAB, seed=seed))
            ask_together(seed)
            return sum(borrowed()) >= 512

        wait_until(has_borrowed)
        wait_until(lambda: [service.live.find(name)["restored_tokens"] for name in names] == borrowed())
        before = [service.live.metric(name, "prompt_tokens_total") for name in names]
        service.ask(random_prompt(600, VOCAB, seed=2))
        after = [service.live.metric(name, "prompt_tokens_total") for name in names]
        ask_together(2, kill=names[after[0] == before[0]])
        service.live.wait_until_whole()
