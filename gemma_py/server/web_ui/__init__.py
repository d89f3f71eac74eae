"""The chat page at /, put together from the files beside this one: its own script and style are all that it may run or load."""

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response


def _read(*names: str) -> str:
    return "\n" + "".join(Path(__file__).with_name(name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    """The hash by which Content-Security-Policy allows exactly this text."""
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
