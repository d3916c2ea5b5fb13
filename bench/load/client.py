"""Requests one streamed completion and records it. Knows HTTP; `answers` parses the bytes."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx

from bench.load.answers import Answer, Recorder
from bench.load.prompts import Message, Prompt
from bench.load.server import Server

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class Client:
    """A client of one server; supports any number of concurrent requests."""

    def __init__(self, http: httpx.AsyncClient, server: Server, temperature: float = 0.0) -> None:
        self._http = http
        self._server = server
        self._temperature = temperature

    async def ask(
        self, prompt: Prompt | Sequence[Message], num_tokens: int, fields: Mapping[str, Any] = NO_FIELDS
    ) -> Answer:
        """One answer of `num_tokens`, if the server can pin lengths. Errors are in the answer, not raised.

        `fields`: further ones of the request.
        """
        recorder = Recorder(time.perf_counter())
        await self.stream(prompt, num_tokens, recorder, fields)
        return recorder.answer()

    async def stream(
        self, prompt: Prompt | Sequence[Message], num_tokens: int, recorder: Recorder,
        fields: Mapping[str, Any] = NO_FIELDS,
    ) -> None:  # fmt: skip
        """Like `ask`, into `recorder`, which can be read at any time, even after a cancellation."""
        is_chat = not isinstance(prompt, str) and isinstance(prompt[0], dict)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body = {
            "model": self._server.model,
            "messages" if is_chat else "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._server.extra,
            **fields,
        }
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if not response.is_success:
                    text = (await response.aread()).decode(errors="replace")
                    recorder.error = f"HTTP {response.status_code}: {text[:300]}"
                    return
                async for data in response.aiter_raw():
                    recorder.feed(data, time.perf_counter())
        except httpx.HTTPError as error:
            recorder.error = recorder.error or f"{type(error).__name__}: {error}"
