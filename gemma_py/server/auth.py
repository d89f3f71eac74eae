"""Who may ask: the Host that a request names, the Origin of the page that sent it, and the key that it brings.

A page from elsewhere can make a browser send requests to a server on the same machine, and by changing what its own name
resolves to (DNS rebinding) even read the answers. It cannot change the Host and the Origin that the browser then sends.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemma_py.errors import InputError
from gemma_py.server.errors import ApiError

OPEN = frozenset({"/", "/health"})  # no key needed: neither says anything of anybody
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Keys:
    """Digests of the keys in a file, one a line; the keys themselves are not kept."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def read(cls, path: Path) -> "Keys":
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys or min(map(len, keys)) < 16:
            raise InputError(f"{path}: should hold a key a line, each of at least 16 characters")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def hold(self, key: bytes) -> bool:
        """Takes the same time for every key that is wrong."""
        given = _digest(key)
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """host: what the server listens on. names: other names that it goes by. origins: pages that may ask from elsewhere."""

    def __init__(self, app: ASGIApp, host: str, names: Collection[str], origins: Collection[str], keys: Keys) -> None:
        self._app, self._keys, self._origins = app, keys, frozenset(origins)
        self._loopback = is_loopback(host)
        self._names = frozenset({*_LOOPBACK, *(name.lower() for name in (host, *names))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error.response()(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._is_ours(host):
            message = f"This server does not go by the name {host!r:.80}; --allowed-host NAME would add it."
            raise ApiError(403, message, None, "forbidden_host")
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host.lower() and origin not in self._origins:
            message = f"Pages of {origin!r:.80} may not use this server; --cors ORIGIN would allow it."
            raise ApiError(403, message, None, "forbidden_origin")
        if self._keys and path not in OPEN:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._keys.hold(key.encode("latin-1").strip()):
                raise ApiError(401, "A valid key is needed: 'Authorization: Bearer KEY'.", None, "invalid_api_key")

    def _is_ours(self, host: str) -> bool:
        """By name; or by any address, where others may connect: it takes a name to mislead a browser."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return not self._loopback


def _host_of(origin: str) -> str:
    """Host and port of an origin; nothing of one that is none."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""
