"""Gemma on CPUs, with answers that do not change by a bit."""

from gemma_py import errors, reference
from gemma_py.chat import Conversation
from gemma_py.engine import Engine, Session, load
from gemma_py.errors import GemmaError
from gemma_py.generation import Token
from gemma_py.sampling import Sampling

__version__ = "0.1.0"
__all__ = ["Conversation", "Engine", "GemmaError", "Sampling", "Session", "Token", "errors", "load", "reference"]
