"""Gemma on CPUs, with answers that do not change by a bit."""

from gemma_py import errors, reference
from gemma_py.engine import Engine, Session, Token, load
from gemma_py.errors import GemmaError

__version__ = "0.1.0"
__all__ = ["Engine", "GemmaError", "Session", "Token", "errors", "load", "reference"]
