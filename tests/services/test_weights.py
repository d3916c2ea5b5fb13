"""Weights are replaced in place under load: each answer is that of one set, and nothing cached of the old is used."""

import os
import random
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.live import HTTP, WAIT_S, Live, serve, wait_until
from tests.support.lora import greedy
from tests.support.oracle import random_prompt
from tests.support.surface import Surface

VOCAB, COUNT, NUM_STREAMS, NUM_PROMPTS, LONG = 320, 24, 16, 10, 400
ADMIN_KEY = "0123456789abcdef"
CALM = ("--heartbeat-s=20", "--lease-s=60", "--stall-s=60", "--patience-s=60")
SETS = ("old", "new", "third")


class Models(NamedTuple):
    root: Path
    models: dict[str, Any]  # name of a folder of `root` |-> transformers' model
    prompts: list[list[int]]
    answers: dict[str, list[list[int]]]  # name |-> of each prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(SETS):
        write_tokenizer(write_checkpoint(root / name, "llama", vocab=VOCAB, seed=seed), VOCAB)
    write_tokenizer(write_checkpoint(root / "wide", "llama", vocab=VOCAB, hidden=64), VOCAB)
    found = {name: AutoModelForCausalLM.from_pretrained(root / name) for name in SETS}
    prompts = [random_prompt(20 + 7 * index, VOCAB, seed=index) for index in range(NUM_PROMPTS)]
    answers = {name: [greedy(found[name], prompt, COUNT) for prompt in prompts] for name in SETS}
    return Models(root, found, prompts, answers)


class Served(NamedTuple):
    live: Live
    surface: Surface

    def post(self, verb: str, **body: Any) -> httpx.Response:
        key = {"authorization": f"Bearer {ADMIN_KEY}"}
        return HTTP.post(f"{self.live.url}/v1/{verb}", json=body, headers=key, timeout=WAIT_S)

    def change(self, folder: Path, **more: Any) -> dict[str, Any]:
        answer = self.post("weights", path=str(folder), **more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def revisions(self) -> set[str]:
        return {worker["revision"] for worker in self.live.status()}


@contextmanager
def served(models: Models, *flags: str) -> Iterator[Served]:
    own = ("--dtype=float32", "--draft-model=none", "--threads=1", f"--weights-dir={models.root}", *CALM, *flags)
    with (
        serve(models.root / "old", *own, env={"BATON_ADMIN_KEY": ADMIN_KEY}, forks=True) as live,
        grpc.insecure_channel(live.grpc_address) as channel,
    ):
        live.wait_until_whole()
        yield Served(live, Surface(channel))


def keep_asking(service: Served, models: Models, until: threading.Event) -> Iterator[str]:
    """Prompts one after the other; of each answer, whose it is: that of exactly one set."""
    dice = random.Random(threading.get_ident())
    while not until.is_set():
        index = dice.randrange(NUM_PROMPTS)
        tokens = service.surface.answer(models.prompts[index], max_tokens=COUNT)
        whose = [name for name in SETS if models.answers[name][index] == tokens]
        assert len(whose) == 1, f"prompt {index} got {tokens}, of {whose or 'no set'}"
        yield whose[0]


def check_all_are(service: Served, models: Models, name: str) -> None:
    for prompt, expected in zip(models.prompts, models.answers[name], strict=True):
        assert service.surface.answer(prompt, max_tokens=COUNT) == expected


def change_under_load(service: Served, models: Models, names: list[str]) -> None:
    """All prompts are cached before each change."""
    until, figures = threading.Event(), []
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        asking = [threads.submit(list, keep_asking(service, models, until)) for _ in range(NUM_STREAMS)]
        try:
            for name in names:
                time.sleep(1.5)  # load, between two changes
                figures.append(service.change(models.root / name, revision=f"r-{name}"))
                assert service.revisions() == {f"r-{name}"}
        finally:
            until.set()
        told = [one.result(WAIT_S) for one in asking]
    assert {whose for one in told for whose in one} >= set(names[:-1])
    still = [seconds for one in figures for seconds in one["still_s"].values()]
    paused = [one["paused_s"] for one in figures]
    print(f"{sum(map(len, told))} answers, {len(names)} changes: paused {paused}, still {statistics.median(still)}")
    check_all_are(service, models, names[-1])


def test_answers_are_of_one_set_and_nothing_stale_is_found(models: Models) -> None:
    with served(models, "--prefill-workers=2", "--decode-workers=2", "--kv-host-gib=1") as service:
        before = {worker["pid"] for worker in service.live.status()}
        check_all_are(service, models, "old")
        change_under_load(service, models, ["new", "third", "old", "new"])
        assert {worker["pid"] for worker in service.live.status()} == before, "no restart"
        prompt = models.prompts[-1]
        assert service.surface.ask_one(prompt, max_tokens=COUNT).timing.cached_tokens >= len(prompt) // 16 * 16 - 16
        service.live.wait_until_unused()


@pytest.mark.nightly
def test_ranks_change_together(models: Models) -> None:
    with served(models, "--prefill-tp=2", "--decode-tp=2") as service:
        check_all_are(service, models, "old")
        change_under_load(service, models, ["new", "third"])


@pytest.fixture(scope="module")
def service(models: Models) -> Iterator[Served]:
    with served(models) as running:
        yield running


@pytest.fixture(autouse=True)
def begin_with_old(request: pytest.FixtureRequest, models: Models) -> None:
    if "service" in request.fixturenames:
        request.getfixturevalue("service").change(models.root / "old")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("wide", "hidden_size is 64, here it is 128"),
        ("nowhere", "is no folder on this worker's host"),
        ("../models", "is not below --weights-dir"),
        ("/etc", "is not below --weights-dir"),
        ("link", "is not below --weights-dir"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name_and_nothing_changes(
    models: Models, service: Served, path: str, said: str, tmp_path: Path
) -> None:
    if path == "link":
        (models.root / path).symlink_to(tmp_path)
    before = service.live.status()
    answer = service.post("weights", path=os.path.normpath(models.root / path) if path != "/etc" else path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "path", answer.text
    assert said in answer.text, answer.text
    assert [one["incarnation"] for one in service.live.status()] == [one["incarnation"] for one in before]
    assert service.surface.answer(models.prompts[0], max_tokens=COUNT) == models.answers["old"][0]


def test_only_the_admin_key_may(models: Models, service: Served) -> None:
    for path in ("weights", "pause", "resume"):
        answer = HTTP.post(f"{service.live.url}/v1/{path}", json={"path": str(models.root / "new")}, timeout=WAIT_S)
        assert answer.status_code in (401, 403), answer.text


def test_a_pause_holds_requests_back_until_it_ends(models: Models, service: Served) -> None:
    assert service.post("pause", for_s=120).status_code == 200
    wait_until(lambda: all(one["trouble"] == "is paused" for one in service.live.status()))
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(service.surface.answer, models.prompts[3], max_tokens=COUNT)
        service.change(models.root / "new")
        assert not asking.done() and all(not one["alive"] for one in service.live.status()), "it outlasts a change"
        assert service.post("resume").status_code == 200
        assert asking.result(WAIT_S) == models.answers["new"][3]


def test_answers_that_run_end_by_name_or_go_on_with_the_same_weights(models: Models, service: Served) -> None:
    prompt = models.prompts[0]
    whole = service.surface.answer(prompt, max_tokens=LONG)
    for name in ("old", "new"):
        call = service.surface.start(prompt, max_tokens=LONG)
        tokens = list(next(call).token_ids)
        if name == "old":  # a pause that ends them: they go on behind it
            assert service.post("pause", in_flight="end", for_s=0.5).status_code == 200
            tokens += [token for response in call for token in response.token_ids]
            assert tokens == whole
        else:
            service.change(models.root / name, in_flight="end")
            with pytest.raises(grpc.RpcError) as caught:
                tokens += [token for response in call for token in response.token_ids]
            assert tokens == whole[: len(tokens)] and len(tokens) < LONG
            assert "the answer began with the weights" in str(caught.value.details())


def test_what_does_not_end_in_time_keeps_the_old(models: Models, service: Served) -> None:
    call = service.surface.start(models.prompts[0], max_tokens=LONG)
    next(call)
    answer = service.post("weights", path=str(models.root / "new"), timeout_s=0.01)
    assert answer.status_code == 503, answer.text
    assert "sequences were still running" in answer.text or "weights_incomplete" in answer.text
    for _ in call:
        pass


def test_a_worker_that_starts_again_gets_the_new_weights(models: Models, service: Served, tmp_path: Path) -> None:
    kept = models.root / "kept"
    shutil.copytree(models.root / "new", kept, dirs_exist_ok=True)
    service.change(kept, revision="kept")
    pid = service.live.pids["decode-0"]
    service.live.send("decode-0", signal.SIGKILL)
    wait_until(lambda: service.live.pids["decode-0"] != pid)
    service.live.wait_until_whole()
    assert service.revisions() == {"kept"}
    check_all_are(service, models, "new")
