"""Peers from outside the fleet: certificates of their own, and one call to a worker."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from cli.certs import build_files, write_file
from protos import worker_pb2
from runtime.trust import SECRET_KEY, TLS_FILES, TlsFiles

HOSTS = ("localhost", "127.0.0.1")
CALL_S = 60.0


def issue(begin: datetime | None = None, lifetime: timedelta = timedelta(days=1)) -> TlsFiles:
    """A certificate by an authority of its own."""
    files = build_files(HOSTS, begin or datetime.now(UTC), lifetime)
    return TlsFiles(*(files[name][0] for name in TLS_FILES))


def write_tls_dir(folder: Path, files: TlsFiles) -> Path:
    """Write `files` in the layout of --tls-dir."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(TLS_FILES, (files.ca, files.cert, files.key), strict=True):
        write_file(folder / name, content, 0o600)
    return folder


def open_channel(address: str, files: TlsFiles | None) -> grpc.Channel:
    """A connection that no other channel shares."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if files is None:
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    return grpc.secure_channel(address, credentials, options)


def ask_status(channel: grpc.Channel, secret: str = "") -> grpc.StatusCode:
    """The status of a worker's answer."""
    call: Any = channel.unary_unary("/baton.v1.Worker/Status", worker_pb2.StatusRequest.SerializeToString)
    try:
        call(worker_pb2.StatusRequest(), metadata=((SECRET_KEY, secret),) if secret else (), timeout=CALL_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def knock(address: str, files: TlsFiles | None, secret: str = "") -> grpc.StatusCode:
    """One call on a new connection."""
    with open_channel(address, files) as channel:
        return ask_status(channel, secret)
