"""Files and batches as OpenAI's clients see them."""

import time
from typing import Literal, TypeVar

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired"]
OVER: frozenset[Status] = frozenset({"failed", "completed", "cancelled", "expired"})


class FileObject(msgspec.Struct, tag_field="object", tag="file"):
    """A file, as OpenAI's clients see it. Times are in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class BatchFault(msgspec.Struct):
    """Why a whole batch failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct):
    """Why a whole batch failed, as a list."""

    data: list[BatchFault]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Lines of a batch: all, answered, and named in its error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, tag_field="object", tag="batch"):
    """A batch, as OpenAI's clients see it. Times are in Unix seconds; null: not yet."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expired_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: Status) -> None:
        """Puts the batch into this state, which is not `validating`."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def cancel(self, asked_s: int) -> None:
        """Notes that its client has asked to cancel it. No effect on one that is over."""
        if self.status not in OVER and self.status != "cancelling":
            self.status, self.cancelling_at = "cancelling", asked_s


Value = TypeVar("Value", FileObject, Batch)
