"""API keys: who sends a request, by its headers. Knows keys by their SHA-256 only, and neither REST nor gRPC."""

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from gateway.access.allowance import Allowance
from gateway.errors import ApiError

Headers = Iterable[tuple[str | bytes, str | bytes]]  # names in lower case; of equal ones the first counts


@dataclass(frozen=True, slots=True)
class Key:
    """An API key, and what its requests may do."""

    name: str  # in metrics and logs; empty: no key was asked for
    digest: bytes  # SHA-256 of the key
    is_admin: bool = False  # it may load and unload adapters
    models: tuple[str, ...] = ()  # names of models and adapters that it may use; empty: all
    priority: int | None = None  # of requests that name none, and the best that others get; None: any
    allowance: Allowance = field(default_factory=Allowance, hash=False)

    @property
    def owner(self) -> str:
        """Names the key in files of batches."""
        return self.digest.hex()[:32]

    def salted(self, cache_salt: str) -> str:
        """A salt for KV that no other key gets, from a request's own."""
        return sha256(self.digest + cache_salt.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def session_of(self, given: str) -> str:
        """A name that no other key's session has, from a request's own; empty if it has none."""
        named = self.digest + b"session" + given.encode("utf-8", "surrogatepass")
        return sha256(named).hexdigest()[:32] if given else ""

    def order(self, given: int | None) -> int | None:
        """The priority of a request that names this one."""
        if given is None:
            return self.priority
        return given if self.priority is None else max(given, self.priority)


KEY_OF_REQUEST = "key"  # in the state of an HTTP request: its Key
ANYBODY = Key("", sha256(b"").digest())


class Keys:
    """All keys that are accepted. Compares digests in constant time."""

    def __init__(self, api_keys: Sequence[str] = (), admin_key: str = "", *, has_file: bool = False) -> None:
        """`admin_key`: loads and unloads adapters, and is not an API key; empty: there is none.

        `has_file`: there are others, which `replace` says.
        """
        self._fixed = [Key(f"key-{number}", _digest(key)) for number, key in enumerate(api_keys, 1)]
        self._keys = self._fixed
        self._admin = [Key("admin", _digest(admin_key), is_admin=True)] if admin_key else []
        self.is_open = not api_keys and not has_file  # no key is asked for
        self.are_several = len(api_keys) > 1 or has_file

    def replace(self, keys: Sequence[Key]) -> None:
        """Accepts these keys, besides those of the start. One that is as before keeps what it has left."""
        before = {key.name: key for key in self._keys}
        self._keys = [*self._fixed, *(before[key.name] if before.get(key.name) == key else key for key in keys)]

    def check(self, headers: Headers) -> Key:
        """The key of a request. Raises ApiError 401 if it has none that is accepted, unless none is asked for."""
        if self.is_open:
            return ANYBODY
        key = _find(self._keys, *read_keys(headers))
        if key is None:
            message = "a valid API key is needed; send it as 'Authorization: Bearer <key>'"
            raise ApiError(401, message, None, "invalid_api_key")
        return key

    def check_admin(self, headers: Headers) -> Key:
        """The admin key, which a request has as its bearer token. Raises ApiError 401, or 403 if none is configured."""
        admins = [*self._admin, *(key for key in self._keys if key.is_admin)]
        if not admins:
            message = "start the gateway with --admin-key (BATON_ADMIN_KEY) if this should be allowed here"
            raise ApiError(403, message, None, "no_admin_key")
        bearer, _ = read_keys(headers)
        key = _find(admins, bearer)
        if key is None:
            message = "the key given as --admin-key is needed; send it as 'Authorization: Bearer <key>'"
            raise ApiError(401, message, None, "invalid_admin_key")
        return key

    def find_owner(self, owner: str) -> Key | None:
        """The key that files of batches name so, if it is still accepted."""
        known = [ANYBODY] if self.is_open else self._keys
        return next((key for key in known if key.owner == owner), None)


def read_keys(headers: Headers) -> tuple[bytes | None, bytes | None]:
    """The keys in the headers: the token of `Authorization: Bearer`, and `x-api-key`. Nothing else reads these."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        name = _to_bytes(name)
        if name in (b"authorization", b"x-api-key"):
            found.setdefault(name, _to_bytes(value).strip())
    scheme, *token = found.get(b"authorization", b"").split(None, 1) or (b"",)
    return (token[0] if token and scheme.lower() == b"bearer" else None), found.get(b"x-api-key")


def _find(keys: Sequence[Key], *given: bytes | None) -> Key | None:
    """The one of the keys that is given, whatever the number of those before it: all are compared."""
    found = None
    for digest in [sha256(one).digest() for one in given if one is not None]:
        for key in keys:
            if hmac.compare_digest(digest, key.digest):
                found = found or key
    return found


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _to_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
