"""Requests go where their prompt's prefix is probably cached. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.router.engine_client import Generation
from gateway.ring.policy import Placement, WorkerView
from gateway.ring.request_machine import Phase, Request
from gateway.ring.request_steps import EndAttempt, Forget, Placed
from gateway.ring.routing import Held, Router
from protos import decode_pb2, kv_pb2
from tests.support.dispatching import generation
from tests.support.fake_workers import PAGE_TOKENS
from tests.support.worker_views import DECODE, DECODE_2, FULL, PREFILL, PREFILL_2

PROMPT = tuple(range(2 * PAGE_TOKENS + 8))  # two whole pages and a part
ALL = [PREFILL, PREFILL_2, DECODE, DECODE_2]


def long(salt: str = "", rest: int = 0) -> Generation:
    """A request for PROMPT; `rest` changes its last token, which is in no whole page."""
    return replace(generation(prompt=(*PROMPT[:-1], PROMPT[-1] + rest)), cache_salt=salt)


def request(wanted: Generation | None = None) -> Request:
    return Request(wanted or long(), deadline=100.0, patience_s=0.0, silent_since=0.0)


def placed(router: Router, workers: Sequence[WorkerView], wanted: Request) -> tuple[str, str | None]:
    choice = router.choose(workers, wanted)
    assert isinstance(choice, Placement)
    return choice.decode.incarnation, choice.prefill.incarnation if choice.prefill else None


def reserved(num_cached: int) -> decode_pb2.ReserveResponse:
    return decode_pb2.ReserveResponse(needs_prefill=True, ticket=kv_pb2.Ticket(begin=num_cached))


def test_what_was_remembered_decides() -> None:
    router = Router(0)
    router.remember(PREFILL_2, request())
    assert placed(router, ALL, request()) == ("D1", "P2")
    router.remember(DECODE_2, request())
    assert placed(router, ALL, request()) == ("D2", None)
    assert placed(router, ALL, request(long(rest=1))) == ("D2", None)
    assert placed(router, ALL, request(long(salt="mine"))) == ("D1", "P1")
    assert placed(router, ALL, request(replace(long(), num_prompt_logprobs=0))) == ("D1", "P1"), "uses no cached pages"
    router.keep([PREFILL, PREFILL_2, DECODE])
    assert placed(router, ALL, request()) == ("D1", "P2"), "D2 came back with an empty cache"


def test_without_cache_routing_load_decides() -> None:
    router = Router(0, uses_cache=False)
    for worker in (PREFILL_2, DECODE_2):
        router.remember(worker, request())
    choice = router.choose(ALL, request())
    assert isinstance(choice, Placement) and router.begin(request(), choice) is None
    assert (choice.decode, choice.prefill, choice.num_cached) == (DECODE, PREFILL, 0)


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    router, first = Router(0), request()
    first.emitted = list(range(PAGE_TOKENS))
    router.remember(DECODE_2, first)
    turn = request(replace(long(), prompt_ids=(*PROMPT, *first.emitted, *range(100))))
    choice = router.choose(ALL, turn)
    assert isinstance(choice, Placement) and choice.decode == DECODE_2 and choice.num_cached == 3 * PAGE_TOKENS


def test_keys_are_of_whole_pages_without_the_last_token() -> None:
    """The last token's KV belongs to the first step."""
    for num_tokens, num_keys in ((1, 0), (PAGE_TOKENS, 0), (PAGE_TOKENS + 1, 1), (2 * PAGE_TOKENS, 1)):
        wanted = request(generation(prompt=range(num_tokens)))
        assert len(wanted.page_keys("w", PAGE_TOKENS)) == num_keys
        wanted.emitted = list(range(num_tokens, 3 * PAGE_TOKENS + 1))
        grown = request(generation(prompt=range(3 * PAGE_TOKENS + 1)))
        assert len(grown.page_keys("w", PAGE_TOKENS)) == 3
        assert wanted.page_keys("w", PAGE_TOKENS) == grown.page_keys("w", PAGE_TOKENS)
        assert not wanted.page_keys("w", 0), "a worker whose page layout is unknown"


def test_a_request_is_held_while_its_pages_come_to_where_it_would_go() -> None:
    router = Router(0)
    first = router.choose(ALL, request())
    assert isinstance(first, Placement) and first.decode == DECODE
    coming = router.begin(request(), first)
    key = router.find_key(ALL, request(long(rest=1)))
    assert coming is not None and key is not None
    assert router.choose(ALL, request(long(rest=1))) == Held(key)
    assert isinstance(router.choose(ALL, request(long(salt="mine"))), Placement)
    assert placed(router, [PREFILL, replace(DECODE, num_mine=3), DECODE_2], request()) == ("D2", "P1"), "too busy"
    assert placed(router, [PREFILL, replace(DECODE, **FULL), DECODE_2], request()) == ("D2", "P1")
    router.remember(replace(DECODE_2, free_pages=11), request())
    there = router.choose([PREFILL, DECODE, replace(DECODE_2, free_pages=11)], request())
    assert isinstance(there, Placement) and there.decode.incarnation == "D2", "it has them already"
    assert router.begin(request(), there) is None
    router.end(coming)
    assert isinstance(router.choose(ALL, request()), Placement)


def test_a_worker_that_had_less_than_expected_is_not_believed_to_have_anything() -> None:
    """Even if more is remembered meanwhile, so this happens once per worker."""
    router, wanted = Router(0), request()
    router.remember(DECODE, wanted)
    assert placed(router, [PREFILL, DECODE], wanted) == ("D1", None)
    wanted.step(Placed("D1", None, 0), 0.0)
    forget, leave = wanted.step(reserved(PAGE_TOKENS), 0.0)
    assert forget == Forget(PAGE_TOKENS) and isinstance(leave, EndAttempt) and not leave.is_failure
    assert (wanted.phase, wanted.num_failures, wanted.is_retry) == (Phase.WAITING, 0, True)
    router.correct(DECODE, wanted, PAGE_TOKENS)
    choice = router.choose([PREFILL, DECODE], request())
    assert isinstance(choice, Placement) and choice.num_cached == PAGE_TOKENS
    router.remember(DECODE, request())
    assert placed(router, [PREFILL, DECODE], request()) == ("D1", None)
    assert placed(router, [PREFILL, DECODE], wanted) == ("D1", "P1")
    wanted.step(Placed("D1", None, 99), 0.0)  # few enough for local prefill, and yet it wants a prefill worker
    wanted.step(reserved(0), 0.0)
    assert (wanted.phase, wanted.num_failures, wanted.avoid) == (Phase.WAITING, 1, {"D1"})
