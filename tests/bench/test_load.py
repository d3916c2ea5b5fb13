"""`baton bench`: its definitions on given times, its requests to a fake server, and its errors for bad options."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.answers import Answer, Recorder
from bench.load.arrivals import draw_moments, parse_arrivals
from bench.load.ceilings import Ceilings, ModelSize, measure_use, read_size
from bench.load.contexts import ContextOptions, run_contexts
from bench.load.interference import InterferenceOptions, compare, run_interference
from bench.load.metrics import gaps_s, is_good, latency_s, summarise, tpot_s, ttft_s
from bench.load.options import ServeOptions, parse_targets
from bench.load.overload import PRIORITIES, USERS, OverloadOptions, draw_asked, judge
from bench.load.plots import draw, draw_roofline
from bench.load.prompts import PromptWriter
from bench.load.report import (
    build_contexts,
    build_interference,
    build_phases,
    build_priorities,
    build_table,
    load,
    write_json,
)
from bench.load.runs import run_levels
from bench.load.workloads import Wanted, parse_dataset
from runtime.settings import ConfigError
from tests.support.command_line import bind


def make_answer(*chunks: float, output_tokens: int = 0, sent: float = 0.0, ended: float | None = None) -> Answer:
    return Answer(sent, chunks, chunks[-1] if ended is None else ended, 10, output_tokens or len(chunks))


def sse(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def choice(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    return sse(choices=[{"index": 0, "text": text, "finish_reason": finish_reason, **more}])


class TestDefinitions:
    """The definitions of `vllm bench serve`."""

    def test_one_answer(self) -> None:
        answer = make_answer(1.5, 1.7, 2.1, sent=1.0, output_tokens=5, ended=2.3)
        assert ttft_s(answer) == pytest.approx(0.5)
        assert latency_s(answer) == pytest.approx(1.3)
        assert tpot_s(answer) == pytest.approx(0.8 / 4)  # per token: a chunk may hold several
        assert gaps_s(answer) == pytest.approx([0.2, 0.4])

    def test_a_run(self) -> None:
        failed = Answer(0.0, (), 0.0, 0, 0, "HTTP 500")
        told = summarise([make_answer(0.1, 0.2, 0.4), make_answer(0.3, 0.4, sent=0.2), failed], 2.0, {})
        assert (told["completed"], told["failed"], told["request_goodput"]) == (2, 1, None)
        assert (told["total_input_tokens"], told["total_output_tokens"]) == (20, 5)
        assert (told["request_throughput"], told["output_throughput"]) == (1.0, 2.5)
        assert told["total_token_throughput"] == 12.5
        assert told["median_ttft_ms"] == pytest.approx(100)
        assert told["mean_itl_ms"] == pytest.approx(400 / 3)  # pooled: 100, 200, 100
        assert told["start_times"] == pytest.approx([0.0, 0.2, 0.0])
        assert told["errors"] == ["", "", "HTTP 500"]

    @pytest.mark.parametrize(
        ("targets", "is_met"),
        [("ttft:500", True), ("ttft:499", False), ("itl:300", True), ("itl:299", False), ("tpot:200 e2el:900", True)],
    )
    def test_goodput(self, targets: str, is_met: bool) -> None:
        answer = make_answer(0.5, 0.6, 0.9)
        assert is_good(answer, {name: limit + 1e-6 for name, limit in parse_targets(targets.split()).items()}) is is_met


class TestRecorder:
    """Bytes of a stream, cut anywhere, with their arrival times."""

    def test_moments_and_counts(self) -> None:
        recorder = Recorder(1.0)
        recorder.feed(choice(""), 1.1)  # no text: not the first token
        recorder.feed(choice("a"), 1.5)
        recorder.feed(choice("bc") + choice("", "length", timing={"queue_seconds": 0.1}), 1.7)
        recorder.feed(sse(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}), 1.8)
        recorder.feed(b"data: [DONE]\n\n", 1.9)
        answer = recorder.answer()
        assert (answer.chunks, answer.ended, answer.error) == ((1.5, 1.7), 1.7, "")
        assert (answer.prompt_tokens, answer.output_tokens, answer.is_counted) == (7, 3, True)
        assert answer.timing == {"queue_seconds": 0.1}

    def test_tokens_without_text_that_were_asked_for_by_their_ids(self) -> None:
        recorder = Recorder(1.0)
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        recorder.feed(
            choice("", token_ids=[5]) + choice(" a", "length", token_ids=[6]) + sse(choices=[], usage=usage), 1.5
        )
        answer = recorder.answer()
        assert (answer.chunks, answer.error) == ((1.5, 1.5), "")
        assert (answer.token_ids, answer.text, answer.cached_tokens) == ([5, 6], " a", 3)

    @given(st.lists(st.integers(1, 40), min_size=1))
    def test_cuts_do_not_matter(self, sizes: list[int]) -> None:
        stream = b": a comment\r\n" + choice("x", None) + choice("ü") + choice("", "stop") + b"data: [DONE]\n\n"
        recorder, begin = Recorder(0.0), 0
        for size in [*sizes, len(stream)]:
            recorder.feed(stream[begin : begin + size], 1.0)
            begin += size
        assert recorder.answer().chunks == (1.0, 1.0)
        assert recorder.answer().error == ""

    @pytest.mark.parametrize(
        ("stream", "words"),
        [
            (choice("a"), "ended before"),
            (choice("", "stop"), "no text"),
            (b"data: {\n", "cannot be read"),
            (choice("a") + sse(error={"message": "lost"}), "broke off.*lost"),
        ],
    )
    def test_what_is_wrong(self, stream: bytes, words: str) -> None:
        recorder = Recorder(0.0)
        recorder.feed(stream, 1.0)
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(recorder.answer().error)


class TestArrivals:
    @pytest.mark.parametrize(("text", "variation"), [("poisson", 1.0), ("gamma:0.3", 0.3), ("gamma:2", 2.0)])
    def test_rate_and_variation(self, text: str, variation: float) -> None:
        moments = draw_moments(parse_arrivals(text), 5.0, 20_000, seed=1)
        gaps = np.diff(moments)
        assert moments[0] == 0
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)

    @given(st.integers(0, 50), st.floats(0.1, 100), st.integers(0, 9), st.sampled_from(["poisson", "gamma:3", "burst"]))
    def test_seeded_and_in_order(self, count: int, rate: float, seed: int, text: str) -> None:
        moments = draw_moments(parse_arrivals(text), rate, count, seed)
        assert moments == sorted(moments) == draw_moments(parse_arrivals(text), rate, count, seed)
        assert len(moments) == count


class TestPrompts:
    def test_no_two_share_a_beginning(self) -> None:
        prompts = [
            tuple(PromptWriter(range(100, 5000), run=run).write(Wanted(40, 1), index, seed))
            for run in (1, 2)
            for seed in (0, 1)
            for index in range(20)
        ]
        assert all(len(prompt) == 40 for prompt in prompts)
        assert len({prompt[:4] for prompt in prompts}) == len(prompts)

    def test_a_shared_prefix_is_all_that_is_shared(self) -> None:
        writer = PromptWriter(range(100, 5000), shared_tokens=16)
        first, second = (writer.write(Wanted(40, 1), index, 0) for index in (0, 1))
        assert first[:16] == second[:16]
        assert first[16:20] != second[16:20]
        assert first[:16] != PromptWriter(range(100, 5000), shared_tokens=16).write(Wanted(40, 1), 0, 0)[:16]

    def test_sharegpt(self, tmp_path: Path) -> None:
        turns = [{"from": "human", "value": "why " * 20}, {"from": "gpt", "value": "so " * 40}]
        short = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
        file = tmp_path / "share.json"
        file.write_text(json.dumps([{"conversations": one} for one in (turns, short, turns[:1])]))
        drawn = parse_dataset(f"sharegpt:{file}").draw(3, 0)
        assert drawn == [Wanted(20, 30, "why " * 20)] * 3
        assert str(PromptWriter((1, 2)).write(drawn[0], 0, 0)).endswith("why " * 20)


class TestInterference:
    def test_compare(self) -> None:
        streams = [[0.0, 1, 2, 3, 4, 10, 11], [0.5, 1.5, 2.5, 3.5, 9.5, 10.5]]
        figures = compare(streams, begin=4.0, end=9.0)
        assert figures["quiet_median_itl_ms"] == 1000
        assert figures["num_quiet_gaps"] == 3 + 3  # the first gap begins before the second stream runs
        assert (figures["num_busy_gaps"], figures["busy_max_itl_ms"]) == (2, 6000)
        assert (figures["max_ratio"], figures["median_ratio"]) == (6.0, 6.0)
        assert build_interference({**figures, "long_ttft_ms": [5.0]}).row_count == 5

    def test_too_few_chunks(self) -> None:
        with pytest.raises(ConfigError, match="too few chunks"):
            compare([[0.0, 1.0]], begin=0.5, end=2.0)


def test_use_of_the_machine() -> None:
    run = summarise([make_answer(1, 2, 3, 4, 5), make_answer(1, 2, 3, 4, 5)], 4.0, {})
    use = measure_use(ModelSize(100, 50, 1), Ceilings(1000, 10_000), run)
    assert use["mbu"] == pytest.approx((100 + 2 * 12.5) / 1000)
    assert use["mfu"] == pytest.approx(2 * 50 * 30 / 4 / 10_000)
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "num_hidden_layers": 3}
    tensors = {"model.embed_tokens.weight": (100, 200), "rest": (10, 20)}
    assert read_size(config, tensors) == ModelSize(20, 10, 2 * 3 * 2 * 4 * 2)
    assert read_size({**config, "tie_word_embeddings": True}, tensors).num_parameters == 110


class TestBadOptions:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"concurrency": "1,x"}, "--concurrency needs positive numbers"),
            ({"concurrency": "0"}, "--concurrency needs positive numbers"),
            ({"concurrency": "1.5"}, "whole numbers"),
            ({"concurrency": "1", "rate": "2"}, "exclude each other"),
            ({"rate": "-1"}, "--rate needs positive numbers"),
            ({"rate": "1", "arrivals": "gamma"}, "gamma:CV"),
            ({"arrivals": "burst:1.5"}, "burst:N"),
            ({"goodput": ("ttft=5",)}, "NAME:MS"),
            ({"goodput": ("speed:5",)}, "ttft, tpot, itl, e2el"),
            ({"num_requests": -1}, "num_requests=-1"),
        ],
    )
    def test_options(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            ServeOptions(**options)

    @pytest.mark.parametrize("options", [{"lengths": "8k"}, {"output_tokens": 0}, {"rounds": 0}])
    def test_options_of_contexts(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
            ContextOptions(**options)

    @pytest.mark.parametrize("text", ["random", "lengths:5", "lengths:0,5", "sharegpt:", "sharegpt:/none"])
    def test_datasets(self, text: str) -> None:
        with pytest.raises(ConfigError, match="dataset="):
            parse_dataset(text)

    def test_the_command_line(self) -> None:
        words = "bench serve --rate 1,2 --goodput ttft:500 itl:50 --arrivals gamma:2 --save r.json"
        options = bind(*words.split())["options"]
        assert options.targets() == {"ttft": 500, "itl": 50}
        assert [level.rate for level in options.levels()] == [1, 2]


class Fake(ThreadingHTTPServer):
    """A server that streams one token per word, at least 2 ms apart."""

    daemon_threads = True

    def __init__(self, takes_ids: bool, is_baton: bool) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.takes_ids = takes_ids
        self.is_baton = is_baton
        self.bodies: list[dict[str, Any]] = []


class FakeHandler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": "m", "owned_by": "somebody"}]})
        elif self.path == "/status" and self.server.is_baton:
            self._answer(200, {"workers": []})
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._answer(200 if self.server.takes_ids else 404, {"tokens": list(range(5, 600))})
        elif not self.server.takes_ids and (isinstance(body.get("prompt"), list) or "ignore_eos" in body):
            self._answer(400, {"error": "not so"})
        elif not body.get("stream"):
            self._answer(200, {"usage": {"prompt_tokens": 128}})
        else:
            self.server.bodies.append(body)
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        more = {"timing": {"queue_seconds": 0.5}} if body.get("include_timing") else {}
        pause = threading.Event()
        told = choice("word ") if "prompt" in body else sse(choices=[{"index": 0, "delta": {"content": "word "}}])
        for _ in range(body["max_tokens"]):
            pause.wait(0.002)
            self.wfile.write(told)
        words = [word for message in body.get("messages", ()) for word in message["content"].split()]
        usage = {"prompt_tokens": len(body.get("prompt", words)), "completion_tokens": body["max_tokens"]}
        self.wfile.write(choice("", "length", **more) + sse(choices=[], usage=usage) + b"data: [DONE]\n\n")

    def _answer(self, status: int, told: dict[str, Any]) -> None:
        content = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # the client left
            super().handle()


@contextmanager
def fake_server(takes_ids: bool = True, is_baton: bool = False) -> Iterator[tuple[Fake, str]]:
    with Fake(takes_ids, is_baton) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def run(options: ServeOptions) -> dict[str, Any]:
    return asyncio.run(run_levels(options, lambda _name, _total: lambda _answer: None))


def test_a_roofline_names_its_kernels_and_ceilings(tmp_path: Path) -> None:
    kernels = {"products": [("1", 2e10, 2e10), ("512", 5e9, 2e12)], "attention": [("1 x 1", 1e10, 4e10)]}
    draw_roofline(2e10, {"registers": 5e12, "tiles from L1": 2e12}, kernels, tmp_path / "roofline.svg")
    drawn = (tmp_path / "roofline.svg").read_text()
    assert all(f">{text}<" in drawn for text in ("products", "attention", "512", "1 x 1", "registers"))
    assert "memory gives 20.0 GB/s" in drawn


class TestAgainstServers:
    def test_closed_loop(self, tmp_path: Path) -> None:
        with fake_server(is_baton=True) as (server, url):
            result = run(ServeOptions(url=url, dataset="lengths:20,6", concurrency="1,3", num_requests=5))
        assert [level["completed"] for level in result["levels"]] == [5, 5]
        for level in result["levels"]:
            assert (level["total_input_tokens"], level["total_output_tokens"]) == (100, 30)
            assert level["mean_ttft_ms"] >= 2  # the server's pauses
            assert level["mean_e2el_ms"] >= 6 * 2
            assert level["mean_ttft_ms"] <= level["mean_e2el_ms"]
            assert level["mean_queue_ms"] == 500
        prompts = [tuple(body["prompt"]) for body in server.bodies]
        assert len(set(prompts)) == 2 + 5 + 5  # with the warm-up
        assert all(body["ignore_eos"] and body["include_timing"] for body in server.bodies)
        assert (result["server"]["kind"], result["workload"]["prompts"]) == ("baton", "token ids")
        write_json(result, tmp_path / "r.json")
        assert load(tmp_path / "r.json") == result
        assert build_table(result).row_count == 2
        assert build_phases(result) is not None
        draw([result, result], tmp_path / "p.png")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    def test_open_loop_and_a_plain_server(self) -> None:
        with fake_server(takes_ids=False) as (server, url):
            options = ServeOptions(
                url=url, dataset="lengths:20,3", rate="inf", num_requests=6, warm_up=0, goodput=("e2el:60000",)
            )
            result = run(options)
        (level,) = result["levels"]
        assert (level["completed"], level["request_rate"]) == (6, "inf")
        assert level["request_goodput"] == level["request_throughput"]
        assert all(len(body["prompt"].split()) == 10 for body in server.bodies)  # it reports two tokens per word
        assert not any("ignore_eos" in body or "include_timing" in body for body in server.bodies)
        assert result["server"]["kind"] == "somebody"
        assert build_phases(result) is None

    def test_interference(self) -> None:
        with fake_server() as (server, url):
            options = InterferenceOptions(url=url, streams=2, prompts=2, prompt_tokens=50, stream_tokens=4000)
            figures = asyncio.run(run_interference(options))
        assert figures["long_input_lens"] == [50, 50]
        assert figures["num_quiet_gaps"] >= 24
        assert not figures["has_stream_ended_early"]
        assert sorted(body["max_tokens"] for body in server.bodies) == [1, 1, 4000, 4000]

    def test_contexts(self) -> None:
        with fake_server() as (server, url):
            options = ContextOptions(url=url, lengths="1600,3200", output_tokens=3, rounds=2, pid=os.getpid())
            figures = asyncio.run(run_contexts(options))
        asked = [body["messages"] for body in server.bodies][1:]  # the first tells how many words a token has
        assert len(asked) == 2 * 2 * 2
        for new, turn in zip(asked[::2], asked[1::2], strict=True):
            assert turn[: len(new)] == new
            assert [message["role"] for message in turn[len(new) :]] == ["assistant", "user"]
        assert len({messages[0]["content"] for messages in asked}) == 4  # conversations
        assert [round(one["prompt_tokens"], -2) for one in figures] == [1600, 3200]
        for one in figures:
            assert one["ttft_ms"] >= 2 and one["next_ttft_ms"] >= 2  # the server's pauses
            assert one["longest_wait_ms"] > 0 and one["workers_mib"] > 10
        assert build_contexts(figures).row_count == 2


def test_overload_counts_the_tokens_of_answers_that_kept_goal_and_deadline() -> None:
    asked = draw_asked(400, seed=3)
    assert {one.user for one in asked} == set(USERS) and {one.priority for one in asked} == set(PRIORITIES)
    assert asked == draw_asked(400, seed=3) != draw_asked(400, seed=4)
    good, late = make_answer(1.0, 1.1, 1.2), make_answer(2.5, 2.6, 2.7)
    jerky, refused = make_answer(1.0, 1.1, 1.3), Answer(0.0, (), 0.0, 0, 0, "HTTP 429: later")
    answers = [good, late, jerky, refused, Answer(0.0, (), 0.0, 0, 0, "HTTP 503: gone")]
    options = OverloadOptions(itl_goal_ms=100, deadline_ms=2000)
    figures = judge(answers, asked[:5], [("", 3)] * 5, 10.0, options)
    assert (figures["sent"], figures["answered"], figures["failed"]) == (5, 3, 1)
    assert figures["goodput"] == pytest.approx(0.3) and figures["output_throughput"] == pytest.approx(0.9)
    assert figures["errors"] == ["HTTP 503: gone"]
    assert sum(figures["shares"].values()) == pytest.approx(1.0)
    assert sum(row["refused"] for row in figures["priorities"]) == 1
    assert build_priorities(figures).row_count == len(PRIORITIES)
    with pytest.raises(ConfigError, match="factor=0"):
        OverloadOptions(factor=0)
