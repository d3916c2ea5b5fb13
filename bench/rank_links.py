"""Transfer speed of a prompt's pages between workers of one and two ranks: real workers, all transports.

    python -m bench.rank_links [--rounds 7] [--tokens 2048]

All workers run at once, and pairs take turns. A decode worker's ranks read in parallel, each its own heads.
"""

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from demo.paths import TARGET_DIR
from demo.shapes import llama_config, new_model
from protos import prefill_pb2, prefill_pb2_grpc
from runtime.rpc import new_incarnation, open_channel
from tests.support.fake_workers import Signal
from tests.support.fleet import ProcessFleet, run_fleet
from tests.support.real_workers import Gateway, gateway, packed

VOCAB = 1024
READERS: Mapping[str, Sequence[str]] = {
    "shm": ("--transport=shm",),
    "nixl": ("--transport=nixl", "--nixl-allow-tcp"),
    "grpc": ("--transport=grpc",),
}
WAYS = ((1, 1), (2, 1), (1, 2), (2, 2))  # (ranks of prefill, of decode)
CALL_S = 120.0
NUM_WARM = 3
PREFILL = {1: "prefill-0", 2: "prefill-1"}  # ranks |-> worker
DECODE = {(name, size): f"decode-{2 * i + size - 1}" for i, name in enumerate(READERS) for size in (1, 2)}


async def hand_over(
    decode: Gateway, prefill: prefill_pb2_grpc.PrefillStub, handle: int, num_tokens: int
) -> prefill_pb2.RunResponse:
    """Transfer a prompt that is not cached."""
    prompt, salt = [number % (VOCAB - 10) + 5 for number in range(num_tokens)], new_incarnation()
    ticket = await decode.reserve(handle, prompt, 1, cache_salt=salt)
    run = prefill_pb2.RunRequest(request_id=str(handle), prompt=packed(prompt), ticket=ticket, cache_salt=salt)
    response: prefill_pb2.RunResponse = await prefill.Run(run, timeout=CALL_S)
    return response


async def measure(fleet: ProcessFleet, num_rounds: int, num_tokens: int) -> None:
    """Prints the table."""
    rates: dict[tuple[tuple[int, int], str], list[float]] = {}
    transports: dict[str, str] = {}
    for number in range(num_rounds + NUM_WARM):
        for index, (way, name) in enumerate((way, name) for way in WAYS for name in READERS):
            prefill, decode = fleet[PREFILL[way[0]]], fleet[DECODE[name, way[1]]]
            async with gateway(decode, Signal()) as opened, open_channel(prefill.address) as channel:
                handle = number * 100 + index
                done = await hand_over(opened, prefill_pb2_grpc.PrefillStub(channel), handle, num_tokens)
            if number >= NUM_WARM:
                rates.setdefault((way, name), []).append(done.transfer_bytes / done.transfer_seconds / 1e9)
            transports[name] = done.transport
            mebibytes = done.transfer_bytes / 2**20
    print(f"GB/s of {mebibytes:g} MiB, medians of {num_rounds} rounds")
    print("| ranks | " + " | ".join(transports.values()) + " |\n" + "|---" * (len(transports) + 1) + "|")
    for way in WAYS:
        print(f"| {way[0]} → {way[1]} | " + " | ".join(f"{median(rates[way, name]):.2f}" for name in READERS) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = llama_config(width=64, inner=64, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=VOCAB)
        new_model(shape, seed=0).save_pretrained(Path(folder))  # 512 KiB per page, and little else
        shutil.copy(TARGET_DIR / "tokenizer.json", folder)
        model = [f"--model={folder}", "--draft-model=none", "--max-running=4"]
        flags = {
            "prefill": [*model, f"--chunk-tokens={arguments.tokens}", "--transport=nixl"],
            "decode": model, PREFILL[2]: ["--tp=2"],
        }  # fmt: skip
        for (name, size), worker in DECODE.items():
            flags[worker] = [*READERS[name], "--require-transport", f"--tp={size}"]
        memory = {"prefill": 144, "decode": 144}  # small, so that NUM_WARM rounds touch all of it
        with run_fleet(2, len(DECODE), flags, lease_s=60.0, heartbeat_s=30.0, kv_memory_mib=memory) as fleet:
            asyncio.run(measure(fleet, arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
