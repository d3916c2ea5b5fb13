"""Adapters (LoRA) through the whole service: tokens are the merged model's, whatever is loaded, unloaded or killed."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.live import HTTP, WAIT_S, Live, serve, wait_until
from tests.support.lora import greedy, write_adapter
from tests.support.oracle import random_prompt
from tests.support.surface import Surface, Told, take

VOCAB, COUNT, LONG = 320, 12, 150
ADMIN_KEY = "0123456789abcdef"
CALM = ("--heartbeat-s=20", "--lease-s=60", "--stall-s=60")


class Models(NamedTuple):
    base: Path
    folders: list[Path]
    merged: dict[str, Any]  # name |-> transformers' model
    answers: dict[tuple[str, tuple[int, ...]], list[int]]  # its name and a prompt |-> tokens

    def expected(self, name: str, prompt: list[int]) -> list[int]:
        if (key := (name, tuple(prompt))) not in self.answers:
            self.answers[key] = greedy(self.merged[name], prompt, COUNT)
        return self.answers[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    base = write_tokenizer(write_checkpoint(folder / "base", "llama", vocab=VOCAB), VOCAB)
    folders = [folder / name for name in ("one", "two", "three")]
    merged = {one.name: write_adapter(one, base, "llama", seed=seed) for seed, one in enumerate(folders)}
    merged[""] = write_adapter(folder / "nothing", base, "llama", seed=0, lora_alpha=0)  # the base
    return Models(base, folders, merged, {})


class Served(NamedTuple):
    live: Live
    surface: Surface

    def post(self, verb: str, **body: Any) -> httpx.Response:
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        return HTTP.post(f"{self.live.url}/v1/{verb}_lora_adapter", json=body, headers=key, timeout=WAIT_S)

    def load(self, name: str, path: Path, **more: Any) -> None:
        answer = self.post("load", lora_name=name, lora_path=str(path), **more)
        assert answer.status_code == 200, answer.text

    def answer(self, name: str, prompt: list[int], max_tokens: int = COUNT) -> list[int]:
        return self.surface.ask_one(prompt, model=name, max_tokens=max_tokens).tokens


@contextmanager
def served(models: Models, decode_tp: int) -> Iterator[Served]:
    """One adapter is there from the start."""
    flags = ("--dtype=float32", "--draft-model=none", "--threads=1", f"--decode-tp={decode_tp}")
    env = {"BATON_ADMIN_KEY": ADMIN_KEY}
    with (
        serve(models.base, *flags, *CALM, f"--lora=one={models.folders[0]}", env=env, forks=True) as live,
        grpc.insecure_channel(live.grpc_address) as channel,
    ):
        live.wait_until_whole()
        wait_until(lambda: HTTP.get(f"{live.url}/ready").status_code == 200)
        yield Served(live, Surface(channel))


def check_equality(service: Served, models: Models, work: Path) -> None:
    """Of two adapters and the base, for one prompt, whose pages are cached; and of a name with other weights."""
    prompt = random_prompt(50, VOCAB, seed=5)
    service.load("two", models.folders[1])
    for _ in range(2):
        for name in ("one", "", "two"):
            assert service.answer(name, prompt) == models.expected(name, prompt), name
    assert service.surface.ask_one(prompt, model="one", max_tokens=COUNT).timing.cached_tokens == 48
    shutil.copytree(models.folders[0], work)
    service.load("changing", work)
    assert service.answer("changing", prompt) == models.expected("one", prompt)
    shutil.copytree(models.folders[1], work, dirs_exist_ok=True)
    assert "already been loaded" in service.post("load", lora_name="changing", lora_path=str(work)).text
    service.load("changing", work, load_inplace=True)
    assert service.answer("changing", prompt) == models.expected("two", prompt)
    computed = service.live.metric("prefill-0", "prompt_tokens_total")
    assert computed == 3 * (len(prompt) - 1), "handed over once for each content, whatever its name"
    refused = service.post("load", lora_name="bad", lora_path="/nowhere")
    assert refused.status_code == 400 and "does not exist" in refused.text


def check_load(service: Served, models: Models) -> None:
    """32 streams, while adapters come and go."""
    prompts = [random_prompt(20 + index, VOCAB, seed=100 + index) for index in range(32)]
    names = ["one", "two", "", "changing"]
    with ThreadPoolExecutor(32) as threads:
        asked = [threads.submit(service.answer, names[at % 4], prompt) for at, prompt in enumerate(prompts)]
        turns = 0
        while turns < 5 or not all(one.done() for one in asked):
            service.load("three", models.folders[2])
            assert service.answer("three", prompts[0]) == models.expected("three", prompts[0]), "in a slot of another"
            assert service.post("unload", lora_name="three").status_code == 200
            if turns == 1:  # those that run keep it
                assert service.post("unload", lora_name="changing").status_code == 200
            turns += 1
    merged = [*names[:3], "two"]
    for at, prompt in enumerate(prompts):
        if asked[at].exception() is None:
            assert asked[at].result() == models.expected(merged[at % 4], prompt), at
        else:  # it came after its adapter was unloaded
            assert names[at % 4] == "changing" and "NOT_FOUND" in str(asked[at].exception())


def check_deaths(service: Served, models: Models) -> None:
    """Workers are killed in mid-stream: the same tokens as undisturbed, of which the first are the merged model's."""
    live, names = service.live, ("one", "two", "")
    prompts = {name: random_prompt(40, VOCAB, seed=900 + len(name)) for name in names}
    with ThreadPoolExecutor(len(names)) as threads:
        answers = threads.map(lambda name: service.answer(name, prompts[name], LONG), names)
        undisturbed = dict(zip(names, answers, strict=True))
    for name in names:
        assert undisturbed[name][:COUNT] == models.expected(name, prompts[name])
    for role in ("decode", "prefill"):
        calls = {name: service.surface.start(prompts[name], model=name, max_tokens=LONG) for name in names}
        told = {name: [Told()] for name in names}
        for name in names:
            take(told[name], next(calls[name]))
        pid = live.pids[f"{role}-0"]
        live.send(f"{role}-0", signal.SIGKILL)
        assert all(len(one.tokens) < LONG for (one,) in told.values()), "not in mid-stream"
        fresh = random_prompt(45, VOCAB, seed=950 + len(role))
        for name in names:  # computed where there is a worker
            assert service.answer(name, fresh) == models.expected(name, fresh)
        for name in names:
            for response in calls[name]:
                take(told[name], response)
            assert told[name][0].tokens == undisturbed[name], (role, name)
        wait_until(lambda: live.pids[f"{role}-0"] != pid)  # noqa: B023  waits within the turn
        live.wait_until_whole()
        wait_until(lambda: set(live.find(f"{role}-0")["adapters"].values()) == {"loaded"})  # noqa: B023


@pytest.mark.nightly
@pytest.mark.parametrize("decode_tp", [1, 2] if os.environ.get("TEST_FAMILIES") else [2])  # `make families`: both
def test_adapters(models: Models, decode_tp: int, tmp_path: Path) -> None:
    with served(models, decode_tp) as service:
        listed = HTTP.get(f"{service.live.url}/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["base", "one"] and listed[1]["parent"] == "base"
        check_equality(service, models, tmp_path / "changing")
        check_load(service, models)
        check_deaths(service, models)
