"""Rules of stored answers broken on purpose, as those of mutations.py: schedules of answers.py must show each."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from gateway.adapters.registry import Adapter
from gateway.answer.output_items import Item
from gateway.api.http.answer import EventStream
from gateway.api.responses.writer import ResponseWriter, new_response_id
from gateway.router.engine_client import Tokens
from gateway.store import adapters, keeper, run, runs
from gateway.store.adapters import AdapterRow, SharedAdapters, share
from gateway.store.database import Answer, Change, Database, StoreError, TokenPart
from gateway.store.keeper import AnswerKeeper
from gateway.store.kinds import Kind, Place, find_place
from gateway.store.replay import Asked, Replays
from gateway.store.run import ChoiceTokens, Run, join_parts, singly
from tests.simulator.mutations import Mutation, patched

do = Database.do
mark_saved = Run.mark_saved
new_item = ResponseWriter._new_item
join = Replays.join
prepare = Replays.prepare
share_one = SharedAdapters._share
take_part = ChoiceTokens.take_part
write = Database.write


def _with_sql(before: str, after: str) -> Mutation:
    """Statements that have another condition."""

    def do_changed(self: Database, sql: str, **values: object) -> Any:
        return do(self, sql.replace(before, after), **values)

    return patched((Database, "do", do_changed))


def _all_together(tokens: Tokens, stop_token_ids: frozenset[int]) -> Iterator[Tokens]:
    yield tokens


async def _follow_what_is_new(
    self: Run, choice: int, stream: AsyncGenerator[Tokens, None]
) -> AsyncGenerator[Tokens, None]:
    kept, stops = self.choices[choice], self.totals.job.generations[choice].stop_token_ids
    async with aclosing(stream):
        if kept.finish is not None:
            yield Tokens((), kept.finish)
            return
        async for tokens in stream:
            for one in singly(tokens, stops):
                kept.add(one)
                yield one


def _draw_item_id(self: ResponseWriter, item: Item) -> Any:
    before, self.id = self.id, new_response_id()
    try:
        return new_item(self, item)
    finally:
        self.id = before


async def _prepare_with_new_seeds(self: Replays, answer: Answer, asked: Asked, kept: Any = ()) -> Any:
    return await prepare(self, answer, msgspec.structs.replace(asked, seeds=[seed ^ 1 for seed in asked.seeds]), kept)


def _take_one_more(self: ChoiceTokens, choice: int) -> TokenPart | None:
    self.num_saved = max(self.num_saved - 1, 0)
    return take_part(self, choice)


def _mark_all_saved(self: Run, change: Change, sizes: Sequence[tuple[int, bool]]) -> None:
    mark_saved(self, change, [(len(one.ids), one.finish is not None) for one in self.choices])


def _write_or_not(self: Database, *args: Any) -> set[str]:
    try:
        return write(self, *args)
    except StoreError:
        return set()


async def _look_for_all(self: SharedAdapters) -> None:
    new = list(self._unsaved.values())
    self._seen, rows = await self._runs.writes.call(share, new, self._seen)
    for row in new:
        if self._unsaved[row[:2]] is row:
            del self._unsaved[row[:2]]
    for row in rows or ():
        self._loaders[row.model].follow(row.name, row.path, row.digest)


async def _share_once(self: SharedAdapters, model: str, name: str, adapter: Adapter | None) -> None:
    try:
        await share_one(self, model, name, adapter)
    finally:
        self._unsaved.pop((model, name), None)


def _share_loads(database: Database, new: Sequence[AdapterRow], seen: int) -> tuple[int, list[AdapterRow] | None]:
    return share(database, [row for row in new if row.path], seen)


async def _join_last_turn(self: Replays, body: Any, history: Sequence[Answer], key: Any) -> Any:
    return await join(self, body, history[-1:], key)


def _forget(parts: Sequence[TokenPart], num_choices: int) -> list[ChoiceTokens]:
    return join_parts([], num_choices)


async def _wait_for_nothing(*_: object) -> None:
    pass


def _find_later_place(kind: Kind, num_choices: int, after: str = "") -> Place:
    first, *rest = after.split(",")
    after = ",".join([str(int(first) + 1), *rest]) if kind == "chat" and after else after
    return find_place(kind, num_choices, after)


ANSWER_MUTATIONS: dict[str, Mutation] = {
    "the lease is not compared on write": _with_sql("WHERE gateway = :gateway AND status IN", "WHERE status IN"),
    "events are grouped anew after a takeover": patched((run, "singly", _all_together)),
    "events are numbered anew after a takeover": patched((Run, "_follow", _follow_what_is_new)),
    "an id is told before the store has it": patched((EventStream, "_wait_known", _wait_for_nothing)),
    "a gateway does not look who has ended an answer": patched((AnswerKeeper, "_look_whether_lost", _wait_for_nothing)),
    "a chat is read on behind the next chunk": patched((keeper, "find_place", _find_later_place)),
    "ids of items are drawn anew": patched((ResponseWriter, "_new_item", _draw_item_id)),
    "seeds are drawn anew": patched((Replays, "prepare", _prepare_with_new_seeds)),
    "a token is stored twice": patched((ChoiceTokens, "take_part", _take_one_more)),
    "tokens that come during a write count as stored": patched((Run, "mark_saved", _mark_all_saved)),
    "a write that failed counts as done": patched((Database, "write", _write_or_not)),
    "a part that is written once more does not grow": _with_sql("DO UPDATE SET ids = excluded.ids", "DO NOTHING --"),
    "a reader does not see that a part has grown": _with_sql(
        "first >= (SELECT max(first) FROM tokens WHERE answer = :id AND choice = :choice AND first <= :begin)",
        "first >= :begin",
    ),
    "an answer begins again after a takeover": patched((runs, "join_parts", _forget)),
    "answers are not taken over": patched((Database, "claim", lambda *_: [])),
    "a turn has only the one before it": patched((Replays, "join", _join_last_turn)),
    "changes of adapters are not counted": _with_sql("SET number = number + 1", "SET number = number"),
    "an adapter that was unloaded has no row": patched((adapters, "share", _share_loads)),
    "a change of an adapter is written once": patched((SharedAdapters, "_share", _share_once)),
    "the store undoes a change that it lacks": patched((SharedAdapters, "_look", _look_for_all)),
    "tokens outlive their answer": _with_sql("DELETE FROM tokens", "SELECT * FROM tokens"),
}
