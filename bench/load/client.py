"""Asks for one streamed completion and records it. Knows HTTP; what the bytes mean, `answers` knows."""

import time

import httpx

from bench.load.answers import Answer, Recorder
from bench.load.prompts import Prompt
from bench.load.server import Server


class Client:
    """Asks one server; any number of requests at once."""

    def __init__(self, http: httpx.AsyncClient, server: Server, temperature: float = 0.0) -> None:
        self._http = http
        self._server = server
        self._temperature = temperature

    async def ask(self, prompt: Prompt, num_tokens: int) -> Answer:
        """One answer of `num_tokens`, where the server lets lengths be pinned. Errors are in it, not raised."""
        recorder = Recorder(time.perf_counter())
        await self.stream(prompt, num_tokens, recorder)
        return recorder.answer()

    async def stream(self, prompt: Prompt, num_tokens: int, recorder: Recorder) -> None:
        """The same into `recorder`, which can be read meanwhile, and afterwards when this is cancelled."""
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._server.extra,
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    text = (await response.aread()).decode(errors="replace")
                    recorder.error = f"HTTP {response.status_code}: {text[:300]}"
                    return
                async for data in response.aiter_raw():
                    recorder.feed(data, time.perf_counter())
        except httpx.HTTPError as error:
            recorder.error = recorder.error or f"{type(error).__name__}: {error}"
