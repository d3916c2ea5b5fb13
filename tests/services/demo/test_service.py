"""The demo model through the whole service, as users see it."""

import json
import time
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest

from cli.main import app
from tests.support.live import HTTP, Live, read_families, wait_until
from tests.support.oracle import random_prompt
from tests.support.surface import MODEL, PAGE_TOKENS, VOCAB, Surface, num_prefilled, transferred_bytes

ROOT = Path(__file__).parents[3]
PROCESSES = ["gateway", "prefill-0", "decode-0"]


@pytest.fixture(scope="module")
def client(demo: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def test_the_page_s_examples_are_answered_well(client: openai.OpenAI, demo: Live) -> None:
    """The four prompts that the page offers: a newcomer's first impression."""
    examples = HTTP.get(f"{demo.url}/page/examples.json").json()
    asked = [client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": one}], temperature=0)
             for one in examples]  # fmt: skip
    sums, capital, poem, extracted = [one.choices[0].message.content or "" for one in asked]
    assert "42" in sums and "Paris" in capital and "\n" in poem
    assert json.loads(extracted) == {"name": "Anna", "age": 31}


def test_baton_bench(demo: Live, tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    words = ["bench", "serve", "--url", demo.url, "--dataset", "lengths:30,5", "--concurrency", "1,2"]
    assert app([*words, "--num-requests", "4", "--save", str(saved)]) == 0
    result = json.loads(saved.read_text())
    assert result["server"]["kind"] == "baton"
    for level in result["levels"]:
        assert (level["completed"], level["total_input_tokens"], level["total_output_tokens"]) == (4, 120, 20)
        assert 0 < level["mean_decode_ms"] <= level["mean_e2el_ms"]


@pytest.mark.parametrize("name", PROCESSES)
def test_every_metric_is_documented_and_histograms_begin_at_a_millisecond(demo: Live, name: str) -> None:
    documented = (ROOT / "docs/API.md").read_text(encoding="utf-8").partition("## Metrics")[2]
    families = list(read_families(demo.metrics_urls[name]))
    names = {one.name.removeprefix("baton:") + ("_total" if one.type == "counter" else "") for one in families}
    names = {name for name in names if not name.endswith("_created")}  # added by the library: a counter's start
    assert len(names) > 5 and not [name for name in names if f"`{name}" not in documented]
    bounds = {
        one.name: min(float(sample.labels["le"]) for sample in one.samples if sample.name.endswith("_bucket"))
        for one in families
        if one.type == "histogram"
    }
    assert len(bounds) > 2 and set(bounds.values()) == {0.001}, bounds


def test_a_request_is_measured_by_all_that_serve_it(demo: Live) -> None:
    """Prefill computes all pages, and decode reads them."""
    before, started = _measured(demo), time.monotonic()
    body = {"model": MODEL, "prompt": random_prompt(100, VOCAB, seed=6006), "max_tokens": 400, "ignore_eos": True}
    HTTP.post(f"{demo.url}/v1/completions", json=body, timeout=60).raise_for_status()
    wall_s = time.monotonic() - started
    wait_until(lambda: _measured(demo)["prefilled"] > before["prefilled"])
    moved = {name: value - before[name] for name, value in _measured(demo).items()}
    once = ("queued", "first tokens", "requests", "answered", "queued at prefill", "prefilled")
    assert {name: moved[name] for name in once} == dict.fromkeys(once, 1), moved
    assert moved["bytes read"] == transferred_bytes(100)
    assert (moved["prompt at prefill"], moved["prompt at decode"], moved["generated"]) == (99, 0, 400), moved
    assert 0 < moved["tokens apart"] <= 399, "tokens that arrive with the first have no gap"
    assert 1 <= moved["offers at prefill"] == moved["offers at decode"] == moved["reads"], moved
    assert 0 < moved["s to first token"] <= moved["s in all"] <= wall_s, moved
    assert 0 < moved["s of prefill"] <= wall_s and 0 < moved["s of reads"] <= wall_s, moved


MEASURED = {  # which sample of a process reports what
    "gateway": {
        "queued": "request_queue_time_seconds_count", "first tokens": "time_to_first_token_seconds_count",
        "tokens apart": "inter_token_latency_seconds_count", "requests": "e2e_request_latency_seconds_count",
        "s to first token": "time_to_first_token_seconds_sum", "s in all": "e2e_request_latency_seconds_sum",
    },
    "prefill-0": {
        "queued at prefill": "request_queue_time_seconds_count", "prefilled": "request_prefill_time_seconds_count",
        "s of prefill": "request_prefill_time_seconds_sum", "offers at prefill": "offers_accepted_total",
        "prompt at prefill": "prompt_tokens_total",
    },
    "decode-0": {
        "reads": "kv_transfer_seconds_count", "s of reads": "kv_transfer_seconds_sum",
        "offers at decode": "offers_accepted_total", "prompt at decode": "prompt_tokens_total",
        "generated": "generation_tokens_total", "bytes read": "kv_transfer_bytes_total",
    },
}  # fmt: skip


def _measured(live: Live) -> dict[str, float]:
    found = {mine: live.metric(name, sample) for name, samples in MEASURED.items() for mine, sample in samples.items()}
    return found | {"answered": live.metric("gateway", "request_success_total", {"finished_reason": "length"})}


@pytest.mark.parametrize("stage", ["first token", "middle"])
def test_leaving_client_frees_its_pages(demo: Live, stage: str) -> None:
    before = demo.metric("decode-0", "generation_tokens_total"), _cancelled(demo, "decode-0", "active")
    body = {"model": MODEL, "prompt": random_prompt(600, VOCAB, seed=2), "max_tokens": 3000, "ignore_eos": True}
    with HTTP.stream("POST", f"{demo.url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        events = (line for line in response.iter_lines() if line.startswith("data:"))
        for _ in range(1 if stage == "first token" else 20):
            next(events)
        assert demo.metric("decode-0", "kv_cache_used_pages") > 0
    demo.wait_until_unused(timeout_s=60)
    assert demo.metric("decode-0", "generation_tokens_total") < before[0] + 3000, "the answer ended by itself"
    wait_until(lambda: _cancelled(demo, "decode-0", "active") == before[1] + 1)


def test_client_that_leaves_while_its_prompts_are_prefilled(demo: Live) -> None:
    """Eight prompts, which take seconds; the client leaves near the beginning."""
    before = demo.metric("prefill-0", "prompt_tokens_total"), _cancelled(demo, "prefill-0", "prefill")
    body = {"model": MODEL, "prompt": [random_prompt(3500, VOCAB, seed=3)] * 8, "max_tokens": 1}
    client = HTTPConnection(demo.addresses["gateway"], timeout=60)
    client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    wait_until(lambda: demo.metric("prefill-0", "leases_open") > 0)
    client.close()
    demo.wait_until_unused(timeout_s=60)
    assert demo.metric("prefill-0", "prompt_tokens_total") < before[0] + 8 * 3499
    assert _cancelled(demo, "prefill-0", "prefill") > before[1]


def _cancelled(live: Live, name: str, phase: str) -> float:
    return live.metric(name, "cancelled_total", {"phase": phase})


def test_a_prompt_seen_before_is_not_computed_again(demo: Live, surface: Surface) -> None:
    prompt = random_prompt(1500, VOCAB, seed=1)
    surface.ask(prompt, max_tokens=8)
    steps, hits = "engine_step_seconds_count", "prefix_cache_hits_total"
    before, num_steps, num_hits = num_prefilled(demo), demo.metric("decode-0", steps), demo.metric("decode-0", hits)
    (last,) = surface.start(prompt, max_tokens=1)
    assert last.usage.cached_tokens == 1499 // PAGE_TOKENS * PAGE_TOKENS
    assert last.timing.cached_tokens == last.usage.cached_tokens
    assert num_prefilled(demo) - before < PAGE_TOKENS
    assert demo.metric("decode-0", steps) - num_steps <= 2  # steps up to the first token
    assert demo.metric("decode-0", hits) - num_hits == last.usage.cached_tokens
    surface.ask(prompt, max_tokens=1, cache_salt="another")
    assert num_prefilled(demo) - before > 1400
