"""Requests go where their prompt's prefix is probably cached. Pure."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policies.homes import Homes
from gateway.router.engine_client import TokenizedRequest
from gateway.router.placement import NO_LIMIT, Placement
from gateway.router.placer import Held, Placer
from gateway.router.policies import LocalPrefill
from gateway.router.request import AttemptFailed, Request
from gateway.router.worker_keys import KeyIndex, WorkerKeys
from gateway.router.worker_view import WorkerView
from protos import kv_pb2, worker_pb2
from tests.support.fake_workers import PAGE_TOKENS
from tests.support.virtual_fleet import wanted
from tests.support.worker_views import ALL, DECODE, DECODE_2, FULL, PREFILL, PREFILL_2, forget_keys
from wire.page_keys import SENT_KEY_BYTES, PageKey, page_keys, root_key
from worker.prefix_cache import PrefixCache
from worker.tiers.key_log import KeyLog

PROMPT = tuple(range(2 * PAGE_TOKENS + 8))  # two whole pages and a part


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    forget_keys()


def long(salt: str = "", rest: int = 0) -> TokenizedRequest:
    """A request for PROMPT; `rest` changes its last token, which is in no whole page."""
    return replace(wanted(prompt=(*PROMPT[:-1], PROMPT[-1] + rest)), cache_salt=salt)


def request(tokenized: TokenizedRequest | None = None) -> Request:
    return Request(tokenized or long(), deadline=100.0, patience_s=0.0, silent_since=0.0)


def report(
    incarnation: str, keys: Sequence[PageKey] = (), since: int = 0, number: int = 1, lost: Sequence[PageKey] = (),
    saved: Sequence[PageKey] = (),
) -> worker_pb2.WorkerStatus:  # fmt: skip
    """What a worker answers to a poll."""
    gained, gone, files = (b"".join(key[:SENT_KEY_BYTES] for key in some) for some in (keys, lost, saved))
    return worker_pb2.WorkerStatus(
        peer=kv_pb2.Peer(incarnation=incarnation),
        keys=worker_pb2.KeyReport(since=since, number=number, gained=gained, lost=gone),
        saved_keys=worker_pb2.KeyReport(number=1, gained=files),
    )


def placed(placer: Placer, workers: Sequence[WorkerView], one: Request) -> tuple[str, str | None]:
    choice = placer.choose(workers, one)
    assert isinstance(choice, Placement)
    return choice.decode.incarnation, choice.prefill.incarnation if choice.prefill else None


def test_what_was_remembered_decides() -> None:
    placer = Placer(homes=Homes())
    placer.remember(PREFILL_2, request())
    assert placed(placer, ALL, request()) == ("D1", "P2")
    placer.remember(DECODE_2, request())
    assert placed(placer, ALL, request()) == ("D2", None)
    assert placed(placer, ALL, request(long(rest=1))) == ("D2", None)
    assert placed(placer, ALL, request(long(salt="mine"))) == ("D1", "P1")
    assert placed(placer, ALL, request(replace(long(), num_prompt_logprobs=0))) == ("D1", "P1"), "uses no cached pages"
    DECODE_2.keys.reset("D3")
    assert placed(placer, ALL, request()) == ("D1", "P2"), "it came back with an empty cache"


def test_what_is_in_files_is_found_after_a_restart_and_by_others_but_the_pool_is_better() -> None:
    placer = Placer(homes=Homes())
    one, two = replace(DECODE, store="disk"), replace(DECODE_2, store="disk")
    placer.remember(two, request())
    assert placed(placer, [PREFILL, one, two], request()) == ("D2", None)
    restarted = replace(two, incarnation="D3", free_pages=two.free_pages + 1, keys=WorkerKeys())
    restarted.keys.learn(report("D3", saved=request().page_keys(two)))
    workers = [PREFILL, one, restarted]
    choice = placer.choose(workers, request())
    assert isinstance(choice, Placement) and choice.decode == restarted and choice.num_cached == 2 * PAGE_TOKENS
    placer.correct(restarted, request(), 0)
    assert placed(placer, workers, request()) == ("D3", "P1")


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    placer, first = Placer(homes=Homes()), request()
    first.emitted = list(range(PAGE_TOKENS))
    placer.remember(DECODE_2, first)
    turn = request(replace(long(), prompt_ids=(*PROMPT, *first.emitted, *range(100))))
    choice = placer.choose(ALL, turn)
    assert isinstance(choice, Placement) and choice.decode == DECODE_2 and choice.num_cached == 3 * PAGE_TOKENS


def test_keys_are_of_whole_pages_without_the_last_token() -> None:
    """The last token's KV belongs to the first step."""
    for num_tokens, num_keys in ((1, 0), (PAGE_TOKENS, 0), (PAGE_TOKENS + 1, 1), (2 * PAGE_TOKENS, 1)):
        short = request(wanted(prompt=range(num_tokens)))
        assert len(short.page_keys(DECODE)) == num_keys
        short.emitted = list(range(num_tokens, 3 * PAGE_TOKENS + 1))
        grown = request(wanted(prompt=range(3 * PAGE_TOKENS + 1)))
        assert len(grown.page_keys(DECODE)) == 3
        assert short.page_keys(DECODE) == grown.page_keys(DECODE)
        assert not short.page_keys(replace(DECODE, page_tokens=0)), "a worker whose page layout is unknown"


def test_a_request_is_held_while_its_pages_come_to_where_it_would_go() -> None:
    placer = Placer(homes=Homes())
    first = placer.choose(ALL, request())
    assert isinstance(first, Placement) and first.decode == DECODE
    coming = placer.begin(request(), first, ALL)
    key = placer.find_key(ALL, request(long(rest=1)))
    assert coming is not None and key is not None
    assert placer.choose(ALL, request(long(rest=1))) == Held(key)
    assert isinstance(placer.choose(ALL, request(long(salt="mine"))), Placement)
    assert placed(placer, [PREFILL, replace(DECODE, num_mine=3), DECODE_2], request()) == ("D2", "P1"), "too busy"
    assert placed(placer, [PREFILL, replace(DECODE, **FULL), DECODE_2], request()) == ("D2", "P1")
    placer.remember(replace(DECODE_2, free_pages=11), request())
    there = placer.choose([PREFILL, DECODE, replace(DECODE_2, free_pages=11)], request())
    assert isinstance(there, Placement) and there.decode.incarnation == "D2", "it has them already"
    assert placer.begin(request(), there, ALL) is None
    placer.end(coming)
    assert isinstance(placer.choose(ALL, request()), Placement)


def test_choices_of_one_prompt_share_what_is_computed_of_it_and_nothing_of_their_answers() -> None:
    asked = long()
    one, two = request(asked), request(asked)
    keys = one.page_keys(DECODE)
    assert one.packed_tokens == two.packed_tokens and two.page_keys(DECODE) is keys and len(keys) == 2
    one.emit(range(PAGE_TOKENS), DECODE, now=1.0)
    assert one.page_keys(DECODE)[:2] == keys and len(one.page_keys(DECODE)) == 3
    assert two.page_keys(DECODE) == keys and len(keys) == 2


def test_gateways_that_know_nothing_of_each_other_place_a_session_alike() -> None:
    gateways, elsewhere = [Placer(homes=Homes()) for _ in range(3)], 0
    workers = [replace(view, max_running=64) for view in ALL]
    for number in range(40):
        turn = wanted(prompt=[number] * 40)
        places = {placed(one, workers, request(replace(turn, session=f"s{number}"))) for one in gateways}
        (first,) = places
        elsewhere += first[0] == "D2"
    assert 0 < elsewhere < 40


def test_all_gateways_place_by_what_workers_report_and_by_nothing_that_is_gone() -> None:
    keys = request().page_keys(DECODE)
    DECODE_2.keys.learn(report("D2", keys))
    PREFILL_2.keys.learn(report("P2", keys[:1]))
    assert placed(Placer(homes=Homes()), ALL, request()) == ("D2", None)
    DECODE_2.keys.learn(report("D2", since=1, number=3, lost=keys[1:]))
    choice = Placer(homes=Homes()).choose(ALL, request())
    assert isinstance(choice, Placement) and choice.decode == DECODE_2 and choice.num_cached == PAGE_TOKENS
    assert choice.prefill == PREFILL_2
    assert placed(Placer(uses_cache=False), ALL, request()) == ("D1", "P1")


def test_keys_of_a_model_with_a_draft_head_stand_for_the_token_after_the_page() -> None:
    headed = replace(DECODE, key_tokens_after=1)
    for num_tokens, num_keys in ((PAGE_TOKENS, 0), (PAGE_TOKENS + 1, 1), (3 * PAGE_TOKENS + 1, 3)):
        one = request(wanted(prompt=range(num_tokens)))
        own = page_keys(root_key("w", ""), one.packed_tokens, PAGE_TOKENS, 1)
        assert list(one.page_keys(headed)) == list(own) and len(one.page_keys(headed)) == num_keys
        assert len(one.page_keys(DECODE)) == num_keys


@pytest.mark.parametrize("uses_sessions", [False, True])
def test_three_gateways_place_a_conversation_alike(uses_sessions: bool) -> None:
    """Each turn comes to any of them, and each worker's reports come late to each. Pools hold a third more than all."""
    rng, names = random.Random(0), [f"d-{number}" for number in range(4)]
    caches = {name: PrefixCache(800, [0] * 800) for name in names}
    logs = {name: KeyLog() for name in names}
    for name, cache in caches.items():
        cache.watchers.append(logs[name])
    gateways = [
        (
            Placer(LocalPrefill(NO_LIMIT)),
            {name: replace(DECODE, incarnation=name, keys=WorkerKeys(), max_running=64) for name in names},
        )
        for _ in range(3)
    ]
    prompts = [[rng.randrange(1000) for _ in range(600)] for _ in range(24)]
    where, num_same, num_later = dict[int, str](), 0, 0
    for _ in range(8):
        for number in rng.sample(range(24), 24):
            for _, views in gateways:
                for name in rng.sample(names, 2):  # the other answers are on their way
                    asked = views[name].keys.ask()
                    answered = kv_pb2.Peer(incarnation=name)
                    news = logs[name].pack(asked.keys_since)
                    views[name].keys.learn(worker_pb2.WorkerStatus(peer=answered, keys=news))
            placer, views = rng.choice(gateways)
            name = f"session {number}" if uses_sessions else ""
            turn = request(wanted(prompt=prompts[number], session=name))
            choice = placer.choose(list(views.values()), turn)
            assert isinstance(choice, Placement)
            chosen = choice.decode.incarnation
            num_later, num_same = num_later + (number in where), num_same + (where.get(number) == chosen)
            where[number] = chosen
            keys, cache = turn.page_keys(choice.decode), caches[chosen]
            found = cache.find(keys)
            cache.hold(found)
            pages = found + cache.allocate(len(keys) - len(found))
            for page, key in zip(pages, keys, strict=True):
                cache.name(page, key)
            cache.release(pages)
            placer.remember(choice.decode, turn)
            prompts[number] += [rng.randrange(1000) for _ in range(60)]
    assert num_same >= 0.95 * num_later, (num_same, num_later)
    assert {Counter(where.values())[name] for name in names} <= set(range(3, 10)), "and conversations spread"


def build_many() -> list[WorkerView]:
    """A hundred of each role, whose keys are in one index."""
    index, views = KeyIndex(), []
    for template in (PREFILL, DECODE):
        for number in range(100):
            name = f"{template.incarnation[0]}{number}"
            view = replace(template, address=name, incarnation=name, keys=WorkerKeys(), max_running=64)
            view.keys.index = index
            view.keys.learn(report(name))
            views.append(view)
    return views


def test_of_many_workers_those_are_found_that_have_most_that_are_idle_or_at_home() -> None:
    views = build_many()
    by_name = {view.incarnation: view for view in views}
    prompt = tuple(range(200 * PAGE_TOKENS + 3))
    turn = request(wanted(prompt=prompt))
    keys = turn.page_keys(views[0])
    for name, count in (("P7", 150), ("D31", 190), ("D32", 80), ("D33", 20)):
        by_name[name].keys.learn(report(name, keys[:count]))
    assert placed(Placer(homes=Homes()), views, turn) == ("D31", "P7")
    by_name["D31"].keys.correct(keys[60:])
    assert placed(Placer(homes=Homes()), views, turn)[0] == "D32", "it has the most now"
    by_name["D32"].keys.learn(report("D32b"))
    assert placed(Placer(homes=Homes()), views, turn)[0] == "D31"
    asked = [replace(wanted(prompt=range(99)), session="s", request_id=str(at)) for at in range(20)]
    homes = {placed(Placer(homes=Homes()), views, request(one)) for one in asked}
    assert homes == {tuple(sorted(Homes().find("s", views)))}
    only = {"P3", "D4"}
    busy = [view if view.incarnation in only else replace(view, num_mine=64) for view in views]
    where = {
        placed(Placer(homes=Homes()), busy, request(replace(wanted(prompt=range(99)), request_id=str(at))))
        for at in range(9)
    }
    assert where == {("D4", "P3")}, "they are the only ones with room, if no draw has them, too"
    spread = Counter(
        placed(Placer(homes=Homes()), views, request(replace(wanted(), request_id=str(at)))) for at in range(300)
    )
    assert max(spread.values()) < 10


def test_of_many_workers_the_one_that_is_about_to_have_the_prompt_is_waited_for() -> None:
    views, placer = build_many(), Placer(homes=Homes())
    one = request(wanted(prompt=range(200 * PAGE_TOKENS)))
    choice = placer.choose(views, one)
    assert isinstance(choice, Placement)
    coming = placer.begin(one, choice, views)
    assert coming is not None
    for at in range(9):
        other = request(replace(wanted(prompt=(*range(199 * PAGE_TOKENS), *range(30))), request_id=str(at)))
        assert isinstance(placer.choose(views, other), Held)
    placer.end(coming)
    assert isinstance(placer.choose(views, one), Placement)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["pool", "files", "expect", "ask", "correct", "restart"]),
                          st.lists(st.integers(0, 9), max_size=5)), max_size=40))  # fmt: skip
def test_the_index_knows_what_workers_have(steps: Sequence[tuple[int, str, Sequence[int]]]) -> None:
    """One key alone each, of those that it samples."""
    index, workers = KeyIndex(), [WorkerKeys() for _ in range(3)]
    for worker in workers:
        worker.index = index
    for at, kind, numbers in steps:
        worker, keys = workers[at], [bytes([16 * number]) * 16 for number in numbers]
        match kind:
            case "pool":
                worker.learn(report(worker.incarnation, keys))
            case "files":
                worker.learn(report(worker.incarnation, saved=keys))
            case "expect":
                worker.expect(keys)
            case "ask":
                worker.ask()
            case "correct":
                worker.correct(keys)
            case "restart":
                worker.learn(report(f"{worker.incarnation}+"))
    for number in range(10):
        key = bytes([16 * number]) * 16
        has = {worker for worker in workers if worker.count([key]) or key[:SENT_KEY_BYTES] in worker.files.keys}
        assert index.find([key], 9) == has


def test_after_two_mistakes_a_prompt_is_computed() -> None:
    """A third worker would be asked to lend to the one that could not read twice, and so on until attempts run out."""
    placer, one = Placer(homes=Homes()), request(wanted(prompt=range(1000)))
    for worker in (PREFILL, PREFILL_2, DECODE_2):
        placer.remember(worker, one)
    alone = [replace(DECODE, free_pages=99), *(replace(view, **FULL) for view in (DECODE_2,)), PREFILL, PREFILL_2]
    for number in range(2):
        choice = placer.choose(alone, one)
        assert isinstance(choice, Placement) and choice.decode.incarnation == "D1" and choice.lender is not None
        one.mistaken.add(choice.lender.incarnation)
        one.num_mistakes = number + 1
    choice = placer.choose(alone, one)
    assert isinstance(choice, Placement) and choice.prefill is not None
    assert choice.lender is None and choice.num_cached == 0
    failed = AttemptFailed("mistaken", "lacks more")
    fresh = request()
    for number in range(2):
        assert fresh.go_on(failed, f"D{number}", None, 0.0) is None and not fresh.num_failures
    assert fresh.go_on(failed, "D2", None, 0.0) is None and fresh.num_failures == 1
