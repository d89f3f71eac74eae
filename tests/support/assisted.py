"""Steps of Gemma 4's assistants (draft models), computed by the engine."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tiny_checkpoints as tiny
import tiny_families

import gemma_py
from gemma_py.generate.assistant import Assistant
from gemma_py.generate.session import Session

MAIN_SEED, SEED, STEPS = 1, 2, 4  # equal to those in tools/make_assistant_goldens.py


def main_of(name: str) -> str:
    """For example, the main model of 'gemma4-e2b with clusters' is 'gemma4-e2b'."""
    return name.split()[0]


def written(name: str, folder: Path, seed: int = SEED) -> Path:
    tiny.write(tiny_families.ASSISTANTS[name], folder, seed)
    return folder


def assistant_of(engine: gemma_py.Engine) -> Assistant:
    assert isinstance(engine.draft, Assistant)
    return engine.draft


def first_token(logits: np.ndarray) -> int:
    return int(logits.argmax())


def steps(session: Session, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute a step for each token. Returns logits [steps, V] and hidden states [steps, B]."""
    assistant, hidden = assistant_of(session.engine), session._cache.last_hidden()
    assert hidden is not None
    logits, states = [], []
    for token in tokens:
        made, hidden = assistant.step(session._cache, token, hidden)
        logits.append(made)
        states.append(hidden)
    return np.stack(logits), np.stack(states)
