"""`baton keys`: gives a key to a client, by a line in the file of --api-keys-file."""

import json
import os
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from cli.service import CommandError
from gateway.access.key_file import Entry, check_name, read_entries
from runtime.settings import ConfigError

File = Annotated[Path, Parameter(env_var="BATON_API_KEYS_FILE")]


def keys(
    action: Literal["add"],
    name: str,
    /,
    *,
    file: File,
    admin: bool = False,
    model: tuple[str, ...] = (),
    priority: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
) -> int:
    """Draw an API key, add its SHA-256 to a file, and print the key: it is nowhere else.

    Args:
        action: add.
        name: Name of the key in metrics and logs.
        file: The gateway's --api-keys-file, which is made if it is not there.
        admin: The key may load and unload adapters too.
        model: Name of a model or adapter that the key may use; repeat for several. None: all.
        priority: Priority of its requests that name none, and the best that others get; 0 goes first, 9 last.
        requests_per_minute: Most requests a minute. None: any number.
        tokens_per_minute: Most tokens a minute, of prompts and answers. None: any number.
    """
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(f"{error}") from error
    key = f"baton-{secrets.token_urlsafe(32)}"
    digest = sha256(key.encode()).hexdigest()
    entry = Entry(name, digest, admin, model, priority, requests_per_minute, tokens_per_minute)
    try:
        _append(file.resolve(), entry)
    except OSError as error:
        raise CommandError(f"cannot write to {file}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    print(key)
    return 0


def _append(path: Path, entry: Entry) -> None:
    """Replaces the file as a whole, as a gateway may read it meanwhile. Raises OSError, ValueError."""
    before = path.read_text() if path.exists() else ""
    mode = path.stat().st_mode & 0o777 if before else 0o600
    if before and any(one.name == entry.name for one in read_entries(path)):
        raise ValueError(f"{path} has a key {entry.name} already: choose another name, or remove that one's table")
    lines = [f"{name} = {json.dumps(value)}" for name, value in msgspec.to_builtins(entry).items()]
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write("\n".join([*filter(None, [before.rstrip("\n")]), "[[key]]", *lines, ""]))
            file.flush()
            os.fsync(file.fileno())
        read_entries(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
