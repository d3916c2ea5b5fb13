"""How commands reach a service: this machine straight, others by the proxies that the environment names."""

import httpx

from runtime.addresses import is_loopback


class AddressError(Exception):
    """The URL, or the environment's way to it, cannot be used; says what to do."""


def open_client(
    url: str, api_key: str, timeout: httpx.Timeout, transport: httpx.BaseTransport | None = None
) -> httpx.Client:
    """A client of the service at `url`; connects to nobody yet. Raises AddressError."""
    headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    try:
        host = httpx.URL(url).raw_host.decode()
    except httpx.InvalidURL as error:
        raise AddressError(f"{url!r} is no URL ({error}): set --url to one such as http://127.0.0.1:8000") from error
    if transport is None and is_loopback(host):
        transport = httpx.HTTPTransport()  # with one of our own, httpx looks for no proxies
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=transport)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise AddressError(
            f"the proxy that the environment names cannot be used ({error}): set ALL_PROXY, HTTP_PROXY and HTTPS_PROXY "
            "to http:// addresses, or unset them"
        ) from error
