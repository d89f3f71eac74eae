"""Check the Host header, the Origin header and the API key of every request.

The page of any website can make a browser send requests to a server on the same machine. With DNS rebinding, where the
website's name resolves to 127.0.0.1, the page can even read the responses. A page cannot change the Host and Origin headers
that its browser sends, so checking these headers prevents such attacks.
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
from gemma_py.server.http import error_response
from gemma_py.server.openai.errors import ApiError

OPEN = frozenset({"/", "/audit", "/health"})  # paths without an API key; their responses reveal nothing about requests
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Keys:
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
            raise InputError(
                f"{path}: should have one key on each line, of at least 16 characters; found a shorter key or no key"
            )
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def hold(self, key: bytes) -> bool:
        """Return whether a key is valid. The check takes equally long for every key, so timing does not reveal a key."""
        given = _digest(key)
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Auth:
    """Middleware that refuses requests with an unknown Host header, with a forbidden Origin, or without a valid API key.

    host: the address that the server listens on
    names: further host names that the Host header may have
    origins: origins whose pages may send requests, besides the server's own origin
    """

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
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._is_ours(host):
            message = f"The Host header {host!r:.80} is not a name of this server; the option --allowed-host NAME adds a name."
            raise ApiError(403, message, None, "forbidden_host")
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host.lower() and origin not in self._origins:
            message = f"Pages from {origin!r:.80} may not use this server; the option --cors ORIGIN allows an origin."
            raise ApiError(403, message, None, "forbidden_origin")
        if self._keys and path not in OPEN:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not self._keys.hold(key.encode("latin-1").strip()):
                raise ApiError(
                    401,
                    "The request has no valid API key; send one in the header 'Authorization: Bearer KEY'.",
                    None,
                    "invalid_api_key",
                )

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this server.

        If other machines can connect, any IP address is accepted, because DNS rebinding needs a name.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return not self._loopback


def _host_of(origin: str) -> str:
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""
