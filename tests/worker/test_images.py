"""Images in workers: encodings that are kept, keys of pages with images, and prompts whose encodings are elsewhere."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.compose import build_engine
from engine.vision.image_rows import Encoding, ImageRules, find_turns, place_images
from engine.vision.tower import PixelInputs
from tests.support.checkpoints_vision import write_vlm_checkpoint
from tests.support.decoding import decode
from tests.support.families import IMAGE as IMAGE_TOKEN
from tests.support.sequence_params import answer, build_scheduler, finish, pack, plan, prompt, step
from tests.support.vision import picture
from wire.images import ImageSpan
from wire.page_keys import PageKey, page_keys, root_key
from wire.sampling import SamplingParams
from worker.images import encoder as images_module
from worker.images.encoder import ImageEncoder
from worker.metrics import WorkerMetrics
from worker.params import SequenceParams
from worker.prefix_cache import NoRoomError
from worker.sequences import Phase
from worker.thread import EngineThread

WAIT_S = 30.0
ROW_BYTES = 4 * 8


class Tower:
    """One row of numbers for each byte of a file; files that begin with "!" are none."""

    joins = False

    def __init__(self) -> None:
        self.encoded: list[int] = []  # bytes of each file
        self.num_threads: list[int] = []  # of torch, in each call
        self.has_begun, self.may_run = threading.Event(), threading.Event()
        self.may_run.set()

    def read(self, file: bytes) -> PixelInputs:
        if file.startswith(b"!"):
            raise ValueError("is none")
        return {"bytes": torch.tensor(list(file))}

    def encode(self, images: Sequence[PixelInputs]) -> list[Encoding]:
        self.has_begun.set()
        assert self.may_run.wait(WAIT_S)
        self.num_threads.append(torch.get_num_threads())
        self.encoded += [len(image["bytes"]) for image in images]
        return [Encoding(image["bytes"].float()[:, None].expand(-1, 8).contiguous(), None) for image in images]


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def encoder(tower: Tower) -> Iterator[ImageEncoder]:
    made = ImageEncoder(tower, None, WorkerMetrics(build_scheduler(4, 4)))  # type: ignore[arg-type]
    yield made
    made.close()


def files(*texts: bytes) -> Mapping[bytes, bytes]:
    return {sha256(text).digest(): text for text in texts}


def test_each_image_is_encoded_once_however_many_wait_for_it(tower: Tower, encoder: ImageEncoder) -> None:
    async def ask() -> None:
        tower.may_run.clear()
        both = files(b"first", b"second!")
        assert await encoder.encode(both, 0.0) is None
        waiting = [asyncio.create_task(encoder.encode(some, WAIT_S)) for some in (both, files(b"first"), both)]
        await asyncio.sleep(0)
        tower.may_run.set()
        found = await asyncio.gather(*waiting)
        assert found[0] is not None and found[0].keys() == both.keys() and found[0] == found[2]
        assert await encoder.encode(both, 0.0) == found[0], "they are kept"

    asyncio.run(ask())
    assert tower.encoded == [5, 7]


def test_what_no_request_wants_any_more_is_not_encoded(tower: Tower, encoder: ImageEncoder) -> None:
    """Else clients that send images and leave would fill the worker's memory with files that wait."""

    async def ask() -> None:
        tower.may_run.clear()
        running = asyncio.create_task(encoder.encode(files(b"first"), WAIT_S))
        assert await asyncio.to_thread(tower.has_begun.wait, WAIT_S)
        left = asyncio.create_task(encoder.encode(files(b"left", b"shared"), WAIT_S))
        kept = asyncio.create_task(encoder.encode(files(b"stays"), WAIT_S))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        other = asyncio.create_task(encoder.encode(files(b"shared"), WAIT_S))
        await asyncio.sleep(0)
        tower.may_run.set()
        assert None not in await asyncio.gather(running, kept, other)
        assert not encoder._coming and not encoder._wanted

    asyncio.run(ask())
    assert sorted(tower.encoded) == [5, 5, 6]


@pytest.mark.parametrize("joins", [False, True])
def test_pixels_of_few_images_are_in_memory_at_once(
    tower: Tower, encoder: ImageEncoder, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Of one, unless more are faster together."""
    together = list[int]()
    tower.joins = joins
    encode = tower.encode

    def note(images: Sequence[PixelInputs]) -> list[Encoding]:
        together.append(len(images))
        return encode(images)

    monkeypatch.setattr(tower, "encode", note)
    some = files(*(bytes([byte]) for byte in range(5)))
    assert asyncio.run(encoder.encode(some, WAIT_S)) is not None
    assert together == ([4, 1] if joins else [1] * 5)


def test_a_file_that_is_no_image_fails_what_has_it_and_nothing_else(tower: Tower, encoder: ImageEncoder) -> None:
    async def ask() -> None:
        with pytest.raises(ValueError, match="is none"):
            await encoder.encode(files(b"good", b"!bad"), WAIT_S)
        assert await encoder.encode(files(b"good"), 0.0) is not None
        with pytest.raises(ValueError, match="is none"):
            await encoder.encode(files(b"!bad"), WAIT_S)

    asyncio.run(ask())
    assert tower.encoded == [4]


def test_a_failure_that_nobody_heard_of_does_not_refuse_what_is_encoded_later(
    tower: Tower, encoder: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(tower, "encode", lambda images: [][0])
            assert await encoder.encode(files(b"good"), 0.0) is None
            await asyncio.wait(encoder._coming.values())
        for _ in range(2):
            assert await encoder.encode(files(b"good"), WAIT_S) is not None

    asyncio.run(ask())
    assert tower.encoded == [4]


def test_steps_leave_a_core_while_images_are_encoded(tower: Tower) -> None:
    steps = EngineThread(lambda: False)
    steps.start()
    encoder = ImageEncoder(tower, steps, WorkerMetrics(build_scheduler(4, 4)))  # type: ignore[arg-type]

    async def ask() -> list[object]:
        def count() -> tuple[int, float]:
            return steps.call(lambda: (torch.get_num_threads(), steps.core_share)).result(WAIT_S)

        steps.call(lambda: torch.set_num_threads(3)).result(WAIT_S)
        tower.may_run.clear()
        assert await encoder.encode(files(b"first"), 0.0) is None
        assert await asyncio.to_thread(tower.has_begun.wait, WAIT_S)
        counts = [count()]
        tower.may_run.set()
        assert await encoder.encode(files(b"first"), WAIT_S) is not None
        return [*counts, *tower.num_threads, count()]

    num_threads = torch.get_num_threads()
    try:
        assert asyncio.run(asyncio.wait_for(ask(), WAIT_S)) == [(2, 2 / 3), 1, (3, 1.0)]
    finally:
        torch.set_num_threads(num_threads)
        encoder.close()
        steps.stop(WAIT_S)


def test_encodings_are_kept_up_to_a_number_of_bytes(
    tower: Tower, encoder: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_module, "KEPT_BYTES", 10 * ROW_BYTES)

    async def ask() -> None:
        for text in (b"aaaa", b"bbbb", b"aaaa", b"cccc", b"aaaa", b"bbbb"):  # c displaces b
            assert await encoder.encode(files(text), WAIT_S) is not None
        assert len(tower.encoded) == 4
        many = files(*(bytes([byte]) * 4 for byte in range(12)))  # of one prompt: more than are kept
        tower.may_run.clear()
        assert await encoder.encode(many, 0.0) is None
        tower.may_run.set()
        assert await encoder.encode(files(b"dddd"), WAIT_S) is not None
        assert await encoder.encode(many, WAIT_S) is not None
        assert len(tower.encoded) == 4 + 12 + 1
        assert await encoder.encode(files(b"eeee"), WAIT_S) is not None
        assert await encoder.encode(files(*list(many.values())[-1:]), 0.0) is not None, "the last two are left"

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


IMAGE = ImageSpan(6, 13, bytes(32))
TOKENS = list(range(1, 26))


def keys(images: Sequence[ImageSpan], num_after: int = 0) -> list[PageKey]:
    return list(page_keys(root_key("m", ""), pack(TOKENS), 4, num_after, images))


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 1))
def test_keys_differ_from_the_page_with_another_image_on(begin: int, length: int, num_after: int) -> None:
    image = ImageSpan(begin, begin + length, bytes(32))
    first = keys([image], num_after)
    for other in (image._replace(digest=bytes(31) + b"x"), image._replace(end=image.end + 1)):
        second = keys([other], num_after)
        place = max(begin - num_after, 0) // 4  # the first page whose key stands for one of its tokens
        assert first[:place] == second[:place]
        assert all(one != two for one, two in zip(first[place:], second[place:], strict=True))
    assert keys([image], num_after) == first


def test_pages_get_the_keys_by_which_prompts_find_them() -> None:
    scheduler = build_scheduler(20, 4)
    params = prompt(1, 25, images=[IMAGE], encodings={IMAGE.digest: "encoded"})
    computed = scheduler.admit(params, 0.0)
    while computed.num_missing:
        step(scheduler, 5)
    assert computed.keys == scheduler.kv.keys_of(params) != scheduler.kv.keys_of(prompt(1, 25))
    assert scheduler.admit(prompt(1, 25, images=[IMAGE]), 0.0).num_cached == 24


def test_a_decode_worker_waits_for_kv_that_it_cannot_compute() -> None:
    scheduler = build_scheduler(20, 4)
    assert scheduler.admit(answer(1, 25, 3, images=[IMAGE]), 0.0).phase is Phase.RECEIVING
    encoded = {IMAGE.digest: "encoded"}
    assert scheduler.admit(answer(2, 25, 3, images=[IMAGE], encodings=encoded), 0.0).phase is Phase.ACTIVE
    with pytest.raises(NoRoomError, match="images was evicted"):  # a prefill worker has nobody to wait for
        scheduler.admit(prompt(3, 25, images=[IMAGE]), 0.0)


def test_an_answer_that_made_room_ends_if_its_images_are_elsewhere() -> None:
    scheduler = build_scheduler(9, 4)
    older = scheduler.admit(answer(1, 13, 20), 0.0)
    newer = scheduler.admit(answer(2, 13, 19, images=[IMAGE], encodings={IMAGE.digest: "encoded"}), 0.0)
    newer.params.encodings.clear()  # type: ignore[attr-defined]  # as if its KV had come from elsewhere
    while not newer.num_preemptions:
        finish(scheduler, plan(scheduler, 99))
    ended = scheduler.expire(0.0)
    assert [(update.sequence, update.finish_reason) for update in ended] == [(newer, "expired")]
    while older in list(scheduler):
        step(scheduler)
    assert len(older.tokens) == 13 + 20


def test_an_answer_that_made_room_is_computed_again_with_its_images(tmp_path: Path) -> None:
    folder = write_vlm_checkpoint(tmp_path, "qwen2_5_vl")
    engine = build_engine(
        str(folder), "", "float32", "cpu", 1, 8, 8, lambda *_: (60, 0), lambda _done, _total: None, 256
    )  # fmt: skip
    assert engine.vision is not None
    requests = list[SequenceParams]()
    for handle in (1, 2, 3):
        pixels = engine.vision.read(picture(("red", "blue", "green")[handle - 1], (56, 40)))
        (encoding,) = engine.vision.encode([pixels])
        rows, columns = (side // 2 for side in pixels["image_grid_thw"][0, 1:].tolist())
        span = ImageSpan(3, 3 + len(encoding.rows), bytes([handle]) * 32, rows, columns)
        ids = [handle, 7, 8, *[IMAGE_TOKEN] * len(encoding.rows), 9, 10]
        params = answer(handle, len(ids), 60, prompt=pack(ids), sampling=SamplingParams(temperature=0.0))
        requests.append(replace(params, images=(span,), encodings={span.digest: encoding}))
    roomy = decode(engine, requests)
    tight = decode(engine, requests, num_pages=14)
    assert tight.scheduler.num_preemptions > roomy.scheduler.num_preemptions == 0
    assert [end.error for end in tight.ends.values()] == ["", "", ""]
    assert tight.tokens == roomy.tokens


def test_positions_of_an_image_with_one_row() -> None:
    """None is skipped after it, and yet its rows are counted."""
    token_ids = np.array([1, 2, 9, 9, 9, 3, 4], np.int32)
    images = [(ImageSpan(2, 5, bytes(32), 1, 3), None)]
    placed = {0: place_images(token_ids, images, ImageRules(9, "causal", counts_rows=True))}
    zeros = np.zeros(7, np.int64)
    turns = find_turns(placed, [0], zeros, np.arange(7))
    assert turns is not None
    assert turns.tolist() == [[0, 1, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    after = find_turns(placed, [0], zeros[:2], np.arange(5, 7))
    assert after is not None and after.tolist() == [5, 6]
