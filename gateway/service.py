"""The public gRPC service: the same requests, rules and errors as REST.

Knows protobuf messages and gRPC's calls; must not know text or who generates.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.access import REQUEST_ID_HEADER, pick_request_id, unique_id
from gateway.answer import Totals, stream_choices
from gateway.errors import ApiError
from gateway.front import Front
from gateway.grpc_answers import logprob_messages, timing_message
from gateway.grpc_errors import KeyInterceptor, abort_with
from gateway.grpc_requests import generate_request
from gateway.metrics import RequestMeter
from gateway.patience import waking_timeout
from protos import inference_pb2, inference_pb2_grpc

_log = structlog.get_logger()


def build_interceptors(front: Front) -> Sequence[grpc.aio.ServerInterceptor]:
    """What the gRPC server needs at construction."""
    return [KeyInterceptor(front.options.api_keys)]


def add_inference_services(server: grpc.aio.Server, front: Front) -> None:
    """Adds Inference, health and reflection."""
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(front), server)
    health_pb2_grpc.add_HealthServicer_to_server(ReadinessService(front), server)
    names = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    ]
    reflection.enable_server_reflection(names, server)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(  # noqa: N802
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> None:
        """Streams continuations of one prompt.

        A cancelled call closes the ring's iterators; so does a client that stops reading. It writes rather than yields:
        a cancelled write is then seen here, where the iterator is closed.
        """
        request_id = pick_request_id(_metadata(context, REQUEST_ID_HEADER))
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
                async with aclosing(self._responses(request, request_id)) as responses:
                    async for response in responses:
                        async with waking_timeout(self._front.options.stalled_client_s):
                            await context.write(response)
            except ApiError as error:
                await abort_with(context, error)
            except TimeoutError:
                _log.warning("client stopped reading; request cancelled")
                await context.abort(grpc.StatusCode.CANCELLED, "the client stopped reading")

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse],
    ) -> inference_pb2.ListModelsResponse:
        """The models served."""
        model = inference_pb2.Model(id=self._front.served_name, context_tokens=self._front.tokenizer.context_tokens)
        return inference_pb2.ListModelsResponse(models=[model])

    async def _responses(
        self, request: inference_pb2.GenerateRequest, request_id: str
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        meter = RequestMeter(self._front.metrics)
        raw = generate_request(request)
        job = await self._front.prepare(raw, unique_id(request_id))
        totals = Totals(job)
        async with aclosing(stream_choices(self._front, job, meter)) as pieces:
            async for index, piece in pieces:
                totals.add(index, piece)
                yield inference_pb2.GenerateResponse(
                    text=piece.text,
                    token_ids=piece.token_ids,
                    finish_reason=piece.finish_reason or "",
                    usage=None
                    if totals.num_open
                    else inference_pb2.Usage(prompt_tokens=totals.num_prompt, completion_tokens=totals.num_completion),
                    index=index,
                    logprobs=logprob_messages(piece),
                    timing=timing_message(piece.timing) if raw.with_timing and piece.timing else None,
                )


class ReadinessService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1.Health: serving while the ring is ready. `Watch` is not implemented, as the protocol allows."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Check(  # noqa: N802
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        """The state of the server ("") or of Inference."""
        if request.service not in ("", "baton.v1.Inference"):
            await abort_with(context, ApiError(404, f"no service {request.service[:100]!r} here", "service"))
        is_ready = self._front.ring.check_ready() is None
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else None
    return None
