"""The promise, checked on this machine and this model: equal bits for all threads and chunks, and what to say if not.

    T tokens   V vocabulary   L layers   P phases of a layer

Every configuration runs the same prompt; its logits are hashed row by row, its cache layer by layer. Only if two differ
are both run again with a trace, a hash of each row after each phase, which says where the difference begins. A trace can
be kept, and compared on another machine: it does not depend on threads or chunks, since nothing may.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gemma_py import reference
from gemma_py.errors import ComputationError, MismatchError
from gemma_py.generate.engine import Engine, Session
from gemma_py.runtime.cache import check_context
from gemma_py.runtime.trace import Trace

Open = Callable[[int], Engine]  # the model, with so many threads
Say = Callable[[str, float], None]  # what is being done, and which part of all the work is done already

TOKENS, REFERENCE = 256, 16
_ATTEMPTS = 5  # to see a difference again: a race does not show every time
_MASK = (1 << 64) - 1


def prompt(length: int, vocabulary: int) -> list[int]:
    """Always the same ids: splitmix64 in plain integers, since a library's generator may change."""
    ids, state = [], 0
    for _ in range(length):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        ids.append((z ^ (z >> 31)) % vocabulary)
    return ids


def prompt_length(wanted: int | None, context: int) -> int:
    """As many tokens as asked for; by default some that fit."""
    if wanted is not None:
        check_context(context, wanted)
    return min(TOKENS, context) if wanted is None else wanted


# --- one run ----------------------------------------------------------------------------------------------------------


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


@dataclass(frozen=True)
class Way:
    """One way to compute the same."""

    threads: int
    chunk: int

    def __str__(self) -> str:
        return f"{threads_text(self.threads)} in chunks of {self.chunk}"


@dataclass(frozen=True)
class Result:
    """rows: a digest of each token's logits. kv: one a layer, as Session.kv_digest gives it. nan: whether logits hold one."""

    rows: tuple[bytes, ...]
    kv: tuple[str, ...]
    nan: bool = False

    @property
    def logits(self) -> str:
        """sha256 of the rows' sha256, so that no more than a chunk's logits are held."""
        return hashlib.sha256(b"".join(self.rows)).hexdigest()

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join([self.logits, *self.kv]).encode()).hexdigest()


@dataclass(frozen=True)
class Traced:
    """A result, and how it came about."""

    result: Result
    session: Session
    hashes: np.ndarray  # int64 [L + 1, P, T]; UNTRACED where a layer has no such phase
    workers: np.ndarray  # the same; -1: nobody
    phases: tuple[str, ...]
    store_label: int  # the phase that makes KV rows


def row_digests(logits: np.ndarray) -> list[bytes]:
    """sha256 of each row: little-endian float32."""
    return [hashlib.sha256(np.ascontiguousarray(row, "<f4").tobytes()).digest() for row in logits]


def compute(
    engine: Engine, ids: Sequence[int], chunk: int, trace: bool = False, say: Callable[[int], None] = lambda done: None
) -> Traced:
    """The prompt in chunks, from an empty cache.

    Scratch and rows that nobody has written are NaN: memory that comes back from the run before holds the very values
    that this one should compute, and would hide that a worker reads too early.
    """
    instruments = engine.instruments
    instruments.poison = True
    session, rows, nan = engine.session(), [], False
    traces: list[Trace] = []
    instruments.traces = traces if trace else None
    try:
        for first in range(0, len(ids), chunk):
            piece = list(ids[first : first + chunk])
            logits = session.prefill(piece, chunk=chunk, all_logits=True)
            nan = nan or bool(np.isnan(logits).any())
            rows += row_digests(logits)
            say(first + len(piece))
    finally:
        instruments.traces = None
    result = Result(tuple(rows), tuple(session.kv_digest()), nan)
    if not trace:
        return Traced(result, session, np.empty((0, 0, 0), np.int64), np.empty((0, 0, 0), np.int64), (), -1)
    shape = (engine.program.layers, len(engine.program.labels), len(ids))
    hashes, workers = (np.concatenate(parts, axis=1).reshape(shape) for parts in zip(*traces, strict=True))
    return Traced(result, session, hashes, workers, engine.program.labels, engine.program.store_label)


# --- differences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two results part; what is None is not known. Positions first to last; workers of the one and of the other."""

    between: str
    layer: int | None = None
    phase: str | None = None
    first: int | None = None
    last: int | None = None
    workers: tuple[int, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        where = [] if self.layer is None else [f"layer {self.layer}"]
        where += [] if self.phase is None else [self.phase]
        if self.first is not None:
            where.append(
                f"position {self.first}" if self.first == self.last else f"positions {self.first} to {self.last}"
            )
        if self.workers:
            where.append("computed by worker " + " and by worker ".join(map(str, self.workers)))
        note = f" ({self.note})" if self.note else ""
        return f"{self.between} differ, first in {', '.join(where)}{note}"


def as_table(difference: Difference | None) -> dict[str, Any] | None:
    """For JSON, with the sentence for people."""
    return None if difference is None else {"message": str(difference), **asdict(difference)}


def first_phase(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int] | None:
    """(layer, phase, position or block) where two tables [L + 1, P, ...] first differ, in the order of the computation."""
    places = np.argwhere(a != b)
    return (int(places[0][0]), int(places[0][1]), int(places[0][2])) if len(places) else None


def first_row(a: Sequence[np.ndarray], b: Sequence[np.ndarray], first: int) -> int | None:
    """The first position whose keys or values [positions, G, E] have other bits; the arrays begin at position `first`."""
    unequal = np.zeros(len(a[0]), bool)
    for x, y in zip(a, b, strict=True):
        unequal |= (np.ascontiguousarray(x).view(np.uint32) != np.ascontiguousarray(y).view(np.uint32)).any(axis=(1, 2))
    return first + int(unequal.argmax()) if unequal.any() else None


def changed_row(a: Traced, b: Traced, layer: int) -> int | None:
    """The first committed row of a layer that differs although both had computed the same."""
    owners, phase = a.session.engine.config.kv_owners, a.store_label
    if layer not in owners:
        return None
    rows = a.session.kv_rows(owners.index(layer)), b.session.kv_rows(owners.index(layer))
    position = first_row(rows[0], rows[1], a.session.position - len(rows[0][0]))
    if position is None or a.hashes[layer, phase, position] != b.hashes[layer, phase, position]:
        return None
    return position


def where_traces_part(a: Traced, b: Traced, between: str) -> Difference | None:
    """The first phase that differs, or rows that changed in the cache after everything had been computed."""
    found = first_phase(a.hashes, b.hashes)
    if found is not None:
        layer, phase, position = found
        workers = (int(a.workers[found]), int(b.workers[found]))
        row = changed_row(a, b, layer)
        note = "" if row is None else f"the rows kept for position {row} differ too, though equal ones were computed"
        return Difference(between, layer, a.phases[phase], position, position, workers, note)
    for layer in a.session.engine.config.kv_owners:
        row = changed_row(a, b, layer)
        if row is not None:
            return Difference(between, layer, "rows kept in the cache", row, row, note="equal ones were computed")
    return None


def where_results_part(a: Result, b: Result, between: str, note: str = "") -> Difference:
    """What is known without traces. Layers are counted among those that have KV rows of their own."""
    layer = next((number for number, (x, y) in enumerate(zip(a.kv, b.kv, strict=True)) if x != y), None)
    row = next((number for number, (x, y) in enumerate(zip(a.rows, b.rows, strict=True)) if x != y), None)
    what = "logits" if layer is None else "keys and values" if row is None else "keys and values, and logits from"
    return Difference(between, layer, what, row, row, note=note)


def locate(open_engine: Open, ids: Sequence[int], a: Way, b: Way, results: tuple[Result, Result]) -> Difference:
    """Both ways once more, with traces, until they differ again."""
    between = f"{a} and {b}"
    with open_engine(a.threads) as one, open_engine(b.threads) as other:
        for _ in range(_ATTEMPTS):
            found = where_traces_part(
                compute(one, ids, a.chunk, trace=True), compute(other, ids, b.chunk, trace=True), between
            )
            if found is not None:
                return found
    note = f"they were equal {_ATTEMPTS} times when run again with a trace: a race, or a machine that errs"
    return where_results_part(*results, between, note)


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What was checked and what came out; the results in the order of `ways`."""

    tokens: int
    reference_tokens: int
    ways: tuple[Way, ...]
    results: tuple[Result, ...]
    difference: Difference | None = None

    @property
    def different(self) -> tuple[Way, ...]:
        """Ways whose bits are not those of the first."""
        pairs = zip(self.ways, self.results, strict=True)
        return tuple(way for way, result in pairs if result != self.results[0])

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"threads": way.threads, "chunk": way.chunk, "logits": result.logits, "kv": list(result.kv)}
            for way, result in zip(self.ways, self.results, strict=True)
        ]
        return {
            "equal": self.difference is None,
            "tokens": self.tokens,
            "reference_tokens": self.reference_tokens,
            "runs": rows,
            "difference": as_table(self.difference),
        }

    def insist(self) -> None:
        """An error if anything differed."""
        if self.difference is not None:
            raise MismatchError(str(self.difference))


def cost(tokens: int, chunk: int) -> int:
    """Roughly, for the time left: a pass costs as much as some tokens, however few it has."""
    return tokens + 8 * -(-tokens // chunk)


def verify(
    open_engine: Open,
    threads: Sequence[int],
    chunks: Sequence[int],
    tokens: int,
    reference_tokens: int = REFERENCE,
    say: Say = lambda what, part: None,
) -> Report:
    """The whole product of threads and chunks against its first, and that against the specification on a prefix."""
    ways = tuple(Way(count, chunk) for count in dict.fromkeys(threads) for chunk in dict.fromkeys(chunks))
    prefix, results = min(reference_tokens, tokens), []
    total, done = 100 * prefix + sum(cost(tokens, way.chunk) for way in ways), 0
    ids: list[int] = []
    difference = None
    for count in dict.fromkeys(threads):
        with open_engine(count) as engine:
            if not ids:
                ids = prompt(tokens, engine.config.vocab_size)
                if prefix:
                    say(f"the specification, {prefix} tokens", 0.0)
                    difference = against_specification(engine, ids[:prefix])
                done += 100 * prefix
            for way in (way for way in ways if way.threads == count):

                def advance(made: int, way: Way = way, before: int = done) -> None:
                    say(str(way), (before + cost(tokens, way.chunk) * made / tokens) / total)

                advance(0)
                results.append(compute(engine, ids, way.chunk, say=advance).result)
                done += cost(tokens, way.chunk)
    report = Report(tokens, prefix, ways, tuple(results), difference)
    if report.different:
        other = ways.index(report.different[0])
        say(f"where {ways[other]} part from {ways[0]}", 1.0)
        found = locate(open_engine, ids, ways[0], ways[other], (results[0], results[other]))
        return Report(tokens, prefix, ways, tuple(results), found)
    if results[0].nan:
        raise ComputationError("all runs agree, but on logits that hold NaN: equal bits of no numbers say nothing")
    return report


def against_specification(engine: Engine, ids: Sequence[int]) -> Difference | None:
    """All logits and all rows that a later token may read, of a prefix in one chunk."""
    logits, wanted = reference.logits_and_rows(engine, ids)
    made = compute(engine, ids, len(ids))
    expected = Result(tuple(row_digests(logits)), tuple(reference.kv_digest(wanted)), bool(np.isnan(logits).any()))
    if made.result == expected:
        return None
    between = f"the specification and {Way(engine.threads, len(ids))}"
    for layer in range(len(expected.kv)):
        owner, rows = engine.config.kv_owners[layer], made.session.kv_rows(layer)
        first = wanted.position - len(rows[0])
        kept = [values[owner][first : wanted.position] for values in (wanted.keys, wanted.values)]
        position = first_row(rows, kept, first)
        if position is not None:
            return Difference(between, owner, "keys and values", position, position)
    return where_results_part(expected, made.result, between)
