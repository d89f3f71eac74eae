"""A runtime for Gemma models on CPUs, with bit-exact results."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemma_py import errors, reference
    from gemma_py.chat.conversation import Conversation
    from gemma_py.errors import GemmaError
    from gemma_py.generate.core import Token
    from gemma_py.generate.engine import Engine, load
    from gemma_py.generate.options import Sampling
    from gemma_py.generate.session import Session

__version__ = "0.1.0"
__all__ = ["Conversation", "Engine", "GemmaError", "Sampling", "Session", "Token", "errors", "load", "reference"]

# These names are imported on first access, because importing numba takes 0.2 s and `gemma_py models` needs no numba.
_HOMES = {
    "Conversation": "chat.conversation", "Engine": "generate.engine", "Session": "generate.session", "load": "generate.engine",
    "GemmaError": "errors", "Token": "generate.core", "Sampling": "generate.options",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("errors", "reference"):
        return importlib.import_module(f"gemma_py.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gemma_py' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gemma_py.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
