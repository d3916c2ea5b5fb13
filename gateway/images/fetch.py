"""Fetches images from hosts that the operator allows: `--allow-image-url`.

A name is resolved once, all its addresses must be public, and the connection goes to one that was checked: what DNS
says later changes nothing. Each redirect is checked like the first URL.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import httpx

from gateway.images.parts import MAX_URL_CHARS, too_large
from runtime.addresses import is_public, matches_host
from wire.image_formats import MAX_FILE_BYTES

FETCH_S = 10.0  # for all of it
MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "baton"}
# As many as images may wait (reader.py); a kept connection is another host's.
_ONCE = httpx.Limits(max_connections=None, max_keepalive_connections=0)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # (host, port) -> addresses; raises OSError


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Finds addresses of a host by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class ImageFetcher:
    """Fetches files by URL."""

    def __init__(
        self,
        hosts: Sequence[str],
        resolve: Resolve = resolve_host,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`hosts`: names, or *.SUFFIX for all names below one. Without any, everything is refused."""
        self._hosts = [host.lower() for host in hosts]
        self._resolve = resolve
        self._client = httpx.AsyncClient(trust_env=False, limits=_ONCE, transport=transport) if hosts else None

    async def fetch(self, url: str, count: Callable[[int], None] = lambda num_bytes: None) -> bytes:
        """The file at a URL. Raises ValueError saying why there is none.

        `count`: called with the bytes of each piece as it arrives; what it raises ends the fetch.
        """
        try:
            async with asyncio.timeout(FETCH_S):
                for _redirect in range(MAX_REDIRECTS + 1):
                    found = await self._follow(url, count)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise ValueError(f"it was not fetched within {FETCH_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise ValueError(f"it cannot be fetched: {type(error).__name__}") from error
        raise ValueError(f"it is behind more than {MAX_REDIRECTS} redirects")

    async def _follow(self, given: str, count: Callable[[int], None]) -> bytes | str:
        """The file, or where the server says that it is."""
        url, host = self._check(given)
        assert self._client is not None
        addresses = await self._resolve(host, _PORTS[url.scheme])
        if not addresses or not all(map(is_public, addresses)):
            raise ValueError(f"{host} has no address, or one that is not public")
        target = url.copy_with(host=addresses[0])
        headers = {**_HEADERS, "host": host}
        extensions = {"sni_hostname": host}  # by which the certificate is checked as well
        async with self._client.stream("GET", target, headers=headers, extensions=extensions) as answer:
            if answer.has_redirect_location:
                return str(url.join(answer.headers["location"]))
            if answer.status_code != 200:
                raise ValueError(f"{host} answers with status {answer.status_code}")
            pieces, num_bytes = list[bytes](), 0
            async for piece in answer.aiter_raw():
                pieces.append(piece)
                num_bytes += len(piece)
                if num_bytes > MAX_FILE_BYTES:
                    raise ValueError(too_large(num_bytes))
                count(len(piece))
            return b"".join(pieces)

    def _check(self, given: str) -> tuple[httpx.URL, str]:
        """The URL and its host. Raises ValueError unless it is allowed."""
        if self._client is None:
            raise ValueError("this service fetches no images; send the file in a data URI, data:image/png;base64,")
        if len(given) > MAX_URL_CHARS:
            raise ValueError(f"it has {len(given)} characters; a URL may have {MAX_URL_CHARS}")
        try:
            url = httpx.URL(given)
            host = url.raw_host.decode().lower().rstrip(".")
        except (httpx.InvalidURL, TypeError, ValueError) as error:
            raise ValueError("it is no URL") from error
        if url.scheme not in _PORTS or not host or url.userinfo or url.port not in (None, _PORTS[url.scheme]):
            raise ValueError("it must be an https or http URL with neither user nor port, or a data URI")
        if not matches_host(self._hosts, host):
            raise ValueError(f"{host[:80]} is no host from which this service fetches images")
        return url, host

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
