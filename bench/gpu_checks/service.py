"""The whole ring on the device, in real processes: tokens, hand-off, and the death of workers."""

import os
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import grpc
import torch

from bench.gpu_checks.engine import MOST_REGRET, NUM_TOKENS, PROMPT, find_regret, reference_tokens
from demo.paths import TARGET_DIR
from tests.support.fleet import find_ranks_of
from tests.support.live import Live, serve
from tests.support.surface import Surface, Told

ANSWER_S = 120.0
RUNS = {"cuda": (("grpc", "float32"), ("cuda_ipc", "bfloat16")), "cpu": (("shm", "float32"),)}
NUM_TIMED = 64  # tokens of an answer
NUM_ROUNDS = 12  # requests in parallel while workers die


def check_defaults(device: torch.device) -> str:
    """`baton serve` without flags: tokens nearly as likely as transformers', TPOT by one client and by eight"""
    with serve(TARGET_DIR, hands_over=False) as live:
        if device.type == "cuda" and torch.cuda.device_count() == 1:
            assert "prefill-0" not in live.pids, "one GPU has two workers"
        regret = find_regret(ask(live, ""))
        assert regret <= MOST_REGRET, f"a token is less likely than the best by {regret:.2g}"
        tpots = []
        for count in (1, 8):
            with ThreadPoolExecutor(count) as threads:
                timings = list(threads.map(lambda salt: ask_timed(live, f"{salt}").timing, range(count)))
            tpots.append(statistics.median(one.decode_seconds / (NUM_TIMED - 1) for one in timings) * 1e3)
        workers = " and ".join(sorted(live.pids.keys() - {"gateway"}))
        drafts = sum(one.draft_tokens for one in timings)
    return f"{workers}: TPOT {tpots[0]:.2f} ms, {tpots[1]:.2f} with eight, {drafts} drafts; regret {regret:.2g}"


def check_service(device: torch.device) -> str:
    """Two workers on one GPU: transformers' tokens by each of its transports; in bfloat16 nearly as likely ones"""
    found = []
    for transport, dtype in RUNS[device.type]:
        with serve_demo(device, f"--dtype={dtype}", f"--transport={transport}", "--require-transport") as live:
            regret = find_regret(ask(live, ""))
            allowed = 0 if dtype == "float32" else MOST_REGRET
            assert regret <= allowed, f"{transport}, {dtype}: a token is less likely than the best by {regret:.2g}"
            moved = live.metric("decode-0", "kv_transfer_bytes_total")
            assert moved, f"{transport}: no KV was handed over"
            live.wait_until_unused()
            found.append(f"{transport}, {dtype}: {moved:.0f} bytes handed over, regret {regret:.2g}")
    return "; ".join(found)


def check_deaths(device: torch.device) -> str:
    """Both workers are killed in turn while requests run: every answer is whole and right."""
    transport, expected = "cuda_ipc" if device.type == "cuda" else "shm", reference_tokens()
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            for turn in range(3):
                if ask(live, f"{number} {turn}") != expected:
                    wrong.append(f"request {number}: other tokens")
        except (grpc.RpcError, AssertionError) as error:
            wrong.append(f"request {number}: {error}")

    with serve_demo(device, "--dtype=float32", f"--transport={transport}", "--patience-s=120") as live:
        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(NUM_ROUNDS)]
        for thread in threads:
            thread.start()
        for name in ("prefill-0", "decode-0"):
            time.sleep(0.3)
            os.kill(live.pids[name], signal.SIGKILL)
        for thread in threads:
            thread.join(2 * ANSWER_S)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
        assert not wrong, wrong[0]
        live.wait_until_unused()
    return f"{3 * NUM_ROUNDS} answers equal although both workers were killed ({transport})"


def check_ranks(device: torch.device) -> str:
    """A worker of two ranks: transformers' tokens, also in graphs (bfloat16), and after the death of a rank"""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return "skipped: one GPU"
    found = []
    for dtype in ("float32", "bfloat16") if device.type == "cuda" else ("float32",):
        flags = ("--prefill-workers=0", "--decode-tp=2", f"--dtype={dtype}", "--patience-s=120")
        with serve(TARGET_DIR, "--draft-model=none", f"--device={device.type}", *flags) as live:
            for turn in range(2):
                regret = find_regret(ask(live, f"{turn}"))
                allowed = 0 if dtype == "float32" else MOST_REGRET
                assert regret <= allowed, f"{dtype}: a token is less likely than the best by {regret:.2g}"
                if not turn:
                    (rank,) = find_ranks_of(live.pids["decode-0"])
                    os.kill(rank, signal.SIGKILL)
            live.wait_until_unused()
            found.append(f"{dtype}: regret {regret:.2g}")
    return f"{', '.join(found)}, before and after a rank was killed"


def serve_demo(device: torch.device, *flags: str) -> AbstractContextManager[Live]:
    """Serve the demo model without its draft model."""
    shares = ("--gpu-memory-share=0.2", "--prefill-workers=1") if device.type == "cuda" else ()
    return serve(TARGET_DIR, "--draft-model=none", f"--device={device.type}", *shares, *flags)


def ask(live: Live, salt: str) -> list[int]:
    """The greedy answer to PROMPT. The salt keeps its KV out of caches."""
    return ask_timed(live, salt, NUM_TOKENS).tokens


def ask_timed(live: Live, salt: str, num_tokens: int = NUM_TIMED) -> Told:
    """The same, of any length, with what the service says of it."""
    with grpc.insecure_channel(live.grpc_address) as channel:
        return Surface(channel, ANSWER_S).ask_one(PROMPT, max_tokens=num_tokens, cache_salt=salt)
