"""The certificate that clients see, on REST and gRPC. Read again when its files change: open connections go on."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from runtime.file_watch import FileWatch

_log = structlog.get_logger()


class ServerTls:
    """Owns the certificate. `context` and `credentials` are for listeners, which use the newest one."""

    def __init__(self, cert: Path, key: Path) -> None:
        """`cert`: PEM, the server's own first, then its issuers. Raises ValueError that names what is wrong."""
        self._cert, self._key = cert, key
        self._watch = FileWatch(cert, key)
        self._newest, self._pair = self._read()
        self.context, _ = self._read()
        self.context.sni_callback = self._use_newest
        self._given = self._pair  # to gRPC
        first, find_change = _for_grpc(self._pair), self._find_change
        self.credentials = grpc.dynamic_ssl_server_credentials(first, find_change)  # type: ignore[arg-type]  # None

    async def follow(self) -> None:
        """Reads the files again whenever they change. A pair that cannot be used changes nothing, and is logged."""
        await self._watch.follow(self._read_again)

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        """The TLS context for REST, and the key and certificate for gRPC, in PEM."""
        try:
            pair = self._key.read_bytes(), self._cert.read_bytes()
            own = x509.load_pem_x509_certificate(pair[1])
            if load_pem_private_key(pair[0], None).public_key() != own.public_key():
                raise ValueError("the key does not belong to the certificate")
            if not own.not_valid_before_utc <= (now := datetime.now(UTC)) <= own.not_valid_after_utc:
                raise ValueError(f"the certificate is not valid at {now:%F %R} UTC")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, lambda: "")
        except (
            OSError,
            ValueError,
            TypeError,
        ) as error:  # SSLError is an OSError; TypeError: a password
            files = f"--tls-cert {self._cert} and --tls-key {self._key}"
            raise ValueError(f"{files} cannot be used; they need PEM, the key without a password: {error}") from error
        return context, pair

    def _read_again(self) -> None:
        try:
            self._newest, self._pair = self._read()
        except ValueError as error:
            _log.warning("the certificate stays as it was", reason=str(error))
        else:
            _log.info("the certificate is read again", file=str(self._cert))

    def _use_newest(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext) -> None:
        """OpenSSL calls it in each handshake, also where the client names no host."""
        connection.context = self._newest

    def _find_change(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls it before each handshake, in threads of its own."""
        if self._given is (pair := self._pair):
            return None
        self._given = pair
        return _for_grpc(pair)


def _for_grpc(pair: tuple[bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([pair])
