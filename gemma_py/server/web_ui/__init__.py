"""The pages / (chat) and /audit. A Content-Security-Policy forbids scripts and styles from outside this directory."""

import base64
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response


def _read(*names: str) -> str:
    return "\n" + "".join(Path(__file__).with_name(name).read_text("utf-8") for name in names)


def _hash(text: str) -> str:
    """Return the hash that allows a script or style in a Content-Security-Policy header."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _page(document: str, styles: Sequence[str], scripts: Sequence[str]) -> tuple[str, str]:
    """Return (HTML with inlined styles and scripts, Content-Security-Policy header)."""
    style, script = _read(*styles), _read(*scripts)
    page = _read(document).strip("\n").replace("{{style}}", style).replace("{{script}}", script) + "\n"
    policy = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return page, "; ".join(policy)


def _handler(page: str, policy: str) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        return Response(page, media_type="text/html", headers=headers)

    return show


PAGE, POLICY = _page("page.html", ("colours.css", "style.css"), ("elements.js", "markdown.js", "chat.js"))
AUDIT_PAGE, AUDIT_POLICY = _page("audit.html", ("colours.css", "audit.css"), ("elements.js", "audit.js"))
show_chat, show_audit = _handler(PAGE, POLICY), _handler(AUDIT_PAGE, AUDIT_POLICY)
