"""Through the whole service, greedy float32 tokens equal transformers': families, odd shapes, two transports.

Alone, and in a batch of 16 that arrive and leave at different times. For the demo model see test_surface_service.py.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.compose import load_any_config
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.families import FAMILIES, IMAGE, LONGROPE_ORIGINAL
from tests.support.gguf_files import write_gguf_models
from tests.support.live import Live, serve_calmly, wait_until
from tests.support.oracle import Oracle, random_prompt
from tests.support.quantised import FORMATS, write_models
from tests.support.surface import Surface
from tests.support.tiny_models import tiny_config, tiny_model

VOCAB = 320
TEXT_VOCAB = IMAGE  # clients may not send ids that stand for images
GGUF_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M")
LENGTHS = (1, 15, 16, 17, 100, 1000)
NIXL_OVER_TCP = ("--nixl-allow-tcp", "--kv-memory-mib=64")
NO_COMPILER = {"CXX": "/nonexistent/c++", "PATH": "/nonexistent"}


@dataclass(frozen=True)
class Way:
    """A model, its pages' transport, and the service's flags."""

    shape: dict[str, Any]
    transport: str  # its name in metrics
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    format: str = ""  # of the weights


# Experts, a GQA ratio of 8, windows. TEST_FAMILIES=1: each native family (`make families`);
# tp: the same on two ranks; fallback: models without native code; formats: quantised weights.
WAYS = {
    "qwen3-experts-gqa8-hd128-shards": Way(
        dict(family="qwen3_moe", num_heads=8, num_kv_heads=1, head_dim=128, shards=2),
        "nixl:tcp", NIXL_OVER_TCP, {"UCX_TLS": "tcp,self"},
    ),
    "gemma3-windows-norms": Way(dict(family="gemma3_text"), "shm", env=NO_COMPILER),
    "latents-two-ranks-to-two-stages": Way(dict(family="deepseek_v3"), "grpc", ("--prefill-tp=2", "--decode-pp=2")),
}  # fmt: skip
TWO_RANKS = ("--prefill-tp=2", "--decode-tp=2")
DIVIDED = ("awq", "gptq4-zeros", "fp8-block", "ct-pack4-zeros", "mxfp4", "gguf-Q4_K_M")  # formats
FALLBACK = (
    "cohere2", "exaone4", "gemma3n_text", "gpt2", "gpt_neox", "granite_swa", "granitemoehybrid", "kimi_linear",
    "nanochat", "nemotron_h", "olmo_hybrid", "opt", "qwen2_moe", "qwen3_next", "vaultgemma",
)  # fmt: skip
if os.environ.get("TEST_FAMILIES") == "fallback":
    WAYS = {name: Way(dict(family=name), "shm") for name in FALLBACK}
elif os.environ.get("TEST_FAMILIES") == "formats":
    names = [*FORMATS, "mxfp4", *(f"gguf-{kind}" for kind in GGUF_KINDS)]
    WAYS = {name: Way(dict(family="llama"), "shm", format=name) for name in names}
    WAYS |= {f"{name}-tp": Way(dict(family="llama"), "shm", TWO_RANKS, format=name) for name in DIVIDED}
elif os.environ.get("TEST_FAMILIES"):
    ranks = TWO_RANKS if os.environ["TEST_FAMILIES"] == "tp" else ()
    WAYS = {name: Way(dict(family=name), "shm", ranks) for name in FAMILIES}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def models(way: Way, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint that is served, and a plain one with the same values."""
    folder = tmp_path_factory.mktemp("model")
    if way.format.startswith("gguf-"):
        return write_gguf_models(folder, way.format.removeprefix("gguf-"))
    if way.format:
        quantised, plain = write_models(folder, way.format)
        return write_tokenizer(quantised, VOCAB), write_tokenizer(plain, VOCAB)
    if (name := way.shape["family"]) in FAMILIES:
        write_checkpoint(folder, vocab=VOCAB, seed=len(way.transport), **way.shape)
    else:
        values = {"vocab_size_per_layer_input": VOCAB, "max_position_embeddings": 2048, "n_positions": 2048}
        tiny_model(tiny_config(name, vocab_size=VOCAB, **values)).save_pretrained(folder)
    return write_tokenizer(folder, VOCAB), folder


@pytest.fixture(scope="module")
def oracle(models: tuple[Path, Path]) -> Oracle:
    return Oracle(models[1])


@pytest.fixture(scope="module")
def live(way: Way, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service of that way. At its end it checks that all KV went by its transport, that workers warned if they had no
    compiler, and that no process is left."""
    flags = ("--dtype=float32", f"--transport={way.transport.split(':')[0]}", "--require-transport", *way.flags)
    env = way.env | ({"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))} if way.env is NO_COMPILER else {})
    with serve_calmly(models[0], *flags, "--chunk-tokens=256", env=env) as service:
        yield service
        service.wait_until_unused()
        read = service.metric("decode-0", "kv_transfer_bytes_total")
        assert read == service.metric("decode-0", "kv_transfer_bytes_total", {"transport": way.transport}) > 0
        assert service.read_log().count("slow attention") == (2 if way.env is NO_COMPILER else 0)
        processes = [Path(f"/proc/{worker['pid']}") for worker in service.status()]
        assert all(map(Path.exists, processes))
    wait_until(lambda: not any(map(Path.exists, processes)))


@pytest.fixture
def surface(live: Live) -> Iterator[Surface]:
    with grpc.insecure_channel(live.grpc_address) as channel:
        yield Surface(channel)


def test_alone(surface: Surface, oracle: Oracle, way: Way) -> None:
    for length in LENGTHS:
        if length + 20 <= LONGROPE_ORIGINAL and way.shape["family"] == "phi4_mini":
            continue  # transformers has other frequencies there
        prompt = random_prompt(length, TEXT_VOCAB, seed=length)
        answer = surface.answer(prompt, max_tokens=20)
        assert answer == oracle.answer(prompt, 20, guess=answer), f"prompt of {length} tokens"


def until_image(answer: list[int]) -> list[int]:
    """With the first id that stands for images, if the model writes one: transformers reads it as padding then."""
    return answer[: answer.index(IMAGE) + 1] if IMAGE in answer else answer


def test_in_a_batch_of_mixed_lengths(surface: Surface, oracle: Oracle, live: Live, way: Way) -> None:
    """Each of 16 requests starts once an earlier one has its first tokens, so the batch keeps changing."""
    least = LONGROPE_ORIGINAL + 1 if way.shape["family"] == "phi4_mini" else 1  # see above
    prompts = [random_prompt(least + 37 * index % 211, TEXT_VOCAB, seed=1000 + index) for index in range(16)]
    gates = [threading.Event() for _ in range(len(prompts) + 1)]

    def run(index: int) -> list[int]:
        gates[index // 4].wait(30)
        answer = surface.answer(prompts[index], max_tokens=5 + 3 * index)
        gates[index // 4 + 1].set()
        return answer

    gates[0].set()
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(run, range(len(prompts))))
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = oracle.answer(prompt, 5 + 3 * index, guess=answer)
        assert until_image(answer) == until_image(expected), f"request {index} of {len(prompt)} prompt tokens"
    assert live.metric("decode-0", "prompt_tokens_total") == 0, "decode prefilled something by itself"


def test_cached_and_four_at_once(surface: Surface, oracle: Oracle) -> None:
    """Four answers to one prompt, the prompt again, and a next turn that continues an answer."""
    prompt = random_prompt(100, TEXT_VOCAB, seed=77)
    first = surface.ask(prompt, max_tokens=40, n=4)
    expected = oracle.answer(prompt, 40, guess=first[0].tokens)
    assert [one.tokens for one in first] == [expected] * 4 and not first[0].timing.cached_tokens
    again = surface.ask_one(prompt, max_tokens=40)
    assert again.tokens == expected and again.timing.cached_tokens == 96
    turn = [*prompt, *expected, *random_prompt(30, TEXT_VOCAB, seed=78)]
    answer = surface.ask_one(turn, max_tokens=20)
    assert answer.tokens == oracle.answer(turn, 20, guess=answer.tokens)
    assert answer.timing.cached_tokens >= 96


def test_status_has_what_a_token_takes_beside_what_its_heads_would(
    surface: Surface, live: Live, models: tuple[Path, Path]
) -> None:
    """Every worker says it, with any number of ranks."""
    surface.answer(random_prompt(40, TEXT_VOCAB, seed=79), max_tokens=2)
    shapes = load_any_config(models[1]).attention_shapes
    heads = 4 * sum(shape.num_heads * sum(shape.expanded) for shape in shapes)
    kept = 4 * sum(shape.kept_numbers for shape in shapes)
    for worker in live.status():
        assert worker["head_token_bytes"] == heads
        ranks = worker["ranks"]
        own = [max(shape.num_kv_heads // ranks, 1) * shape.kept_numbers // shape.num_kv_heads for shape in shapes]
        assert worker["kv_token_bytes"] in ({kept} if heads else {kept, kept // ranks, 4 * sum(own)})
