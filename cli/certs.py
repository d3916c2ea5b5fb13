"""`baton certs`: a test authority and one certificate for a whole fleet."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from cli.service import CommandError
from runtime.addresses import find_ip
from runtime.settings import ConfigError

SECRET_MODE, PUBLIC_MODE = 0o600, 0o644
CLOCK_SKEW = timedelta(minutes=5)  # of machines that will check
MAX_DAYS = 3650
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def certs(folder: Path, /, *, host: tuple[str, ...] = (), days: int = 365, force: bool = False) -> int:
    """Make a test authority (ca.pem, ca-key.pem) and one fleet certificate (cert.pem, key.pem) for --tls-dir.

    Args:
        folder: Where to put the files.
        host: Name or address by which workers are reached, besides this machine's own; repeat for several.
        days: How long they are valid.
        force: Replace files that are there.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"days={days} cannot be used: --days needs 1 to {MAX_DAYS}")
    files = build_files((*LOCAL_HOSTS, *host), datetime.now(UTC), timedelta(days=days))
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise ConfigError(f"{folder} has {', '.join(there)} already: name another folder, or replace them with --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (content, mode) in files.items():
            write_file(folder / name, content, mode)
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}") from error
    print(f"{folder}: start every process with --tls-dir {folder}; keep ca-key.pem elsewhere, no process needs it")
    return 0


def build_files(hosts: tuple[str, ...], now: datetime, lifetime: timedelta) -> dict[str, tuple[bytes, int]]:
    """File name |-> content and mode."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name.from_rfc4514_string("CN=Baton test authority")
    authority_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    signer_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id)
    roles = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    names = x509.SubjectAlternativeName([_alternative_name(host) for host in hosts])

    def sign(name: x509.Name, own_key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
        is_authority = own_key is ca_key
        usage = x509.KeyUsage(
            digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority,
            content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(own_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + lifetime)
            .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
            .add_extension(usage, critical=True)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    return {
        "ca.pem": (sign(ca_name, ca_key, authority_id), PUBLIC_MODE),
        "ca-key.pem": (_key_bytes(ca_key), SECRET_MODE),
        "cert.pem": (sign(x509.Name.from_rfc4514_string("CN=Baton fleet"), key, roles, names, signer_id), PUBLIC_MODE),
        "key.pem": (_key_bytes(key), SECRET_MODE),
    }


def _alternative_name(host: str) -> x509.GeneralName:
    address = find_ip(host)
    try:
        return x509.DNSName(host) if address is None else x509.IPAddress(address)
    except ValueError as error:
        raise ConfigError(f"host={host!r} cannot be used: --host needs an ASCII name or an IP address") from error


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_file(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` by a new file that never had another mode."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
