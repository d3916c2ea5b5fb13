"""The file of --api-keys-file: a TOML table `[[key]]` for each key, by its SHA-256. Read again when it changes."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from gateway.access.allowance import Allowance
from gateway.access.keys import Key, Keys
from runtime.file_watch import FileWatch

_log = structlog.get_logger()

MAX_BYTES = 1 << 20
MAX_KEYS = 1000  # each request is compared with all of them: about 0.05 ms
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TAKEN = re.compile(r"key-\d+|user-.*|other|none|admin")  # names of other owners in metrics
Limit = Annotated[int, Meta(ge=1, le=10**12)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key as the file has it."""

    name: str
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    admin: bool = False
    models: tuple[str, ...] = ()
    priority: Annotated[int, Meta(ge=0, le=9)] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None

    def build(self) -> Key:
        return Key(
            self.name,
            bytes.fromhex(self.sha256),
            self.admin,
            self.models,
            self.priority,
            Allowance(self.requests_per_minute or 0, self.tokens_per_minute or 0),
        )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[tuple[Entry, ...], Meta(max_length=MAX_KEYS)] = ()


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Raises OSError, and ValueError that names the file and what is wrong in it."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"--api-keys-file {path} has {size} bytes; at most {MAX_BYTES} are read")
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text("utf-8-sig")), _File).key
        for entry in entries:
            check_name(entry.name)
        for field, values in (("name", [one.name for one in entries]), ("sha256", [one.sha256 for one in entries])):
            if twice := next((value for value in values if values.count(value) > 1), None):
                raise ValueError(f"{field} = {twice!r} comes twice; keep one")
    except (ValueError, RecursionError) as error:  # includes those of TOML, UTF-8 and msgspec
        raise ValueError(f"--api-keys-file {path} cannot be used: {error}") from error
    return entries


def check_name(name: str) -> None:
    """Raises ValueError unless a key may have the name."""
    if not NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        raise ValueError(
            f"a key's name is {name[:100]!r}; it needs 1 to 64 letters, digits, '_', '.' or '-', and metrics have "
            "other, none, admin, key-NUMBER and user-... for others"
        )


class KeyFile:
    """Keeps `keys` as the file has them."""

    def __init__(self, path: Path, keys: Keys) -> None:
        """Reads it. Raises OSError, ValueError."""
        self._path, self._keys = path, keys
        self._watch = FileWatch(path)
        self._read()

    async def follow(self) -> None:
        """Reads it again whenever it changes. A file that cannot be used changes nothing, and is logged."""
        await self._watch.follow(self._read_again)

    def _read(self) -> Sequence[str]:
        """Returns the names."""
        entries = read_entries(self._path)
        self._keys.replace([entry.build() for entry in entries])
        return [entry.name for entry in entries]

    def _read_again(self) -> None:
        try:
            names = self._read()
        except (OSError, ValueError) as error:
            _log.warning("API keys stay as they were", reason=str(error))
        else:
            _log.info("API keys are read again", keys=", ".join(names))
