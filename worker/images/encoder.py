"""Encodes the images of prompts, beside running steps. On the asyncio thread; the work is on a thread of its own.

Encodings are kept by digest, up to a number of bytes, so that the next turn of a conversation needs none, nor the same
image in other prompts. What a sequence needs stays with it.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import structlog
import torch

from engine.vision.image_rows import Encoding
from engine.vision.tower import VisionTower
from worker.features import ImageSource
from worker.metrics import WorkerMetrics
from worker.thread import EngineThread

Encodings = Mapping[bytes, Encoding]  # digest |->
KEPT_BYTES = 256 << 20  # of encodings, beside those that sequences have or wait for
ASK_AGAIN_S = 10.0  # after a call that took too long
AT_ONCE = 4  # images that are encoded together, where that is faster
NICE = 5  # of the thread: steps go first
STEP_S = 5.0  # most that steps take to let go of a core
log = structlog.get_logger()


class ImageEncoder(ImageSource):
    """Owns the cache and the thread."""

    takes_images = True

    def __init__(self, tower: VisionTower, steps: EngineThread | None, metrics: WorkerMetrics) -> None:
        """steps: if they are computed on the same cores."""
        self._tower = tower
        self._steps = steps
        self._kept: OrderedDict[bytes, Encoding] = OrderedDict()  # digest |-> encoding, next to go first
        self._num_bytes = 0
        self._coming: dict[bytes, asyncio.Task[None]] = {}  # digest |-> what encodes it
        self._wanted: dict[bytes, float] = {}  # digest |-> until when it is kept, however many there are
        self._failed: OrderedDict[bytes, str] = OrderedDict()  # digest |-> why it cannot be encoded
        self._thread: ThreadPoolExecutor | None = None
        self._num_encoded = metrics.counter("images_encoded", "Images encoded")
        self._seconds = metrics.counter("image_encode_seconds", "Seconds spent on encoding images")
        metrics.gauge("image_encodings_bytes", "Bytes of kept encodings", lambda: self._num_bytes)

    async def encode(self, files: Mapping[bytes, bytes], wait_s: float) -> Encodings | None:
        deadline = time.monotonic() + wait_s
        self._wanted = {digest: until for digest, until in self._wanted.items() if until > time.monotonic()}
        self._wanted |= dict.fromkeys(files, deadline + ASK_AGAIN_S)
        missing = [digest for digest in files if digest not in self._kept and digest not in self._coming]
        at_once = AT_ONCE if self._tower.joins else 1  # whose pixels are in memory
        for begin in range(0, len(missing), at_once):
            chosen = {digest: files[digest] for digest in missing[begin : begin + at_once]}
            task = asyncio.create_task(self._encode(chosen))
            self._coming |= dict.fromkeys(chosen, task)
        try:
            return await self._find(files, deadline)
        except asyncio.CancelledError:
            self._forget(files)
            raise

    async def _find(self, files: Iterable[bytes], deadline: float) -> Encodings | None:
        """Waits for those that are coming."""
        found: dict[bytes, Encoding] = {}
        for digest in files:
            if digest in self._coming:
                done, _ = await asyncio.wait([self._coming[digest]], timeout=max(deadline - time.monotonic(), 0))
                if not done:
                    return None
            if digest in self._failed:
                raise ValueError(self._failed.pop(digest))
            if digest not in self._kept:
                return None  # another call has taken it, and many others came meanwhile
            self._kept.move_to_end(digest)
            found[digest] = self._kept[digest]
        self._forget(files)
        return found

    def _forget(self, digests: Iterable[bytes]) -> None:
        """Those that are not begun will not be; another call that waits for one has to ask again."""
        for digest in digests:
            self._wanted.pop(digest, None)

    async def _encode(self, files: Mapping[bytes, bytes]) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "images")
        try:
            for digest, encoding in (await loop.run_in_executor(self._thread, self._compute, files)).items():
                if isinstance(encoding, str):
                    self._failed[digest] = encoding
                else:
                    self._keep(digest, encoding)
        except Exception as error:
            log.exception("images were not encoded")
            self._failed |= dict.fromkeys(files, f"it cannot be encoded: {error}")
        finally:
            while len(self._failed) > len(self._coming) + AT_ONCE:
                self._failed.popitem(last=False)
            for digest in files:
                del self._coming[digest]

    def _compute(self, files: Mapping[bytes, bytes]) -> dict[bytes, Encoding | str]:
        """Encodings, or why there is none, of those that are still wanted. On the thread."""
        began = time.monotonic()
        wanted = {digest: file for digest, file in files.items() if self._wanted.get(digest, 0.0) > began}
        if not wanted:
            return {}
        found: dict[bytes, Encoding | str] = {}
        inputs = {}
        try:
            with self._beside_steps():
                for digest, file in wanted.items():
                    try:
                        inputs[digest] = self._tower.read(file)
                    except ValueError as error:
                        found[digest] = str(error)
                if inputs:
                    found |= zip(inputs, self._tower.encode(list(inputs.values())), strict=True)
            return found
        finally:
            self._num_encoded.inc(len(wanted))
            self._seconds.inc(time.monotonic() - began)

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """One core for this thread, the others for steps.

        Threads of a step wait for each other at each product: with one of them beside this thread on a core, steps
        would take ten times as long.
        """
        steps = self._steps
        if steps is None:
            yield
            return
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # Linux: of this thread
        had = steps.call(partial(_leave_core, steps))
        wait([had], STEP_S)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            steps.call(lambda: _give_cores(steps, had.result()))

    def _keep(self, digest: bytes, encoding: Encoding) -> None:
        self._kept[digest] = encoding
        self._failed.pop(digest, None)  # of an earlier attempt
        self._num_bytes += _count_bytes(encoding)
        for oldest in list(self._kept):
            if self._num_bytes <= KEPT_BYTES:
                break
            if self._wanted.get(oldest, 0.0) < time.monotonic():
                self._num_bytes -= _count_bytes(self._kept.pop(oldest))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _leave_core(steps: EngineThread) -> int:
    """How many threads a step had; now one fewer. On the engine thread."""
    num_threads, left = torch.get_num_threads(), max(torch.get_num_threads() - 1, 1)
    torch.set_num_threads(left)
    steps.core_share = left / num_threads
    return num_threads


def _give_cores(steps: EngineThread, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    steps.core_share = 1.0


def _count_bytes(encoding: Encoding) -> int:
    return sum([part.nbytes for part in encoding if part is not None])
