"""What the specification says of a prompt, the models that it is asked about, and the comparison with a fast pass."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiny_checkpoints as tiny

import gemma_py
from gemma_py import reference
from gemma_py.models.config import Config
from gemma_py.runtime.fault_injection import FaultPlan

# A model whose rows are whole blocks of every quantised format, and the parts that may be quantised.
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
WIDE = tiny.Variant(
    tiny._gemma3(hidden_size=256, intermediate_size=512, head_dim=64, query_pre_attn_scalar=64, num_hidden_layers=2,
                 sliding_window=5, vocab_size=77)
)  # fmt: skip


@contextmanager
def opened(path: Path, threads: int, plan: FaultPlan | None = None, kv: str = "float32") -> Iterator[gemma_py.Engine]:
    """An engine in test mode: scratch and unpublished rows are NaN, so reading one shows."""
    with gemma_py.load(path, threads=threads, kv=kv) as engine:
        engine.instruments.poison = True
        engine.instruments.fault_plan = plan
        yield engine


def prompt(config: Config, length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(config.vocab_size) for _ in range(length)]


def bits(logits: np.ndarray) -> np.ndarray:
    return logits.view(np.uint32)


def cut(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """ids in pieces of these sizes, again and again."""
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(ids):
            return
        yield list(ids[at : at + size])
        at += size


class Expected:
    """What the specification says of a prompt."""

    def __init__(self, engine: gemma_py.Engine, ids: list[int]) -> None:
        self.ids = ids
        self.logits, cache = reference.logits_and_rows(engine, ids)
        self.digest = reference.kv_digest(cache)

    def same(self, engine: gemma_py.Engine, sizes: Sequence[int], all_logits: bool = True) -> bool:
        session = engine.session()
        made = [session.prefill(piece, all_logits=all_logits) for piece in cut(self.ids, sizes)]
        logits = np.concatenate(made) if all_logits else made[-1]
        wanted = self.logits if all_logits else self.logits[-1]
        return bool((bits(logits) == bits(wanted)).all()) and session.kv_digest() == self.digest
