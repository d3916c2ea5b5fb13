"""Exit status 0 when a process in this container serves: `http PORT` asks /live, `grpc PORT` the health service."""

import os
import sys
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def is_live(port: str) -> bool:
    """Whether a gateway answers; a refusal raises OSError. /ready needs the API key, and is no reason to restart."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # none, whatever the environment names
    with opener.open(f"http://127.0.0.1:{port}/live", timeout=TIMEOUT_S) as answer:
        return bool(answer.status == 200)


def is_serving(port: str) -> bool:
    """What a worker's health service says."""
    with open_channel(f"127.0.0.1:{port}", os.environ.get("BATON_TLS_DIR")) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def open_channel(address: str, tls_dir: str | None) -> grpc.Channel:
    """With the fleet's own certificate when there is one, which must name 127.0.0.1."""
    options = (("grpc.enable_http_proxy", 0),)
    if not tls_dir:
        return grpc.insecure_channel(address, options)
    ca, key, cert = ((Path(tls_dir) / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem"))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)


def main(kind: str, port: str) -> int:
    """The exit status."""
    try:
        return 0 if {"http": is_live, "grpc": is_serving}[kind](port) else 1
    except (OSError, grpc.RpcError) as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
