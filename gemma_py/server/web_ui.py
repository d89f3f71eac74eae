"""The chat page at /: one file, whose own script and style are all that it may run or load."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).with_name("web_ui.html").read_text("utf-8")


def _hash(tag: str) -> str:
    """Of what stands between the tags, as Content-Security-Policy wants it."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    assert len(found) == 1
    return "'sha256-" + base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode() + "'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash('script')}",
        f"style-src {_hash('style')}",
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
