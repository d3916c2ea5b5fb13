"""Turns the gRPC error with which a worker ends a call into an attempt's failure. Pure, but for the types of gRPC."""

from typing import Literal

import grpc

from gateway.router.request import AttemptFailed
from gateway.router.worker_client import GONE
from gateway.router.worker_view import Role
from runtime import rpc
from runtime.malformed import MALFORMED

REFUSALS: dict[str, Literal["no room", "no adapter", "no slot", "compiling", "restoring"]] = {
    rpc.NO_ROOM: "no room",
    rpc.OVER_GOAL: "no room",
    rpc.NO_ADAPTER: "no adapter",
    rpc.NO_SLOT: "no slot",
    rpc.GRAMMAR_BUSY: "compiling",
    rpc.RESTORING: "restoring",
}


def read_refusal(role: Role, address: str, error: grpc.aio.AioRpcError) -> AttemptFailed:
    detail = f"{address}: {error.details()}"
    metadata = tuple(error.trailing_metadata() or ())
    if (refused_for := str(dict(metadata).get(rpc.REFUSED_FOR, ""))) in REFUSALS:
        return AttemptFailed(REFUSALS[refused_for], detail, role)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT and error.details() != MALFORMED:  # it was damaged on its way
        if role == "decode":
            detail = error.details() or "the decode worker refused the request"
        is_grammar = (rpc.FIELD_AT_FAULT, "grammar") in metadata
        param = str(dict(metadata).get(rpc.PARAM_AT_FAULT, ""))
        return AttemptFailed("invalid", detail, role, is_grammar=is_grammar, param=param)
    is_absent = error.code() in GONE or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return AttemptFailed("absent" if is_absent else "failed", detail, role)
