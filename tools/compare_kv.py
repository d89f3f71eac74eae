"""Compare the number types of the KV cache: memory, error and speed.

    python tools/compare_kv.py [MODEL] [--tokens 32000] [--rounds 5]

error     the absolute difference between a token's negative log-likelihood (NLL) and that with float32, for Python's own
          documentation strings, up to 2,300 tokens each
prefill   a prompt of --tokens tokens
decode    8 tokens after this prompt, in each round with every type, one after the other

Prints a table with medians, and the smallest and the largest time of decoding. Needs an idle machine.
"""

import argparse
import statistics
import time
from collections import defaultdict

import numpy as np
from peers import texts

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.checks.verify import prompt
from gemma_py.cli.common import markdown, positive
from gemma_py.generate.engine import Engine
from gemma_py.generate.session import Session
from gemma_py.runtime.cache import bytes_needed
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.runtime.runner import CHUNK

_LONGEST, _DECODED = 2300, 8


def nll(engine: Engine) -> np.ndarray:
    assert engine.tokenizer is not None
    return np.concatenate([list(engine.score(engine.tokenizer.encode(text)[:_LONGEST])) for text in texts()])


def prefilled(engine: Engine, ids: list[int]) -> tuple[Session, float]:
    """Return a session after a prompt, and the tokens per second of its prefill."""
    session, start = engine.session(), time.perf_counter()
    session.prefill(ids)
    return session, len(ids) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=positive, default=32_000)
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    engines = {kv: gemma_py.load(args.model, kv=kv) for kv in KV_TYPES}
    config, reference = engines["float32"].config, nll(engines["float32"])
    ids = prompt(args.tokens + args.rounds * _DECODED, config.vocab_size)
    sessions = {kv: prefilled(engine, ids[: args.tokens]) for kv, engine in engines.items()}
    times = defaultdict[str, list[float]](list)
    for round in range(args.rounds):
        first = args.tokens + round * _DECODED
        for kv, (session, _) in sessions.items():
            start = time.perf_counter()
            for token in ids[first : first + _DECODED]:
                session.decode(token)
            times[kv].append((time.perf_counter() - start) / _DECODED * 1e3)
    rows = []
    for kv, engine in engines.items():
        error, decode = abs(nll(engine) - reference), times[kv]
        rows.append((
            kv,
            f"{bytes_needed(config, kv, args.tokens, CHUNK) / 2**20:.0f} MiB",
            f"{error.mean():.4f} ({error.max():.2f})",
            f"{sessions[kv][1]:.0f} tok/s",
            f"{statistics.median(decode):.1f} ms ({min(decode):.1f} to {max(decode):.1f})",
        ))  # fmt: skip
    print(markdown(("type", "memory", "error, mean (largest)", "prefill", "decode"), rows))
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
