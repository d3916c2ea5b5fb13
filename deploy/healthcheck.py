"""Exit status 0 when a process in this container serves: `http PORT` asks /live, `grpc PORT` the health service."""

import sys
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def is_live(port: str) -> bool:
    """Whether a gateway answers; a refusal raises OSError. /ready needs the API key, and is no reason to restart."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=TIMEOUT_S) as answer:
        return bool(answer.status == 200)


def is_serving(port: str) -> bool:
    """What a worker's health service says."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(kind: str, port: str) -> int:
    """The exit status."""
    try:
        return 0 if {"http": is_live, "grpc": is_serving}[kind](port) else 1
    except (OSError, grpc.RpcError) as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
