"""A running service, as commands call it: this machine directly, others by the proxies that the environment names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
from cyclopts import Parameter

from runtime.addresses import is_loopback

Url = Annotated[str, Parameter(env_var="BATON_URL", help="Where the service answers.")]
ApiKey = Annotated[str, Parameter(env_var="BATON_API_KEY", help="Key that the service wants.")]
URL = "http://127.0.0.1:8000"
TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0)
ADVICE = {  # status code |-> what to do
    401: "; set --api-key or BATON_API_KEY to one of the service's keys",
    403: "; set --url to the service itself, without a proxy",
    404: "; set --url to a Baton service, and --model to one that it has",
}


class CommandError(Exception):
    """A command cannot do its work. Says why, and what to do."""


class Service:
    """Owns the connection. All calls raise CommandError."""

    def __init__(self, url: str, api_key: str, transport: httpx.BaseTransport | None = None) -> None:
        """`url` may end in /v1. Connects with the first call."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        try:
            host = httpx.URL(self.url).raw_host.decode()
        except httpx.InvalidURL as error:
            raise CommandError(f"{url!r} is no URL ({error}): set --url to one such as {URL}") from error
        if transport is None and is_loopback(host):
            transport = httpx.HTTPTransport()  # given one, httpx looks for no proxies
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT, transport=transport)
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise CommandError(
                f"the proxy that the environment names cannot be used ({error}): set ALL_PROXY, HTTP_PROXY and "
                "HTTPS_PROXY to http:// addresses, or unset them"
            ) from error

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> httpx.Response:
        with self.call("GET", path) as response:
            response.read()
            return response

    def read_json(self, path: str) -> Any:
        """The JSON value at `path`."""
        response = self.get(path)
        try:
            return response.json()
        except ValueError as error:
            raise CommandError(f"{response.url} answers no JSON, but {response.text[:100]!r}: set --url") from error

    @contextmanager
    def call(self, method: str, path: str, body: object = None) -> Iterator[httpx.Response]:
        """An answer whose status is good, to be read as it comes."""
        try:
            with self._client.stream(method, path, json=body) as response:
                if not response.is_success:
                    response.read()
                    raise CommandError(describe_refusal(response))
                yield response
        except ValueError as error:
            advice = "/set shows the settings, /set NAME= drops one"
            raise CommandError(f"this cannot be sent ({error}); {advice}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise CommandError(f"{self.url} does not answer ({error}): start `baton serve`, or set --url") from error
        except httpx.HTTPError as error:
            raise CommandError(f"the connection to {self.url} broke: {error or type(error).__name__}") from error


def describe_refusal(response: httpx.Response) -> str:
    """Describe an error that the service answered with, and what to do about it."""
    try:
        error = response.json()["error"]
        text, param = f"{error['message']}", error.get("param")
        text += f" (param {param})" if param and param not in text else ""
    except (ValueError, KeyError, TypeError):
        text = response.text[:200] or response.reason_phrase
    code = response.status_code
    advice = f"; try again in {response.headers.get('retry-after', 'a few')} s" if code in (429, 503) else ""
    return f"{response.url} refuses with {code}: {text}" + ADVICE.get(code, advice)
