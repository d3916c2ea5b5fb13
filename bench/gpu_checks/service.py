"""The whole ring on the device, in real processes: tokens, hand-off, and the death of workers."""

import os
import signal
import threading
import time
from contextlib import AbstractContextManager

import grpc
import torch

from bench.gpu_checks.engine import NUM_TOKENS, PROMPT, find_regret, reference_tokens
from bench.live import Live, serve
from demo.paths import TARGET_DIR
from protos import inference_pb2, inference_pb2_grpc

ANSWER_S = 120.0
RUNS = {"cuda": (("grpc", "float32"), ("cuda_ipc", "bfloat16")), "cpu": (("shm", "float32"),)}
MOST_REGRET = 0.5  # of a log-probability, that bfloat16 may cost
NUM_ROUNDS = 12  # requests in parallel while workers die


def check_service(device: torch.device) -> str:
    """transformers' tokens through every transport that the device has; in bfloat16 tokens nearly as likely."""
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


def serve_demo(device: torch.device, *flags: str) -> AbstractContextManager[Live]:
    """Serve the demo model without its draft model."""
    shares = ("--gpu-memory-share=0.2", "--prefill-workers=1") if device.type == "cuda" else ()
    return serve(TARGET_DIR, "--draft-model=none", f"--device={device.type}", *shares, *flags)


def ask(live: Live, salt: str) -> list[int]:
    """The greedy answer to PROMPT. The salt keeps its KV out of caches."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True,
        cache_salt=salt,
    )  # fmt: skip
    with grpc.insecure_channel(live.grpc_address) as channel:
        parts = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=ANSWER_S))
    return [token for part in parts for token in part.token_ids]
