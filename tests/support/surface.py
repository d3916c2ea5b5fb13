"""The public gRPC API as a function from a request's fields to its choices, and the service that tests share."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from demo.paths import DRAFT_DIR, TARGET_DIR
from engine.catalogue import load_config
from protos import inference_pb2, inference_pb2_grpc
from tests.support.live import Live

PAGE_TOKENS = 16
CLIENT_S = 110.0
MODEL = "baton-demo"
VOCAB = 300  # of random prompts
CHUNK = 64  # prompt tokens per step
RANKS = int(os.environ.get("TEST_RANKS", "1"))  # of both workers; no test's expectations depend on it
DEMO_FLAGS = ("--dtype=float32", f"--chunk-tokens={CHUNK}", f"--prefill-tp={RANKS}", f"--decode-tp={RANKS}")


@dataclass
class Told:
    """One choice, as received so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    timing: inference_pb2.Timing = field(default_factory=inference_pb2.Timing)


class Surface:
    """Usable from any thread."""

    def __init__(self, channel: grpc.Channel, timeout_s: float = CLIENT_S) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._timeout_s = timeout_s

    def start(self, prompt: Sequence[int], metadata: Any = (), **fields: Any) -> Any:
        """Start the call, greedy and ignoring end tokens unless overridden."""
        fields = {"temperature": 0, "ignore_eos": True, "include_timing": True, **fields}
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), **fields)
        return self._stub.Generate(request, timeout=self._timeout_s, metadata=metadata)

    def ask(self, prompt: Sequence[int], **fields: Any) -> list[Told]:
        """All choices, complete."""
        choices = [Told() for _ in range(fields.get("n", 1))]
        for response in self.start(prompt, **fields):
            take(choices, response)
        return choices

    def ask_one(self, prompt: Sequence[int], **fields: Any) -> Told:
        """The only choice."""
        (choice,) = self.ask(prompt, **fields)
        return choice

    def answer(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        """Its token ids."""
        return self.ask_one(prompt, **fields).tokens


def take(choices: Sequence[Told], response: inference_pb2.GenerateResponse) -> None:
    """Add one message to its choice."""
    told = choices[response.index]
    assert not told.finish_reason, "something follows the end"
    told.text += response.text
    told.tokens.extend(response.token_ids)
    told.logprobs.extend(response.logprobs)
    told.finish_reason = response.finish_reason
    if response.HasField("timing"):
        told.timing = response.timing


def page_bytes(*folders: Path) -> int:
    """Page size of these models in float32: the model's KV and the draft model's."""
    configs = [load_config(folder) for folder in folders or (TARGET_DIR, DRAFT_DIR)]
    elements = sum(config.num_layers * 2 * config.num_kv_heads * config.head_dim for config in configs)
    return elements * PAGE_TOKENS * 4


def transferred_bytes(num_prompt: int, num_ranks: int = RANKS) -> int:
    """Bytes moved by a prompt's hand-off: whole pages, for all positions except the last token's.

    `num_ranks`: at most two; each rank has the draft model's one KV head.
    """
    all_page_bytes = page_bytes() + (num_ranks - 1) * page_bytes(DRAFT_DIR)
    return -(-(num_prompt - 1) // PAGE_TOKENS) * all_page_bytes


def num_prefilled(live: Live) -> float:
    """Prompt positions computed, over all workers."""
    return sum(live.metric(name, "prompt_tokens_total") for name in live.metrics_urls if name != "gateway")
