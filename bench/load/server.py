"""Discovers which server answers at a URL, and how to send it requests.

Knows the dialects of Baton, vLLM and llama.cpp, and tries plainer requests with others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.load.prompts import build_letters, build_words
from runtime.addresses import is_loopback
from runtime.settings import ConfigError

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
PROBE_WORDS = 64
KEPT_S = 2.0  # lifetime of an idle connection: less than servers' 5 s and more
POOL_WORDS = 4000
WORDS_A_TOKEN = 0.5  # of build_words, if unknown
VERSION_PATHS = {"baton": "/version", "vllm": "/version", "llama.cpp": "/props"}
VERSION_KEYS = ("version", "build_info")


@dataclass(frozen=True, slots=True)
class Server:
    """A server's properties, as in saved files."""

    url: str
    model: str
    kind: str  # "baton", "vllm", "llama.cpp", or the owner in /v1/models
    version: str
    takes_ids: bool  # prompts may be token ids
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of each request beyond OpenAI's
    words_a_token: float = WORDS_A_TOKEN


@dataclass(frozen=True, slots=True)
class Dialect:
    """A request format: the kind of prompts, and fields beyond OpenAI's."""

    takes_ids: bool
    fields: Mapping[str, Any]


PINNED: Mapping[str, Any] = {"ignore_eos": True}  # answers have the requested length
DIALECTS = (Dialect(True, PINNED), Dialect(False, PINNED), Dialect(False, {}))


def open_http(url: str, api_key: str, num_connections: int) -> httpx.AsyncClient:
    """A client for this many concurrent requests. Raises ConfigError."""
    limits = httpx.Limits(
        max_connections=num_connections, max_keepalive_connections=num_connections, keepalive_expiry=KEPT_S
    )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        address = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        if address.scheme not in ("http", "https"):
            raise httpx.InvalidURL("it has no http:// in front")
    except httpx.InvalidURL as error:
        raise ConfigError(f"url={url!r} cannot be used ({error}): give one such as http://127.0.0.1:8000") from error
    transport = httpx.AsyncHTTPTransport(limits=limits) if is_loopback(address.host) else None  # none to localhost
    return httpx.AsyncClient(base_url=address, headers=headers, timeout=TIMEOUT, limits=limits, transport=transport)


async def discover(
    http: httpx.AsyncClient, model: str = "", known_ids: Sequence[int] = ()
) -> tuple[Server, Sequence[int]]:
    """Identify the server by short requests in each dialect until one is accepted; also returns token ids for prompts.

    `known_ids`: ordinary tokens, for a server without a tokenizer endpoint. Raises ConfigError.
    """
    listed = await _get(http, "/v1/models")
    models = [entry for entry in (listed or {}).get("data") or () if isinstance(entry, dict)]
    if not model and not models:
        raise ConfigError(f"url={http.base_url} lists no model: start the server, or set --model")
    model = model or str(models[0].get("id"))
    kind = await _find_kind(http, models)
    about = await _get(http, VERSION_PATHS.get(kind, "/version")) or {}
    version = next((str(about[key]) for key in VERSION_KEYS if about.get(key)), "")
    ids = known_ids or await read_pool(http, model)
    dialect, words_a_token = await _find_dialect(http, model, ids, {"include_timing": True} if kind == "baton" else {})
    server = Server(str(http.base_url), model, kind, version, dialect.takes_ids, dialect.fields, words_a_token)
    return server, ids if dialect.takes_ids else ()


async def _find_dialect(
    http: httpx.AsyncClient, model: str, ids: Sequence[int], extra: Mapping[str, Any]
) -> tuple[Dialect, float]:
    """The first dialect that the server accepts, and the words per token. Raises ConfigError."""
    refusal = ""
    for dialect in DIALECTS:
        if dialect.takes_ids and not ids:
            continue
        fields = {**dialect.fields, **extra}
        prompt: Any = list(ids[:PROBE_WORDS]) if dialect.takes_ids else " ".join(build_words()[:PROBE_WORDS])
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        try:
            response = await http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ConfigError(f"url={http.base_url} does not answer ({type(error).__name__}: {error})") from error
        if response.is_success:
            num_tokens = 0 if dialect.takes_ids else _read_prompt_tokens(response)
            return Dialect(dialect.takes_ids, fields), PROBE_WORDS / num_tokens if num_tokens else WORDS_A_TOKEN
        refusal = f"{response.status_code} {response.text[:300]}"
        if response.is_server_error:  # it may be loading: a plainer request would not help
            break
    raise ConfigError(f"url={http.base_url} refuses completions of model {model!r}: {refusal}")


async def read_pool(http: httpx.AsyncClient, model: str) -> Sequence[int]:
    """Ordinary token ids, from the server's own tokenizer; empty if it has no endpoint for it."""
    text = build_letters(POOL_WORDS)
    for body in (
        {"model": model, "prompt": text, "add_special_tokens": False},  # Baton, vLLM
        {"content": text, "add_special": False},  # llama.cpp
    ):
        try:
            response = await http.post("/tokenize", json=body)
            found = response.json()["tokens"] if response.is_success else ()
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ()
        if found and all(isinstance(token, int) for token in found):
            return sorted(set(found))
    return ()


async def _find_kind(http: httpx.AsyncClient, models: Sequence[Mapping[str, Any]]) -> str:
    status = await _get(http, "/status")
    if status and isinstance(status.get("workers"), list):
        return "baton"
    owner = str(models[0].get("owned_by") or "") if models else ""
    return {"llamacpp": "llama.cpp"}.get(owner, owner or "unknown")


async def _get(http: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """The object at `path`; None if there is none. Raises ConfigError if the server does not answer."""
    try:
        response = await http.get(path)
        found = response.json() if response.is_success else None
    except httpx.HTTPError as error:
        raise ConfigError(
            f"url={http.base_url} does not answer ({type(error).__name__}: {error}): is the server up, and --url right?"
        ) from error
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _read_prompt_tokens(response: httpx.Response) -> int:
    try:
        return int(response.json()["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0
