"""The chat page at /. Its Content-Security-Policy allows only the script and the style in this directory."""

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response


def _read(*names: str) -> str:
    return "\n" + "".join(Path(__file__).with_name(name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    """Return the hash of a script or style, for the Content-Security-Policy header."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_STYLE, _SCRIPT = _read("style.css"), _read("elements.js", "markdown.js", "chat.js")
PAGE = _read("page.html").strip("\n").replace("{{style}}", _STYLE).replace("{{script}}", _SCRIPT) + "\n"
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash(_SCRIPT)}",
        f"style-src {_hash(_STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}


async def show(request: Request) -> Response:
    return Response(PAGE, media_type="text/html", headers=_HEADERS)
