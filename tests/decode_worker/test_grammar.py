"""Grammars below the loop: allowed tokens, limits of compiling, and the cache."""

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.grammar import compiler as compiler_module
from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.grammars import MAX_COMPILING, Grammars
from decode_worker.grammar.limits import MAX_TEXT_BYTES, find_problem, json_depth
from decode_worker.grammar.matcher import LoadedGrammar
from decode_worker.grammar.vocabulary import read_vocabulary
from decode_worker.interfaces import GrammarBrokenError, GrammarBusyError, GrammarRefusedError
from decode_worker.metrics import DecodeMetrics
from demo.paths import TARGET_DIR
from gateway.text.tokenizer import Tokenizer
from runtime.peer_input import MAX_JSON_DEPTH
from tests.support.combinations import examples
from tests.support.grammars import DEMO_SIZE, allowed_in, compile_here, encode, vocabulary, walk
from tests.support.tiny_tokenizer import write_byte_level, write_sentencepiece
from worker.kv_cache import KVCacheManager
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler

EMPTY = Scheduler(KVCacheManager(PrefixCache(1, [0]), 16), max_running=1, lease_s=1.0)
PADDED_SIZE = 1030  # not a multiple of 32
STOP = 2
CPU_S = 1
LONG_S = 300.0
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]( [A-Za-z]{1,6})?"
ARITHMETIC = 'root ::= term ([+*] term)*\nterm ::= [0-9] | "(" root ")"'


TEXTS = [("json_schema", json.dumps(PERSON)), ("regex", DATE), ("ebnf", ARITHMETIC)]


def test_padding_and_control_tokens_are_no_text() -> None:
    words = vocabulary(PADDED_SIZE)
    state = compile_here("json_schema", '{"type": "string"}', words).new_matcher([STOP])
    state.accept(encode('"a'))
    allowed = allowed_in(state.fill(())[0])
    assert len(allowed) > 500
    assert not set(allowed) & {*words.control, *range(DEMO_SIZE, 2 * PADDED_SIZE)}


def test_a_grammar_may_name_a_control_token() -> None:
    words = vocabulary()
    token, text = next((token, text) for token, text in words.control.items() if text == "<|tool|>")
    state = compile_here("ebnf", f'root ::= "{text}" "!"', words).new_matcher([STOP])
    assert token in allowed_in(state.fill(())[0])
    assert set(words.control) & set(allowed_in(state.fill(())[0])) == {token}


def test_vocabularies_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    import transformers
    import xgrammar

    byte_level, named = write_byte_level(tmp_path / "bytes"), write_byte_level(tmp_path / "named")
    config = json.loads((named / "tokenizer_config.json").read_text())
    (added,) = [token for token, text in vocabulary_of(byte_level).items() if text == b"<think now>"]
    more = {
        "pad_token": {"__type": "AddedToken", "content": "a"},
        "extra_special_tokens": ["b", "no token"],
        "added_tokens_decoder": {
            str(added): {"content": "<think now>", "special": True},
            str(added + 1): {"content": "<é>", "special": False},
        },
    }
    (named / "tokenizer_config.json").write_text(json.dumps(config | more))
    for folder in (TARGET_DIR, byte_level, named, write_sentencepiece(tmp_path / "sentencepiece")):
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        slow = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=PADDED_SIZE)

        texts = {token: text for token, text in enumerate(slow.decoded_vocab) if text not in (b"", b"no token")}
        special = {token: one.content for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        fast = read_vocabulary(folder, PADDED_SIZE)
        assert vocabulary_of(folder) == texts, folder
        assert fast.control == {token: text for token, text in special.items() if text != "no token"}
        assert list(fast.info.stop_token_ids()) == slow.stop_token_ids
        assert fast.info.add_prefix_space() == slow.add_prefix_space


def vocabulary_of(folder: Path) -> dict[int, bytes]:
    texts = read_vocabulary(folder, PADDED_SIZE).info.decoded_vocab()
    return {token: text for token, text in enumerate(texts) if text}


@settings(max_examples=examples(50))
@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_depth_is_counted_without_parsing(value: Any) -> None:
    def depth(node: Any) -> int:
        if isinstance(node, (list, dict)):
            return 1 + max((depth(inner) for inner in (node.values() if isinstance(node, dict) else node)), default=0)
        return 0

    assert json_depth(json.dumps(value)) == depth(value)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("yaml", "", "no kind of grammar"),
        ("regex", "a" * (MAX_TEXT_BYTES + 1), "bytes"),
        ("json_schema", '{"a":' * 500 + "1" + "}" * 500, f"deeper than {MAX_JSON_DEPTH}"),
        ("structural_tag", "[" * 100_000, "deeper"),
        ("ebnf", 'root ::= "\0"', "NUL"),
    ],
)
def test_what_no_compiler_sees(kind: str, text: str, why: str) -> None:
    assert why in str(find_problem(kind, text))


# -- with the compiler's process -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """Grammars compiled by one process, which the tests here share."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    compiler: GrammarCompiler

    def grammars(self, max_bytes: int = 64 << 20) -> Grammars:
        """With a new cache."""
        return Grammars(self.compiler, max_bytes, DecodeMetrics(EMPTY))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Limits count CPU time, which may take longer on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler_module, "wall_limit_s", lambda _cpu_s: LONG_S)
        compiler = GrammarCompiler(TARGET_DIR, DEMO_SIZE, CPU_S)
    with asyncio.Runner() as runner:
        runner.run(compiler.start())
        assert compiler.pid is not None
        yield Service(runner.run, compiler)
        runner.run(compiler.close())


async def end_of(answer: Awaitable[LoadedGrammar]) -> str:
    """ "" for a grammar, otherwise the reason why there is none."""
    try:
        await answer
    except GrammarRefusedError as error:
        return str(error)
    return ""


def test_the_process_loads_neither_torch_nor_transformers(service: Service) -> None:
    """Loading them takes seconds of CPU and 200 MB."""
    service.run(service.compiler.compile("json_object", ""))
    mapped = Path(f"/proc/{service.compiler.pid}/maps").read_text()
    assert "xgrammar" in mapped
    assert "torch" not in mapped and "tokenizers" not in mapped


def test_a_folder_without_a_tokenizer_breaks_grammars_alone(tmp_path: Path) -> None:
    async def start() -> None:
        compiler = GrammarCompiler(tmp_path, DEMO_SIZE, CPU_S)
        await compiler.start()
        with pytest.raises(GrammarBrokenError, match="log says why"):
            await compiler.compile("regex", "a")
        await compiler.close()

    asyncio.run(start())


def test_every_kind_is_compiled(service: Service) -> None:
    arguments = {"type": "json_schema", "json_schema": PERSON}
    tool = {"type": "tag", "begin": "<tool_call>", "content": arguments, "end": "!"}
    kinds = {**dict(TEXTS), "json_object": "", "structural_tag": json.dumps({"type": "structural_tag", "format": tool})}

    async def compile_all() -> None:
        here = service.grammars()
        for kind, text in kinds.items():
            grammar = await here.get(kind, text, LONG_S)
            assert walk(grammar, (STOP,), random.Random(1), 2000) != []
            assert await here.get(kind, text, 0.0) is grammar
        anything = await here.get("json_object", "", 0.0)
        found = [tokens for seed in range(20) if (tokens := walk(anything, (STOP,), random.Random(seed), 500))]
        assert found
        assert all(isinstance(json.loads(Tokenizer(TARGET_DIR).decode(tokens)), dict) for tokens in found)

    service.run(compile_all())


HOSTILE = {
    "nested quantifiers": ("regex", "(a+)+$"),
    "counted thousands": ("regex", "((a{1,1000}){1,1000}){1,100}"),
    "long ambiguity": ("regex", "((a|a|a)*){5000}"),
    "recursion without end": ("ebnf", "root ::= root"),
    "left and right recursion": ("ebnf", 'root ::= root root | "a" | ""'),
    "mutual recursion": ("ebnf", 'root ::= x "a"\nx ::= y | "b"\ny ::= x'),
    "a chain of rules": ("ebnf", "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "x" | r{i + 1}' for i in range(2000))),
    "10k values": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(10_000)]})),
    "depth 500": ("json_schema", '{"properties":{"a":' * 250 + "{}" + "}}" * 250),
    "recursive schema": ("json_schema", '{"type":"object","properties":{"a":{"$ref":"#"}}}'),
    "endless schema": ("json_schema", '{"$ref":"#"}'),
    "many optional": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}})),
    "long strings": ("json_schema", json.dumps({"items": {"type": "string", "minLength": 9999, "maxLength": 10**9}})),
    "no schema": ("json_schema", '{"type": "fool"}'),
    "no JSON": ("json_schema", "{"),
    "no regex": ("regex", "(((("),
    "parentheses": ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "no grammar": ("ebnf", "no grammar"),
    "no tag": ("structural_tag", "{}"),
}


def test_hostile_grammars_are_refused_or_compiled_within_the_limits(service: Service) -> None:
    async def compile_all() -> None:
        here, pid = service.grammars(max_bytes=1 << 30), service.compiler.pid  # nothing compiled may be evicted
        for name, (kind, text) in HOSTILE.items():
            why = await end_of(here.get(kind, text, LONG_S))
            assert len(why) < 400, name
            assert "cpp" not in why, name
            assert await end_of(here.get(kind, text, 0.0)) == why  # known without compiling
        assert service.compiler.pid == pid  # none of them harmed it

    service.run(compile_all())


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "a(", r"without a .\)"),
        ("ebnf", "root ::= root", "no text matches"),
        ("json_schema", json.dumps({"properties": {"x": {"type": "fool"}}}), 'type "fool" at #/properties/x$'),
        ("ebnf", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(10_000)), "chain of more than"),
        # The machine's speed decides which limit is hit first: that of compiling or that of checking a token.
        ("regex", "([a-z]{1,1000}x?){1,1000}", "less ambiguous|simplify it"),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(2500)}}), "less ambiguous|simplify it"),
    ],
)
def test_a_refusal_says_what_to_change(service: Service, kind: str, text: str, why: str) -> None:
    with pytest.raises(GrammarRefusedError, match=why):
        service.run(service.grammars().get(kind, text, LONG_S))


def test_a_refusal_names_the_part_of_a_tag_and_is_remembered(service: Service) -> None:
    schemas = {"fine": PERSON, "bad": {"properties": {"x": {"type": "fool"}}}}
    parts = {name: {"type": "json_schema", "json_schema": schema, "param": name} for name, schema in schemas.items()}
    tags = [{"type": "tag", "begin": name, "content": part, "end": "!"} for name, part in parts.items()]
    text = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": tags}})

    async def ask_twice() -> None:
        here = service.grammars()
        for timeout_s in (LONG_S, 0.0):
            with pytest.raises(GrammarRefusedError, match='"fool" at #/properties/x') as refused:
                await here.get("structural_tag", text, timeout_s)
            assert refused.value.param == "bad"

    service.run(ask_twice())


def test_many_schemas_leave_no_more_than_the_cache_may_hold(service: Service) -> None:
    async def compile_all() -> None:
        here = service.grammars(max_bytes=300_000)
        for i in range(60):
            await here.get("json_schema", json.dumps({"properties": {f"name {i}": {"type": "integer"}}}), LONG_S)
            assert here.num_bytes == sum(num_bytes for _grammar, num_bytes in here.cached.values()) <= 300_000
        assert 1 < len(here.cached) < 60

    service.run(compile_all())


def test_equal_texts_are_compiled_once_and_a_short_wait_ends_as_busy(service: Service) -> None:
    async def compile_both() -> None:
        here = service.grammars()
        with pytest.raises(GrammarBusyError, match="still being compiled"):
            await here.get("regex", "ab", 0.0)
        one, other = await asyncio.gather(here.get("regex", "ab", LONG_S), here.get("regex", "ab", LONG_S))
        assert one is other

    service.run(compile_both())


def test_what_became_of_grammars_is_counted(service: Service) -> None:
    metrics = DecodeMetrics(EMPTY)

    async def get_some() -> None:
        here = Grammars(service.compiler, 1 << 20, metrics)
        for kind, text in (("regex", "ab"), ("regex", "ab"), ("regex", "((("), ("regex", "((("), ("json_schema", "{")):
            with suppress(GrammarRefusedError):
                await here.get(kind, text, LONG_S)

    service.run(get_some())
    count = partial(metrics.registry.get_sample_value, "baton:grammars_total")
    assert [count({"result": result}) for result in ("compiled", "cached", "refused", "failed")] == [1, 1, 3, None]
    assert metrics.registry.get_sample_value("baton:grammar_compile_seconds_count") == 3


def test_a_grammar_that_was_given_up_is_refused(service: Service) -> None:
    async def ask_again() -> None:
        here = service.grammars()
        (await here.get("regex", "abc", LONG_S)).is_too_slow = True
        for _ in range(2):
            assert "less ambiguous" in await end_of(here.get("regex", "abc", LONG_S))
        assert await end_of(here.get("regex", "abcd", LONG_S)) == ""

    service.run(ask_again())


def test_the_queue_is_bounded(service: Service) -> None:
    async def fill_queue() -> None:
        here = service.grammars()
        waiting = [asyncio.create_task(here.get("regex", f"a{i}", LONG_S)) for i in range(MAX_COMPILING)]
        await asyncio.sleep(0)
        with pytest.raises(GrammarBusyError, match=f"{MAX_COMPILING} other"):
            await here.get("regex", "b", LONG_S)
        await asyncio.gather(*waiting)
        await here.get("regex", "b", LONG_S)

    service.run(fill_queue())


def test_a_compiler_that_dies_is_replaced(service: Service) -> None:
    async def kill() -> None:
        here, killed = service.grammars(), service.compiler.pid
        assert killed is not None
        os.kill(killed, signal.SIGSTOP)
        waiting = asyncio.create_task(here.get("regex", "b", LONG_S))
        for _ in range(10):  # turns of tasks until it is asked
            await asyncio.sleep(0)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(GrammarBusyError, match="died"):
            await waiting
        await here.get("regex", "b", LONG_S)
        assert service.compiler.pid not in (None, killed)

    service.run(kill())


WORKER = """
import asyncio, sys
from decode_worker.grammar.compiler import GrammarCompiler
from demo.paths import TARGET_DIR
from tests.support.combinations import examples

async def main():
    compiler = GrammarCompiler(TARGET_DIR, 1024, 60)
    await compiler.start()
    print(compiler.pid, flush=True)
    await compiler.compile("regex", "((a{1,1000}){1,1000}){1,100}")

asyncio.run(main())
"""


def test_a_compilation_ends_with_its_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        compiler = next(int(line) for line in worker.stdout if line.strip().isdigit())  # among lines of the log
        while not (forks := Path(f"/proc/{compiler}/task/{compiler}/children").read_text().split()):
            time.sleep(0.01)
        while Path(f"/proc/{forks[0]}/stat").read_text().split()[13] == "0":  # until it has begun to compile
            time.sleep(0.01)
        os.kill(int(forks[0]), signal.SIGSTOP)  # it would end by itself
        handles = [os.pidfd_open(pid) for pid in (compiler, int(forks[0]))]
        worker.kill()
        for handle in handles:
            assert select.select([handle], [], [], 60)[0], "it outlives the worker"
            os.close(handle)
