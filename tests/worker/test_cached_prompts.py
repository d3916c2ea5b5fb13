"""What a worker need not compute again: real services and loops, with a runner instead of a model."""

import asyncio
import time

import numpy as np

from decode_worker.interfaces import Drafts, Masks
from decode_worker.metrics import DecodeMetrics
from decode_worker.step_extras import DraftsAndMasks
from protos import decode_pb2, worker_pb2
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.handover import OTHER, PROMPT, answer, used, workers
from tests.support.real_workers import (
    NUM_PAGES,
    PAGE_TOKENS,
    VOCAB,
    DecodeWorker,
    PrefillWorker,
    build_kv_engine,
    decode_worker,
    expected_answer,
    gateway,
    packed,
)
from wire.page_keys import page_keys
from worker.kv_cache import KVCacheManager
from worker.loop import WorkerLoop
from worker.params import SequenceParams
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import Phase, Update

CACHED, END = 20, 22  # of PROMPT: five whole pages; two more positions, without the last
BEGUN_ALIKE = [*PROMPT[:8], *OTHER[8:]]  # shares two pages with PROMPT


def count(worker: PrefillWorker | DecodeWorker, name: str) -> float:
    found = worker.metrics.registry.get_sample_value(f"baton:{name}_total")
    assert found is not None, name
    return found


async def test_only_what_decode_lacks_is_offered_and_only_what_prefill_lacks_is_computed() -> None:
    async with workers() as (opened, prefill, decode):
        await opened.reserve(1, PROMPT, local=99)  # decode computes it; prefill has never seen it
        assert await opened.end_of(1) == ("length", "")
        for handle, prompt, num_cached in ((2, BEGUN_ALIKE, 0), (3, [*PROMPT[:8], *PROMPT[9:], 1], 8)):
            computed = count(prefill, "prompt_tokens")
            reserved = await opened.ask(handle, prompt)
            assert (reserved.ticket.begin, reserved.needs_prefill) == (8, True)
            told = await prefill.run(reserved.ticket, prompt)
            assert told.cached_tokens == num_cached
            assert told.transfer_bytes == 4 * decode.pool.page_bytes, "positions [8, 22)"
            assert count(prefill, "prompt_tokens") == computed + END - num_cached
            assert await opened.end_of(handle) == ("length", "")
            assert opened.tokens[handle] == expected_answer(prompt, 4)


async def test_prompts_whose_log_probabilities_are_told_are_computed_whatever_is_cached() -> None:
    async with workers() as (opened, prefill, _decode):
        told = await prefill.run(await opened.reserve(2, OTHER), OTHER, num_prompt_logprobs=0)
        again = await prefill.run(await opened.reserve(3, OTHER, cache_salt="x"), OTHER, num_prompt_logprobs=0)
        assert len(told.prompt_logprobs) == END and told.prompt_logprobs == again.prompt_logprobs
        assert again.cached_tokens == 0
        await opened.reserve(4, OTHER, local=99, num_prompt_logprobs=0)
        assert await opened.end_of(4) == ("length", "")
        assert list(opened.told[4].prompt_logprobs) == list(told.prompt_logprobs)
        assert opened.told[4].timing.cached_tokens == 0
        for handle in (2, 3, 4):
            await opened.end_of(handle)
            assert opened.tokens[handle] == expected_answer(OTHER, 4)


async def test_metrics_and_status_tell_what_was_found() -> None:
    async with workers() as (opened, prefill, decode):
        for handle in (1, 2, 3):
            await answer(opened, prefill, handle)
        for handle in (4, 5):
            await answer(opened, prefill, handle, OTHER[:3])
        status: worker_pb2.WorkerStatus = await opened.worker.Status(worker_pb2.StatusRequest())
        queries, hits = 3 * END + 2 * 2, 2 * CACHED
        assert (status.prefix_queries, status.prefix_hits) == (queries, hits)
        assert (count(decode, "prefix_cache_queries"), count(decode, "prefix_cache_hits")) == (queries, hits)
        # 26 tokens of each long sequence have KV, 6 of each short one: the first to complete a page names it
        assert status.cached_pages == 6 + 1
        assert (status.free_pages, status.used_pages) == (NUM_PAGES, 0), "cached pages count as free"
        assert decode.metrics.registry.get_sample_value("baton:kv_cache_cached_pages") == 7
        status = await prefill.worker.Status(worker_pb2.StatusRequest())
        assert (status.prefix_queries, status.prefix_hits) == (END + 2 * 2, 0)
        await opened.signal.until(lambda: used(prefill) == 0)
        assert (await prefill.worker.Status(worker_pb2.StatusRequest())).cached_pages == 5


async def test_a_long_prompt_holds_the_event_loop_little_longer_than_its_pages_keys_take() -> None:
    """In CPU time of its thread: others may have the core meanwhile."""
    num_tokens = 128 << 10
    num_pages = num_tokens // PAGE_TOKENS + 2
    prompt = (np.arange(num_tokens) % VOCAB).tolist()
    longest = {"reserve": float("inf"), "keys": float("inf")}

    signal = Signal()
    built = build_kv_engine(num_pages=num_pages, context_tokens=num_tokens + 8)
    async with decode_worker(signal, built=built) as decode, gateway(decode, signal) as opened:
        for handle in range(1, 6):
            began = time.thread_time()
            list(page_keys(b"", packed(prompt), PAGE_TOKENS))
            longest["keys"] = min(longest["keys"], time.thread_time() - began)
            request = decode_pb2.ReserveRequest(
                gateway="g", handle=handle, prompt=packed(prompt), max_tokens=4,
                sampling=decode_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
            )  # fmt: skip
            call = asyncio.ensure_future(opened.stub.Reserve(request))
            gap, last = 0.0, time.thread_time()
            while not call.done():
                await asyncio.sleep(0)
                now = time.thread_time()
                gap, last = max(gap, now - last), now
            assert (await call).needs_prefill
            longest["reserve"] = min(longest["reserve"], gap)
            await opened.abort(handle)
    assert longest["reserve"] < 3 * longest["keys"]


def test_prompt_log_probabilities_are_all_told_when_cached_pages_overtake_them() -> None:
    engine, _runner = build_kv_engine()
    scheduler = Scheduler(KVCacheManager(PrefixCache(NUM_PAGES, engine.pool.generations), PAGE_TOKENS), 8, PATIENCE_S)
    told: list[Update] = []
    loop = WorkerLoop(
        DraftsAndMasks(Drafts(), Masks(), scheduler), scheduler, engine.runner, engine.rows,
        engine.pool, TokenBudget(1, "--local-prefill-chunk-tokens"), lambda _step, updates: told.extend(updates),
        DecodeMetrics(scheduler),
    )  # fmt: skip
    prompt = [*PROMPT, *OTHER[:17]]
    scheduler.admit(SequenceParams("older", packed(prompt), 39, 40), 0.0)
    newer = scheduler.admit(SequenceParams("newer", packed(prompt), 39, 4, num_prompt_logprobs=0), 0.0)
    scored_when_preempted = 0
    while loop.step():
        if newer.phase is Phase.PREEMPTED:
            scored_when_preempted = newer.scored
        scheduler.check()
    assert 1 < scored_when_preempted < 36, "scoring stopped before the other sequence's pages end"
    mine = [update for update in told if update.sequence is newer]
    assert mine[-1].finish_reason == "length", mine[-1].error
    assert [token for update in mine for token in update.token_ids] == expected_answer(prompt, 4)
    assert len([one for update in mine for one in update.prompt_logprobs]) == 39
