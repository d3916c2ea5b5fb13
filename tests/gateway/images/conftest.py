"""A service whose model takes images, with a resolver and a network of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI

from gateway.images.fetch import ImageFetcher
from gateway.images.reader import Images
from gateway.request.prepare import ApiOptions, ServedModels
from tests.support.api_server import ANSWER, Served, run_api
from tests.support.vision import write_vision

PUBLIC, OTHER = "93.184.216.34", "2606:4700::1111"
HOSTS = ("img.example", "*.cdn.example", "127.0.0.1", "2130706433")


@dataclass
class Network(httpx.AsyncBaseTransport):
    """What is behind each host: addresses, of which each look-up takes the next, and what each path answers."""

    names: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    answers: dict[str, httpx.Response] = field(default_factory=dict)
    asked: list[httpx.Request] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host].pop(0)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.answers[request.url.path]

    def serve(
        self,
        path: str,
        status: int = 200,
        headers: Mapping[str, str] = {},
        *,
        body: bytes | httpx.AsyncByteStream = b"",
    ) -> None:
        stream = (
            httpx.ByteStream(body) if isinstance(body, bytes) else body
        )  # not read, nor unpacked, before it is sent
        self.answers[path] = httpx.Response(status, headers=headers, stream=stream)


class Endless(httpx.AsyncByteStream):
    """A body that does not end."""

    def __init__(self, most: int | None = None) -> None:
        """most: MiB that are sent before it stalls."""
        self.num_sent, self._most = 0, most
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.has_begun.set()
        while self.num_sent != self._most:
            self.num_sent += 1
            yield bytes(1 << 20)
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.has_ended.set()


@dataclass(frozen=True)
class Vision:
    """The service, and what its model's images go through."""

    served: Served
    images: Images
    network: Network


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    network = Network()
    found: list[Images] = []

    def extend(app: FastAPI, models: ServedModels) -> None:
        images = models.models[0].images
        assert images is not None
        images.fetcher = ImageFetcher(HOSTS, network.resolve, network)
        found.append(images)

    options = ApiOptions(max_image_pixels=1 << 20, tool_format="hermes", max_body_bytes=40 << 20)
    with run_api(tmp_path_factory.mktemp("vision"), options, write_vision, extend=extend) as served:
        yield Vision(served, found[0], network)


@pytest.fixture
def vision(running: Vision) -> Vision:
    running.served.engine.reset(running.served.script(ANSWER))
    network = running.network
    network.names.clear()
    network.answers.clear()
    network.asked.clear()
    return running
