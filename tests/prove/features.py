"""All that clients can ask for, with prompts handed over and without: equal answers, whole and streamed.

The requests are those of tests/corpus, with a salt each so that no page is cached; one service hands each prompt over,
the other has no prefill worker.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from protos import inference_pb2
from tests.corpus.__main__ import differences, record_http, record_rpc
from tests.corpus.cases import Case, build_cases
from tests.corpus.services import Service, write_model
from tests.prove.report import Report
from tests.support.asking import Asking
from tests.support.fault_answers import prompt_of
from tests.support.live import HAND_OFF_FLAGS, Live, serve_calmly
from tests.support.lora import write_adapter

TITLE = "asked for"
FLAGS = ("--dtype=float32", "--max-context-tokens=512", "--served-name=demo")
CLIENTS = 4
ADAPTER = "tuned"
FEATURES: Mapping[str, str] = {  # |-> names of cases in tests/corpus/cases.txt
    "text, turns, system": "sum|poem|capital|extract|parts|turns|system.*|developer|open|texts|ids|id-lists|messages",
    "seeds, temperature, filters": "full|sampled.*|min-p|top-k.*|seed.*",
    "penalties": "penalt.*",
    "logit_bias": "bias.*",
    "min_tokens, ignore_eos": "min-tokens|min-above-max|ignore-eos",
    "stop strings and tokens": "stop.*",
    "n": "n|n-5|thinks-n|echo-n",
    "log-probabilities": "logprobs.*|.*-logprobs",
    "echo": "echo.*",
    "grammars": "json.*|schema.*|regex.*|grammar.*|choice.*|form.*|forms",
    "tools": "weather.*|tools.*|calls|required|any|none|named|custom.*|auto.*",
    "reasoning": "think.*|effort.*",
    "speculation": "drafts.*",
    "priority": "priority.*|deadline.*",
}
LORA = "sum|poem|n|logprobs|stop|regex|sampled"  # the same with an adapter as the model
POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "Generate", "Chat")
SAYS_WHY = re.compile(r"\.timing\.prefill_reason: ")  # why a prompt was not handed over
NUM_CANCELLED = 8


@dataclass
class Twin:
    """One of the two services."""

    live: Live
    channel: grpc.Channel

    def answer(self, case: Case) -> dict[str, Any]:
        service = Service("plain", self.live.addresses["gateway"], self.live.grpc_address)
        return record_rpc(service, self.channel, case) if case.method == "rpc" else record_http(service, case)

    def num_offers(self) -> float:
        """Offers that its decode worker has read."""
        return self.live.metric("decode-0", "offers_accepted_total")


def build_features() -> dict[str, list[Case]]:
    """The requests of each feature; each finds no page of another one's prompt."""
    salts = count()
    known = [case for case in build_cases("plain") if case.method in ("POST", "rpc") and ": " not in case.name]
    found: dict[str, list[Case]] = {}
    for feature, names in {**FEATURES, "LoRA": LORA}.items():
        for case in known:
            path, _, name = case.name.partition(" ")
            if path in POSTS and re.fullmatch(names, name.removesuffix(" streamed")):
                own = {"cache_salt": f"proof {next(salts)}", **({"model": ADAPTER} if feature == "LoRA" else {})}
                found.setdefault(feature, []).append(replace(case, body=change_body(case, own)))
    return found


def change_body(case: Case, fields: Mapping[str, str]) -> bytes:
    assert case.body is not None
    if case.method == "POST":
        return json.dumps({**json.loads(case.body), **fields}).encode()
    message = getattr(inference_pb2, f"{case.path.rpartition('/')[2]}Request").FromString(case.body)
    for name, value in fields.items():
        setattr(message, name, value)
    return bytes(message.SerializeToString())


def prove_features(report: Report, features: Mapping[str, list[Case]]) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(folder / "model", reasons=True)
        write_adapter(folder / ADAPTER, model, "llama", seed=1)
        twins = []
        for flag in (*HAND_OFF_FLAGS, "--prefill-workers=0"):
            flags = (*FLAGS, f"--lora={ADAPTER}={folder / ADAPTER}", flag)
            live = stack.enter_context(serve_calmly(model, *flags, forks=False))
            twins.append(Twin(live, stack.enter_context(grpc.insecure_channel(live.grpc_address))))
        clients = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        for feature, cases in features.items():
            before = [twin.num_offers() for twin in twins]
            num_answered = compare(report, feature, cases, twins, clients)
            offers = [twin.num_offers() - number for twin, number in zip(twins, before, strict=True)]
            is_apart = offers[0] >= num_answered > 0 == offers[1]
            report.require(is_apart, f"{feature}: {offers} offers of {num_answered} requests with an answer")
        prove_cancels(report, twins)


def compare(report: Report, feature: str, cases: list[Case], twins: list[Twin], clients: ThreadPoolExecutor) -> int:
    """Ask both services. Returns how many requests got an answer; others are refused by both in the same words."""
    pairs = list(clients.map(lambda case: [twin.answer(case) for twin in twins], cases))
    equal, num_wrong = Counter[str](), 0
    for case, (one, other) in zip(cases, pairs, strict=True):
        places = [place for place in differences(one, other, "") if not SAYS_WHY.search(place)]
        is_equal = report.answered(not places, f"{feature}, {case.name}: {places[:3]}")
        num_wrong += not is_equal
        equal["streamed" if case.method == "rpc" or case.name.endswith(" streamed") else "whole"] += is_equal
    for column in ("whole", "streamed"):
        report.put(TITLE, feature, column, f"{equal[column]} equal")
    report.put(TITLE, feature, "streamed", f"{num_wrong} WRONG" if num_wrong else "")
    return sum(one["status"] in (200, "OK") for one, _ in pairs)


def prove_cancels(report: Report, twins: list[Twin]) -> None:
    """Clients that leave at once, or after some tokens: these are the answer's, and no page stays used."""
    wanted = Asking(twins[1].live.grpc_address, prompt_of(300), 120).answer()
    for twin in twins:
        for number in range(NUM_CANCELLED):
            asking = Asking(twin.live.grpc_address, prompt_of(300), 120, cache_salt=f"cancel {number}")
            asking.wait_for_tokens(number * 8)
            asking.cancel()
            tokens = asking.finish().tokens
            report.answered(tokens == wanted[: len(tokens)], f"cancel: tokens {tokens}, not {wanted}")
        twin.live.wait_until_unused()
    report.put(TITLE, "cancel", "streamed", f"{NUM_CANCELLED} equal, no page stays used")
