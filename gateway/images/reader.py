"""Reads the images of one model's requests: their bytes, and what the model's processor makes of them.

Runs on the asyncio thread. Long work happens in the process (processor_process.py) or on a thread.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from gateway.errors import ApiError, bad_request, check_count, not_ready, overloaded
from gateway.fair_turns import FairTurns
from gateway.images.fetch import ImageFetcher
from gateway.images.parts import ImagePart, read_data_uri, too_large
from gateway.images.processor_process import (
    WALL_S,
    Answer,
    ReaderReady,
    ReaderStart,
    ReadFile,
    ReadImage,
)
from gateway.shares import Shared
from gateway.text.offload import Offload
from runtime.child import ChildError, ChildServer, StandingChild
from runtime.fork import Busy, Refused
from runtime.tasks import run_to_end
from wire.image_formats import MAX_FILE_BYTES
from wire.images import MAX_IMAGES

MAX_ALL_BYTES = 48 << 20  # of one prompt's: they go to a worker in one message (runtime/rpc.py)
MAX_WAITING = 256  # images of all requests; more are refused with 429
AT_ONCE = 2  # in the process: each may take the memory and CPU time of one
ALL_S = 180.0  # for a prompt's images, with their wait
KEPT_BYTES = 32 << 20  # of answers about images that came before
ENTRY_BYTES = 256  # of an answer without its text
START_S = 120.0  # for the process to load the processor: a second, unless the machine is busy
_SLACK_S = 5.0  # for the process to answer that time is over
_SAFE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # it forks
T = TypeVar("T")
log = structlog.get_logger()


class FoundImage(NamedTuple):
    """An image of a request."""

    file: bytes
    digest: bytes  # SHA-256 of the processor's fingerprint and the file
    read: ReadImage


class Images:
    """The images of one model."""

    def __init__(
        self, folder: Path, family: str, token_id: int, max_pixels: int, fetcher: ImageFetcher, offload: Offload
    ) -> None:
        """Starts nothing. `token_id`: of the token that stands for a part of an image."""
        self.token_id = token_id
        self.placeholder = ""  # stands for an image in a rendered chat; known from the first image on
        start = ReaderStart(str(folder), family, max_pixels)
        module = "gateway.images.processor_process"
        self._child = StandingChild[Answer](
            lambda: ChildServer(module, start, Answer, environment=_SAFE_ENVIRONMENT), START_S
        )
        self.fetcher = fetcher
        self._offload = offload
        self._turns = FairTurns(AT_ONCE)
        self._waiting = Shared(MAX_WAITING)
        self._kept: OrderedDict[bytes, ReadImage] = OrderedDict()  # by digest; the next one to forget first
        self._num_bytes = 0

    @property
    def pid(self) -> int | None:
        """The id of the process, while there is one."""
        return self._child.child.pid if self._child.child else None

    async def start(self) -> None:
        """Returns when the process is ready, or has failed, which is logged: `read` tries again."""
        try:
            await self._ready()
        except ApiError as error:
            log.error("no image can be read", reason=str(error))

    async def read(self, parts: Sequence[ImagePart], param: str, owner: str = "") -> list[FoundImage]:
        """Raises ApiError. `param`: the field of all of them; `owner`: as in Shared."""
        check_count(param, len(parts), MAX_IMAGES, "images")
        if not self._waiting.has_room(owner, len(parts)):
            raise overloaded(f"{self._waiting.total} images are waiting to be read; try again in a moment")
        with self._waiting.held(owner, len(parts)):
            try:
                async with asyncio.timeout(ALL_S):
                    return await self._read(parts, param, owner)
            except TimeoutError:
                raise overloaded(f"{param}: its images were not read within {ALL_S:g} s; try again later") from None

    async def _read(self, parts: Sequence[ImagePart], param: str, owner: str) -> list[FoundImage]:
        ready = await self._ready()
        self.placeholder = ready.placeholder
        count = _limit(param)  # of fetched files; those in the request are bounded with its body
        fetched = await _all([self._fetch(part, count) for part in parts])
        files = await self._offload.run(
            sum([len(source) for source in fetched]),
            lambda _: [_open(*pair, ready.fingerprint) for pair in zip(parts, fetched, strict=True)],
            owner,
        )
        _limit(param)(sum([len(file) for file, _ in files]))
        answers = await _all([self._ask(part, *opened, owner) for part, opened in zip(parts, files, strict=True)])
        return [FoundImage(*pair, answer) for pair, answer in zip(files, answers, strict=True)]

    async def _ready(self) -> ReaderReady:
        try:
            answer = await self._child.ready()
        except ChildError as error:
            log.warning("image reader fails", error=str(error))
            raise not_ready("the process that reads images does not start; the gateway's log says why") from error
        if isinstance(answer, ReaderReady):
            return answer
        assert isinstance(answer, Refused)
        raise not_ready(f"images cannot be read: {answer.message}")

    async def _fetch(self, part: ImagePart, count: Callable[[int], None]) -> str | bytes:
        """A file, or a data URI. `count`: as in ImageFetcher.fetch."""
        if isinstance(part.source, bytes) or part.source[:5].lower() == "data:":
            return part.source
        try:
            return await self.fetcher.fetch(part.source, count)
        except ValueError as error:
            raise refused(part, str(error)) from error

    async def _ask(self, part: ImagePart, file: bytes, digest: bytes, owner: str) -> ReadImage:
        answer: Answer | None = self._find(digest)
        if answer is None:
            await self._turns.take(owner)
            asked = run_to_end(self._ask_process(file, digest))  # the process works on for a cancelled request
            asked.add_done_callback(lambda _: self._turns.give_back(owner))
            answer = await asyncio.shield(asked)
        match answer:
            case ReadImage():
                return answer
            case Busy():
                raise overloaded(f"{part.param}: no time to read it within {WALL_S:g} s: the machine is busy")
            case Refused():
                raise refused(part, answer.message)
        raise AssertionError(answer)

    async def _ask_process(self, file: bytes, digest: bytes) -> Answer:
        """Asks twice: images end their forks only, so a process that has ended was killed."""
        if (found := self._find(digest)) is not None:  # asked for by another meanwhile
            return found
        try:
            answer = await self._child.ask_twice(ReadFile(file), WALL_S + _SLACK_S, "image reader")
        except ChildError as error:
            raise not_ready("the process that reads images died and is started again; try again") from error
        if isinstance(answer, ReadImage):
            self._keep(digest, answer)
        return answer

    def _find(self, digest: bytes) -> ReadImage | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def _keep(self, digest: bytes, read: ReadImage) -> None:
        if digest in self._kept:
            return
        self._kept[digest] = read
        self._num_bytes += ENTRY_BYTES + len(read.text)
        while self._num_bytes > KEPT_BYTES:
            self._num_bytes -= ENTRY_BYTES + len(self._kept.popitem(last=False)[1].text)

    async def close(self) -> None:
        """End the process. Calls under way end with 503."""
        await self._child.close()
        await self.fetcher.close()


def _limit(param: str) -> Callable[[int], None]:
    """Counts bytes of one prompt's images; raises ApiError naming `param` when they are too many together."""
    num_bytes = 0

    def count(added: int) -> None:
        nonlocal num_bytes
        num_bytes += added
        if num_bytes > MAX_ALL_BYTES:
            why = f"{param}: its images have more than {MAX_ALL_BYTES} bytes together, and no more are read"
            raise bad_request(why, param, "invalid_image")

    return count


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. The first that fails ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def refused(part: ImagePart, why: str) -> ApiError:
    """400: the image is not taken."""
    return bad_request(f"{part.param}: {why}", part.param, "invalid_image")


def _open(part: ImagePart, source: str | bytes, fingerprint: str) -> tuple[bytes, bytes]:
    """A file and its digest. On a thread."""
    try:
        file = source if isinstance(source, bytes) else read_data_uri(source)
    except ValueError as error:
        raise refused(part, str(error)) from error
    if len(file) > MAX_FILE_BYTES:
        raise refused(part, too_large(len(file)))
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(file)
    return file, digest.digest()
