"""Results of the specification for a prompt, and passes of the engine to compare with these results."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiny_checkpoints as tiny

import gemma_py
from gemma_py import reference
from gemma_py.errors import WorkerError
from gemma_py.models.config import Config
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.runtime.runner import SequenceInput

# Rows of WIDE are whole blocks of every quantised format. PARTS are its matrices that can be quantised.
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
WIDE = tiny.Variant(
    tiny._gemma3(hidden_size=256, intermediate_size=512, head_dim=64, query_pre_attn_scalar=64, num_hidden_layers=2,
                 sliding_window=5, vocab_size=77)
)  # fmt: skip


@contextmanager
def opened(path: Path, threads: int, plan: FaultPlan | None = None, kv: str = "float32") -> Iterator[gemma_py.Engine]:
    """Open an engine whose scratch memory and unpublished rows are NaN, so that reading one by mistake changes the
    result.
    """
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
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(ids):
            return
        yield list(ids[at : at + size])
        at += size


class Expected:
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


def differs(engine: gemma_py.Engine, want: Expected, sizes: Sequence[int], all_logits: bool = True) -> bool:
    """Whether results are wrong. KV rows that are published twice or never raise WorkerError, which counts as wrong."""
    try:
        return not want.same(engine, sizes, all_logits)
    except WorkerError:
        return True


TOKENS = 70  # more than two attention tiles and several windows


_expected: dict[tuple[str, int], Expected] = {}


def caught(
    engine: gemma_py.Engine,
    want: Expected,
    plans: Iterable[FaultPlan],
    sizes: Sequence[int] = (TOKENS,),
    all_logits: bool = True,
) -> bool:
    """Whether the results are wrong under any of the plans."""
    for plan in plans:
        engine.instruments.fault_plan = plan
        if differs(engine, want, sizes, all_logits):
            return True
    return False


def without_barrier(engine: gemma_py.Engine, phase: str, seeds: int = 300) -> Iterator[FaultPlan]:
    """Plans in which no worker waits at the barrier after a phase."""
    label = engine.program.label(phase)
    return (FaultPlan(seed=seed, omit="barrier", omit_phase=label) for seed in range(1, seeds))


def expected(name: str, engine: gemma_py.Engine, length: int = TOKENS) -> Expected:
    key = (name, length)
    if key not in _expected:
        _expected[key] = Expected(engine, prompt(engine.config, length))
    return _expected[key]


def together(engine: gemma_py.Engine, wants: Sequence[Expected], seed: int) -> bool:
    """Whether sequences in shared passes get their expected results.

    Each pass has parts of some of the sequences, and computes the logits of no token, of one token or of all tokens of
    a part.
    """
    rng = random.Random(seed)
    caches_, done = [engine.new_cache() for _ in wants], [0] * len(wants)
    while any(at < len(want.ids) for at, want in zip(done, wants, strict=True)):
        chosen = [n for n, want in enumerate(wants) if done[n] < len(want.ids) and rng.random() < 0.8]
        rng.shuffle(chosen)
        parts = []
        for number in chosen:
            size = rng.choice([1, 1, rng.randint(1, 40)])
            tokens = wants[number].ids[done[number] : done[number] + size]
            parts.append(SequenceInput(caches_[number], tokens, rng.choice([0, 1, len(tokens)])))
        if not parts:
            continue
        for number, part, logits in zip(chosen, parts, engine.run_together(parts), strict=True):
            done[number] += len(part.tokens)
            wanted = wants[number].logits[done[number] - part.logits : done[number]]
            if logits.shape != wanted.shape or (bits(logits) != bits(wanted)).any():
                return False
    return all(cache.digest() == want.digest for cache, want in zip(caches_, wants, strict=True))


def expected_of_several(name: str, engine: gemma_py.Engine) -> list[Expected]:
    return [expected(name, engine, length) for length in (20, 50, 77, 33, 1, 64)]


# One KV head, so several workers share the columns of a position. 104 columns cannot be divided into equal multiples of
# 16.
SHARED = tiny.Variant(
    tiny._gemma3(hidden_size=64, intermediate_size=64, head_dim=104, query_pre_attn_scalar=104, num_hidden_layers=2,
                 num_attention_heads=3, num_key_value_heads=1, sliding_window=40, vocab_size=77)
)  # fmt: skip
