"""OpenVINO GenAI's continuous batching behind `/v1/completions`. Runs in its environment: needs only `openvino_genai`.

    python openvino_server.py FOLDER --port 8000 --threads 2 --cache-gib 1

Streams one chunk per token, and accepts token ids. One thread steps the pipeline while there is work.
"""

import argparse
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class Engine:
    """The pipeline and its thread."""

    def __init__(self, folder: Path, threads: int, cache_gib: int, precision: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self._running: dict[int, tuple[Any, queue.SimpleQueue[list[int] | None]]] = {}
        self._changed = threading.Condition()
        self._count = 0
        threading.Thread(target=self._step_on, daemon=True).start()

    def start(
        self, ids: list[int], num_tokens: int, ignore_eos: bool
    ) -> tuple[int, "queue.SimpleQueue[list[int] | None]"]:
        """(the request's number, a queue of its tokens; None ends it)"""
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        with self._changed:
            self._count += 1
            handle = self.pipeline.add_request(self._count, ov.Tensor(np.array([ids], np.int64)), config)
            self._running[self._count] = (handle, tokens)
            self._changed.notify()
            return self._count, tokens

    def stop(self, number: int) -> None:
        """Forget a request whose client disconnected."""
        with self._changed:
            found = self._running.pop(number, None)
        if found is not None:
            found[0].stop()

    def _step_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                running = list(self._running.items())
            self.pipeline.step()
            for number, (handle, tokens) in running:
                self._hand_out(number, handle, tokens)

    def _hand_out(self, number: int, handle: Any, tokens: "queue.SimpleQueue[list[int] | None]") -> None:
        while handle.can_read():
            for output in handle.read().values():
                tokens.put(list(output.generated_ids))
        if handle.get_status() != genai.GenerationStatus.RUNNING:
            tokens.put(None)
            with self._changed:
                self._running.pop(number, None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    model = ""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": self.model, "owned_by": "openvino-genai"}]})
        elif self.path == "/version":
            self._answer(200, {"version": genai.__version__})
        else:
            self._answer(404, {"error": "not here"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._answer(404, {"error": "not here"})
            return
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self.engine.tokenizer.encode(prompt).input_ids.data[0].tolist()
        number, tokens = self.engine.start(ids, body.get("max_tokens", 16), bool(body.get("ignore_eos")))
        try:
            if body.get("stream"):
                self._stream(len(ids), tokens)
            else:
                self._complete(len(ids), tokens)
        except OSError:
            self.close_connection = True
        finally:
            self.engine.stop(number)

    def _complete(self, num_input: int, tokens: "queue.SimpleQueue[list[int] | None]") -> None:
        found: list[int] = []
        while (new := tokens.get()) is not None:
            found += new
        text = self.engine.tokenizer.decode(found)
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        self._answer(200, {"choices": [choice], "usage": count(num_input, len(found))})

    def _stream(self, num_input: int, tokens: "queue.SimpleQueue[list[int] | None]") -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        num_output = 0
        while (new := tokens.get()) is not None:
            num_output += len(new)
            text = self.engine.tokenizer.decode(new)
            self._send({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        self._send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._send({"choices": [], "usage": count(num_input, num_output)})
        self._send(None)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, event: dict[str, Any] | None) -> None:
        data = b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, status: int, reply: dict[str, Any]) -> None:
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def count(num_input: int, num_output: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_input,
        "completion_tokens": num_output,
        "total_tokens": num_input + num_output,
    }


class Server(ThreadingHTTPServer):
    """One thread per connection."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    Handler.engine = Engine(options.folder, options.threads, options.cache_gib, options.precision)
    Handler.model = options.folder.name
    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
