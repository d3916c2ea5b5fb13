"""Requests go where their prompt's prefix is probably cached. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.router.engine_client import TokenizedRequest
from gateway.router.placement import Placement
from gateway.router.placer import Held, Placer
from gateway.router.request import Request
from gateway.router.worker_view import WorkerView
from tests.support.fake_workers import PAGE_TOKENS
from tests.support.virtual_fleet import wanted
from tests.support.worker_views import DECODE, DECODE_2, FULL, PREFILL, PREFILL_2

PROMPT = tuple(range(2 * PAGE_TOKENS + 8))  # two whole pages and a part
ALL = [PREFILL, PREFILL_2, DECODE, DECODE_2]


def long(salt: str = "", rest: int = 0) -> TokenizedRequest:
    """A request for PROMPT; `rest` changes its last token, which is in no whole page."""
    return replace(wanted(prompt=(*PROMPT[:-1], PROMPT[-1] + rest)), cache_salt=salt)


def request(tokenized: TokenizedRequest | None = None) -> Request:
    return Request(tokenized or long(), deadline=100.0, patience_s=0.0, silent_since=0.0)


def placed(placer: Placer, workers: Sequence[WorkerView], one: Request) -> tuple[str, str | None]:
    choice = placer.choose(workers, one)
    assert isinstance(choice, Placement)
    return choice.decode.incarnation, choice.prefill.incarnation if choice.prefill else None


def test_what_was_remembered_decides() -> None:
    placer = Placer(0)
    placer.remember(PREFILL_2, request())
    assert placed(placer, ALL, request()) == ("D1", "P2")
    placer.remember(DECODE_2, request())
    assert placed(placer, ALL, request()) == ("D2", None)
    assert placed(placer, ALL, request(long(rest=1))) == ("D2", None)
    assert placed(placer, ALL, request(long(salt="mine"))) == ("D1", "P1")
    assert placed(placer, ALL, request(replace(long(), num_prompt_logprobs=0))) == ("D1", "P1"), "uses no cached pages"
    placer.keep([PREFILL, PREFILL_2, DECODE])
    assert placed(placer, ALL, request()) == ("D1", "P2"), "D2 came back with an empty cache"


def test_what_is_in_files_is_found_after_a_restart_and_by_others_but_the_pool_is_better() -> None:
    placer = Placer(0)
    one, two = replace(DECODE, store="disk"), replace(DECODE_2, store="disk")
    placer.remember(two, request())
    assert placed(placer, [PREFILL, one, two], request()) == ("D2", None)
    restarted = replace(two, incarnation="D3", free_pages=two.free_pages + 1)
    workers = [PREFILL, one, restarted]
    placer.keep(workers)
    choice = placer.choose(workers, request())
    assert isinstance(choice, Placement) and choice.decode == restarted and choice.num_cached == 2 * PAGE_TOKENS
    placer.correct(restarted, request(), 0)
    assert placed(placer, workers, request()) == ("D3", "P1")


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    placer, first = Placer(0), request()
    first.emitted = list(range(PAGE_TOKENS))
    placer.remember(DECODE_2, first)
    turn = request(replace(long(), prompt_ids=(*PROMPT, *first.emitted, *range(100))))
    choice = placer.choose(ALL, turn)
    assert isinstance(choice, Placement) and choice.decode == DECODE_2 and choice.num_cached == 3 * PAGE_TOKENS


def test_keys_are_of_whole_pages_without_the_last_token() -> None:
    """The last token's KV belongs to the first step."""
    for num_tokens, num_keys in ((1, 0), (PAGE_TOKENS, 0), (PAGE_TOKENS + 1, 1), (2 * PAGE_TOKENS, 1)):
        short = request(wanted(prompt=range(num_tokens)))
        assert len(short.page_keys("w", PAGE_TOKENS)) == num_keys
        short.emitted = list(range(num_tokens, 3 * PAGE_TOKENS + 1))
        grown = request(wanted(prompt=range(3 * PAGE_TOKENS + 1)))
        assert len(grown.page_keys("w", PAGE_TOKENS)) == 3
        assert short.page_keys("w", PAGE_TOKENS) == grown.page_keys("w", PAGE_TOKENS)
        assert not short.page_keys("w", 0), "a worker whose page layout is unknown"


def test_a_request_is_held_while_its_pages_come_to_where_it_would_go() -> None:
    placer = Placer(0)
    first = placer.choose(ALL, request())
    assert isinstance(first, Placement) and first.decode == DECODE
    coming = placer.begin(request(), first)
    key = placer.find_key(ALL, request(long(rest=1)))
    assert coming is not None and key is not None
    assert placer.choose(ALL, request(long(rest=1))) == Held(key)
    assert isinstance(placer.choose(ALL, request(long(salt="mine"))), Placement)
    assert placed(placer, [PREFILL, replace(DECODE, num_mine=3), DECODE_2], request()) == ("D2", "P1"), "too busy"
    assert placed(placer, [PREFILL, replace(DECODE, **FULL), DECODE_2], request()) == ("D2", "P1")
    placer.remember(replace(DECODE_2, free_pages=11), request())
    there = placer.choose([PREFILL, DECODE, replace(DECODE_2, free_pages=11)], request())
    assert isinstance(there, Placement) and there.decode.incarnation == "D2", "it has them already"
    assert placer.begin(request(), there) is None
    placer.end(coming)
    assert isinstance(placer.choose(ALL, request()), Placement)


def test_choices_of_one_prompt_share_what_is_computed_of_it_and_nothing_of_their_answers() -> None:
    asked = long()
    one, two = request(asked), request(asked)
    keys = one.page_keys("w", PAGE_TOKENS)
    assert one.packed_tokens == two.packed_tokens and two.page_keys("w", PAGE_TOKENS) is keys and len(keys) == 2
    one.emit(range(PAGE_TOKENS), DECODE, now=1.0)
    assert one.page_keys("w", PAGE_TOKENS)[:2] == keys and len(one.page_keys("w", PAGE_TOKENS)) == 3
    assert two.page_keys("w", PAGE_TOKENS) == keys and len(keys) == 2


def test_gateways_that_know_nothing_of_each_other_place_a_session_alike() -> None:
    gateways, elsewhere = [Placer(0) for _ in range(3)], 0
    workers = [replace(view, max_running=64) for view in ALL]
    for number in range(40):
        turn = wanted(prompt=[number] * 40)
        places = {placed(one, workers, request(replace(turn, session=f"s{number}"))) for one in gateways}
        (first,) = places
        elsewhere += first[0] == "D2"
    assert 0 < elsewhere < 40
