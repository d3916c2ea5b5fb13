"""Workers of 1, 2 and 4 ranks hand over to each other in real processes; tokens equal transformers'.

The draft model is a faster copy of the model in 4 bits, so a draft is wrong only where the draft model's KV is. The
first offer of each prompt has a byte changed on its way, the last of a page, which is the draft model's and belongs to
the last rank: it is refused, and the prompt offered again.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import prefill_pb2, prefill_pb2_grpc
from runtime.rpc import open_channel
from tests.support.checkpoints import write_slow_twin, write_tokenizer
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.fleet import Process, ProcessFleet, run_fleet
from tests.support.oracle import Oracle, random_prompt
from tests.support.quantised import write_models
from tests.support.real_workers import Gateway, gateway, packed

VOCAB, PAGE_TOKENS, NUM_TOKENS = 320, 16, 16
RANKS = (1, 4)  # of prefill workers; the model has 4 KV heads
CHANGED = r"refused the offer \(checksum\): page \d+ \(positions .*\) changed on its way by "
NIXL = ("--transport=nixl", "--require-transport", "--nixl-allow-tcp")
READERS: dict[str, tuple[int, str, tuple[str, ...]]] = {  # decode worker |-> its ranks, transport and flags
    "decode-0": (1, "shm", ()),
    "decode-1": (4, "grpc", ("--transport=grpc",)),
    "decode-2": (2, "nixl", NIXL),
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In 4 bits, and the same values in float32."""
    folder = tmp_path_factory.mktemp("draft")
    quantised, plain = write_models(folder, "awq", num_heads=8, num_kv_heads=4, head_dim=16, vocab=VOCAB)
    return write_tokenizer(quantised, VOCAB), write_tokenizer(plain, VOCAB)


@pytest.fixture(scope="module")
def oracle(drafts: tuple[Path, Path]) -> Oracle:
    return Oracle(drafts[1])


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a file per prefill worker: see corrupting_worker.py."""
    return tmp_path_factory.mktemp("changes")


@pytest.fixture(scope="module")
def fleet(drafts: tuple[Path, Path], changes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    draft, plain = drafts
    model = [f"--model={write_slow_twin(plain, tmp_path_factory.mktemp('model'), num_layers=32)}"]
    both = [*model, f"--draft-model={draft}", "--threads=1", "--max-context-tokens=512"]
    flags: dict[str, list[str]] = {
        "gateway": model, "prefill": [*both, "--chunk-tokens=64", "--transport=nixl"],
        "decode": [*both, "--speculate=draft", "--verify-transfers"],
    }  # fmt: skip
    flags |= {f"prefill-{number}": [f"--tp={size}"] for number, size in enumerate(RANKS)}
    flags |= {name: [f"--tp={size}", *own] for name, (size, _transport, own) in READERS.items()}
    names = [f"prefill-{number}" for number in range(len(RANKS))]
    programs = {name: ("tests.faults.corrupting_worker", str(changes / name)) for name in names}
    with run_fleet(
        len(RANKS), len(READERS), flags, lease_s=120.0, heartbeat_s=60.0, programs=programs, forks=True
    ) as running:
        yield running
        assert running.count("decode", "spec_accepted_tokens_total") > 0  # where drafts pay depends on the machine


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
def test_every_pair_gives_the_tokens_of_one_process(
    fleet: ProcessFleet, oracle: Oracle, changes: Path, name: str
) -> None:
    decode, seed = fleet[name], 100 * list(READERS).index(name)

    async def check(opened: Gateway, prefill: Process, prompt: list[int], num_cached: int) -> list[int]:
        handle = len(opened.ends) + 1
        ticket = await opened.reserve(handle, prompt, NUM_TOKENS)
        assert ticket.begin == num_cached
        request = prefill_pb2.RunRequest(request_id=f"r{handle}", prompt=packed(prompt), ticket=ticket)
        (changes / prefill.name).touch()
        async with open_channel(prefill.address) as channel:
            stub = prefill_pb2_grpc.PrefillStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match=CHANGED + READERS[name][1]):
                await stub.Run(request, timeout=PATIENCE_S)
            await stub.Run(request, timeout=PATIENCE_S)
        assert await opened.end_of(handle) == ("length", "")
        tokens = opened.tokens[handle]
        assert tokens == oracle.answer(prompt, NUM_TOKENS, guess=tokens), f"{prefill.name}, {len(prompt)} tokens"
        return tokens

    async def scenario() -> None:
        async with gateway(decode, Signal()) as opened:
            for number in range(len(RANKS)):
                prompt = random_prompt(100, VOCAB, seed + number)
                answer = await check(opened, fleet[f"prefill-{number}"], prompt, 0)
                turn = [*prompt, *answer, *random_prompt(40, VOCAB, seed + 50 + number)]
                num_cached = (len(prompt) + len(answer) - 1) // PAGE_TOKENS * PAGE_TOKENS
                await check(opened, fleet[f"prefill-{number}"], turn, num_cached)

    asyncio.run(asyncio.wait_for(scenario(), 4 * PATIENCE_S))
    _, transport, _ = READERS[name]
    accepted = [line for line in decode.read_log().splitlines() if '"event": "peer accepted"' in line]
    assert len(accepted) == len(RANKS) and all(f'"transport": "{transport}' in line for line in accepted)
    assert decode.metric("offers_refused_total", {"reason": "checksum"}) == 2 * len(RANKS)
    assert decode.metric("spec_draft_tokens_total") == decode.metric("spec_accepted_tokens_total")
