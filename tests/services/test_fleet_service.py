"""Two prefill and three decode workers: conversations stay with their pages, and a drain loses nothing.

A draining process finishes its requests, accepts no new ones and exits with 0.
"""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import grpc
import pytest

from demo.paths import TARGET_DIR
from protos import inference_pb2, inference_pb2_grpc
from tests.support.asking import Asking
from tests.support.command_line import run
from tests.support.fault_answers import answers, ask, ask_several, failed_attempts, read_events
from tests.support.live import HTTP, WAIT_S, Live, serve_calmly, wait_until
from tests.support.oracle import Oracle, random_prompt
from tests.support.surface import MODEL, PAGE_TOKENS, VOCAB, Surface, Told, num_prefilled, take, transferred_bytes

NUM_TURNS = 4
NEW_TOKENS, ANSWER_TOKENS = 60, 12  # per turn
NUM, NUM_TOKENS, NUM_PROMPT = 4, 200, 1000  # long enough that work is left when a test looks, on any machine


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """The tests end its processes one after the other, so they run in order."""
    flags = ("--dtype=float32", "--prefill-workers=2", "--decode-workers=3", "--threads=1", "--drain-s=300")
    with serve_calmly("demo", *flags) as service:
        yield service


@pytest.fixture(scope="module")
def undisturbed(live: Live) -> list[list[int]]:
    return answers(ask_several(live, NUM, NUM_TOKENS))


@pytest.fixture(scope="module")
def surface(live: Live) -> Iterator[Surface]:
    with grpc.insecure_channel(live.grpc_address) as channel:
        yield Surface(channel, 240)


# -- all of them -----------------------------------------------------------------------------------------------------


def test_a_conversation_is_prefilled_once(live: Live, surface: Surface) -> None:
    before, prompt = num_prefilled(live), list[int]()
    for turn in range(NUM_TURNS):
        prompt += random_prompt(NEW_TOKENS, VOCAB, seed=turn)
        num_tokens = len(prompt)
        prompt += surface.answer(prompt, max_tokens=ANSWER_TOKENS)
        wait_until(lambda: not live.metric("gateway", "num_requests_running"), 20)  # a place returned late counts
    # A turn's partial page is computed again.
    assert num_prefilled(live) - before <= num_tokens + NUM_TURNS * PAGE_TOKENS


@pytest.mark.nightly
def test_routing_keeps_conversations_where_their_pages_are(live: Live, surface: Surface) -> None:
    """The two conversations take turns in overlapping; routing by load alone would swap their workers."""
    before = num_read(live)
    prompts: list[list[int]] = [[], []]
    for turn in range(NUM_TURNS):
        first, second = prompts if turn % 2 else prompts[::-1]
        for number, prompt in enumerate(prompts):
            prompt += random_prompt(NEW_TOKENS, VOCAB, seed=1000 * (number + 1) + turn)
        slow, told = surface.start(first, max_tokens=8 * ANSWER_TOKENS), Told()
        begun = next(slow)
        second += surface.answer(second, max_tokens=ANSWER_TOKENS)
        for response in chain([begun], slow):
            take([told], response)
        first += told.tokens
    # Only what is new in each turn; a conversation moved to the other worker would be read whole.
    most = transferred_bytes(NEW_TOKENS + PAGE_TOKENS)
    assert 0 < num_read(live) - before <= 2 * NUM_TURNS * most


def num_read(live: Live) -> float:
    """Bytes of KV read."""
    return sum(live.metric(f"decode-{rank}", "kv_transfer_bytes_total") for rank in range(3))


@pytest.mark.nightly
def test_200_requests(live: Live, surface: Surface) -> None:
    """Mixed prompts, answers, streaming and transports: no error, and every pool is empty afterwards."""
    oracle = Oracle(TARGET_DIR)
    probes = {length: oracle.answer(random_prompt(length, VOCAB, seed=length), 12) for length in (1, 30, 300)}
    everyone = threading.Barrier(200, timeout=60)

    def ask(index: int) -> None:
        everyone.wait()
        if index % 2:
            length = (1, 30, 300)[index % 3]
            assert surface.answer(random_prompt(length, VOCAB, seed=length), max_tokens=12) == probes[length]
        else:
            messages = [{"role": "user", "content": "Hello! What is 3 + 4?"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 1 + index // 4, "stream": index % 4 == 0}
            response = HTTP.post(f"{live.url}/v1/chat/completions", json=body, timeout=240)
            assert response.status_code == 200, response.text

    with ThreadPoolExecutor(200) as threads:
        list(threads.map(ask, range(200)))
    live.wait_until_unused()
    workers = ["prefill-0", "prefill-1", *(f"decode-{index}" for index in range(3))]
    shares = {name: live.metric(name, "engine_step_seconds_count") for name in workers}
    assert all(shares.values()), f"a worker did nothing: {shares}"


# -- ended one after the other ---------------------------------------------------------------------------------------


def uses_pages(live: Live, name: str) -> bool:
    return live.metric(name, "kv_cache_used_pages") > 0


def send_decodes(live: Live, number: signal.Signals) -> None:
    for rank in range(3):
        live.send(f"decode-{rank}", number)


def test_a_prefill_worker_finishes_its_runs(live: Live) -> None:
    """No attempt fails because of it, except those that the worker refuses from then on."""
    expected = answers(ask_several(live, NUM, 4, NUM_PROMPT))
    asking = list[Asking]()

    def has_work() -> bool:
        """No decode worker runs then, so the work cannot finish."""
        if all(one.is_over for one in asking):
            asking.extend(ask(live, NUM_PROMPT, 4, seed, 2 * WAIT_S) for seed in range(NUM))
        if not uses_pages(live, "prefill-0"):
            return False
        send_decodes(live, signal.SIGSTOP)
        if uses_pages(live, "prefill-0"):
            return True
        send_decodes(live, signal.SIGCONT)
        return False

    failed_before = len(failed_attempts(live.read_log()))
    try:
        wait_until(has_work)
        live.send("prefill-0", signal.SIGTERM)
        wait_until(lambda: bool(read_events(live.read_log(), "draining")))
    finally:
        send_decodes(live, signal.SIGCONT)
    assert answers(asking) == expected * (len(asking) // NUM)
    live.wait_shown("prefill-0 ended with exit status 0; 4 workers are left; it stays ended, as it was asked to")
    assert "not all work could be finished" not in live.read_log()
    (draining,) = read_events(live.read_log(), "draining")
    assert draining["left"] > 0, "it had nothing to finish"
    reasons = failed_attempts(live.read_log())[failed_before:]
    assert all("this worker is draining" in why or "Failed to connect" in why for why in reasons), reasons
    assert live.complete().status_code == 200


def test_baton_drain_finds_the_secret_that_serve_drew(live: Live) -> None:
    done = run("drain", live.addresses["prefill-1"], f"--url={live.url}")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("has ended\n"), done
    live.wait_shown("prefill-1 ended with exit status 0; 3 workers are left; it stays ended, as it was asked to")
    assert live.complete().status_code == 200


def test_a_decode_worker_finishes_its_sessions(live: Live, undisturbed: list[list[int]]) -> None:
    failed_before = live.metric("gateway", "attempts_failed_total")
    asking = ask_several(live, NUM, NUM_TOKENS)
    assert uses_pages(live, "decode-0")
    live.send("decode-0", signal.SIGTERM)
    wait_until(lambda: live.find("decode-0")["trouble"] != "")
    assert live.metric("gateway", "attempts_failed_total") == failed_before, "sessions stay where they are"
    assert live.complete().status_code == 200
    assert answers(asking) == undisturbed
    live.wait_shown("decode-0 ended with exit status 0; 2 workers are left; it stays ended, as it was asked to")
    assert "not all work could be finished" not in live.read_log()


def test_a_second_signal_ends_at_once(live: Live, undisturbed: list[list[int]]) -> None:
    """The worker's requests move to another one, token for token."""
    asking = ask_several(live, NUM, NUM_TOKENS)
    assert uses_pages(live, "decode-1")
    live.send("decode-1", signal.SIGTERM)
    wait_until(lambda: live.read_log().count('"event": "draining"') == 4)
    live.send("decode-1", signal.SIGTERM)
    live.wait_shown("decode-1 ended with signal SIGTERM; 1 worker is left; it stays ended, as it was asked to")
    assert answers(asking) == undisturbed
    assert live.metric("gateway", "attempts_failed_total") > 0


def test_the_gateway_finishes_answers_and_refuses_requests(live: Live, undisturbed: list[list[int]]) -> None:
    """On SIGTERM `baton serve` stops the gateway first."""
    body = {"model": "baton-demo", "prompt": [7] * 20, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(1) as thread:
        whole = thread.submit(HTTP.post, f"{live.url}/v1/completions", json=body, timeout=2 * WAIT_S)
        asking = ask_several(live, NUM, NUM_TOKENS)
        wait_until(lambda: live.metric("gateway", "num_requests_running") == NUM + 1)
        live.process.send_signal(signal.SIGTERM)
        wait_until(lambda: HTTP.get(f"{live.url}/ready", timeout=WAIT_S).status_code == 503)
        refusal = live.complete()
        assert refusal.status_code == 503 and "draining" in refusal.json()["error"]["message"]
        assert int(refusal.headers["retry-after"]) > 0
        with grpc.insecure_channel(live.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
            request = inference_pb2.GenerateRequest(text="x", max_tokens=1)
            list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=WAIT_S))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert answers(asking) == undisturbed
        assert whole.result().json()["usage"]["completion_tokens"] == NUM_TOKENS
    assert live.process.wait(WAIT_S) == 0
    assert "killed" not in "".join(live.shown)
