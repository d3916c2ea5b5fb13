"""One streamed request over the public gRPC API, on its own thread, observed token by token."""

import random
import threading
import time
from collections.abc import Sequence

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2, inference_pb2_grpc

CLIENT_S = 120.0  # the client's own deadline: reaching it means that the service let the request hang


def draw_salt(dice: random.Random) -> str:
    """Half of the time empty, so that cached pages are found; otherwise a new salt."""
    return dice.choice(("", f"{dice.getrandbits(64):x}"))


class Asking:
    """A running greedy request. `tokens` grows; at the end `code` and `detail` are set, None and "" on success."""

    def __init__(
        self,
        address: str,
        prompt: Sequence[int],
        num_tokens: int,
        timeout_s: float = CLIENT_S,
        model: str = "",
        cache_salt: str = "",
    ) -> None:
        self.prompt = prompt
        self._timeout_s = timeout_s
        self.num_tokens = num_tokens
        self.tokens: list[int] = []
        self.code: grpc.StatusCode | None = None
        self.detail = ""
        self.retry_after_s = 0  # from the error: how long to wait before the next try
        self.seconds = 0.0
        self.longest_pause_s = 0.0  # between messages, or before the first
        self._changed = threading.Condition()
        self._is_over = False
        request = inference_pb2.GenerateRequest(
            model=model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            max_tokens=num_tokens,
            temperature=0,
            ignore_eos=True,
            cache_salt=cache_salt,
        )
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._call = inference_pb2_grpc.InferenceStub(self._channel).Generate(request, timeout=timeout_s)
        self._thread = threading.Thread(target=self._listen, name="asking", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        begun = last = time.monotonic()
        try:
            for message in self._call:
                now = time.monotonic()
                self.longest_pause_s, last = max(self.longest_pause_s, now - last), now
                with self._changed:
                    self.tokens.extend(message.token_ids)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.code, self.detail = error.code(), error.details() or ""
            self.retry_after_s = _read_retry_delay(error)
        finally:
            self.seconds = time.monotonic() - begun
            self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - last)
            self._channel.close()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def has_hung(self) -> bool:
        """Whether the client's own deadline ended it."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED

    def wait_for_tokens(self, count: int) -> None:
        """Wait for `count` tokens; AssertionError if the request ends earlier."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.tokens) >= count or self._is_over, self._timeout_s)
        assert len(self.tokens) >= count, f"only {len(self.tokens)} tokens came: {self.code} {self.detail}"

    def cancel(self) -> None:
        self._call.cancel()

    def finish(self) -> "Asking":
        self._thread.join(self._timeout_s + 10)
        assert self._is_over, "the request hangs beyond the client's own deadline"
        return self

    def answer(self) -> list[int]:
        """All tokens of a request that succeeds."""
        self.finish()
        assert self.code is None, f"{self.code}: {self.detail}"
        return self.tokens


def _read_retry_delay(error: grpc.RpcError) -> int:
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        detail.Unpack(retry)
    return int(retry.retry_delay.seconds)
