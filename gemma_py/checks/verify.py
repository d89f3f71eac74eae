"""The promise, checked on this machine and this model: equal bits for all threads and chunks, and what to say if not.

    T tokens   V vocabulary   L layers   P phases of a layer

Every configuration runs the same prompt; its logits are hashed row by row, its cache layer by layer. Only if two differ
are both run again with a trace, a hash of each row after each phase, which says where the difference begins. A trace can
be kept, and compared on another machine: it does not depend on threads or chunks, since nothing may.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py import reference
from gemma_py.errors import ComputationError, FormatError, InputError, MismatchError, check_context
from gemma_py.formats.files import read_json
from gemma_py.generate.engine import Engine
from gemma_py.paths import atomic_write
from gemma_py.runtime.cache import Cache
from gemma_py.runtime.forward import PHASES, ROPE_KV, UNTRACED
from gemma_py.runtime.runner import NO_TRACE, new_trace
from gemma_py.weights.checkpoint import Checkpoint

Open = Callable[[int], Engine]  # the model, with so many threads
Say = Callable[[str, float], None]  # what is being done, and which part of all the work is done already

TOKENS, REFERENCE = 256, 16
_ATTEMPTS = 5  # to see a difference again: a race does not show every time
_BLOCK = 16  # positions that share a digest in a trace file
_TRACED_AT_ONCE = 64  # tokens
_FORM = "gemma_py trace 1"
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
    cache: Cache
    hashes: np.ndarray  # int64 [L + 1, P, T]
    workers: np.ndarray  # the same; -1: nobody


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
    runner = engine.runner
    engine.instruments.poison = True
    cache, rows = Cache(engine.config, poison=True), []
    hashes, workers, nan = [], [], False
    for first in range(0, len(ids), chunk):
        piece = list(ids[first : first + chunk])
        made = new_trace(engine.config, len(piece)) if trace else NO_TRACE
        logits = runner.run(cache, piece, True, made)
        nan = nan or bool(np.isnan(logits).any())
        rows += row_digests(logits)
        hashes.append(made.hashes)
        workers.append(made.workers)
        say(first + len(piece))
    shape = (-1, len(PHASES), len(ids) if trace else 0)
    return Traced(
        Result(tuple(rows), tuple(cache.digest()), nan),
        cache,
        np.concatenate(hashes, axis=1).reshape(shape) if trace else np.empty((0, 0, 0), np.int64),
        np.concatenate(workers, axis=1).reshape(shape) if trace else np.empty((0, 0, 0), np.int64),
    )


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
    rows = a.cache.rows(layer), b.cache.rows(layer)
    position = first_row(rows[0], rows[1], a.cache.position - len(rows[0][0]))
    if position is None or a.hashes[layer, ROPE_KV, position] != b.hashes[layer, ROPE_KV, position]:
        return None
    return position


def where_traces_part(a: Traced, b: Traced, between: str) -> Difference | None:
    """The first phase that differs, or rows that changed in the cache after everything had been computed."""
    found = first_phase(a.hashes, b.hashes)
    if found is not None:
        layer, phase, position = found
        workers = (int(a.workers[found]), int(b.workers[found]))
        row = changed_row(a, b, layer) if layer < len(a.result.kv) else None
        note = "" if row is None else f"the rows kept for position {row} differ too, though equal ones were computed"
        return Difference(between, layer, PHASES[phase], position, position, workers, note)
    for layer in range(len(a.result.kv)):
        row = changed_row(a, b, layer)
        if row is not None:
            return Difference(between, layer, "rows kept in the cache", row, row, note="equal ones were computed")
    return None


def where_results_part(a: Result, b: Result, between: str, note: str = "") -> Difference:
    """What is known without traces."""
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
        rows = made.cache.rows(layer)
        first = wanted.position - len(rows[0])
        kept = [values[layer][first : wanted.position] for values in (wanted.keys, wanted.values)]
        position = first_row(rows, kept, first)
        if position is not None:
            return Difference(between, layer, "keys and values", position, position)
    return where_results_part(expected, made.result, between)


# --- trace files ------------------------------------------------------------------------------------------------------


def identity(checkpoint: Checkpoint, quant: str | None) -> dict[str, str]:
    """Tells models apart without reading them whole: descriptions of all tensors, and 16 pieces of each."""
    weights = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        weights.update(repr((name, tensor.type.name, tensor.shape, tensor.data.nbytes)).encode())
        data = tensor.data.reshape(-1)
        for part in range(16):
            at = (len(data) - 1) * part // 15
            weights.update(data[at : at + 256].tobytes())
    config = hashlib.sha256(_plain(checkpoint).encode()).hexdigest()
    return {"config": config, "weights": weights.hexdigest(), **({"quant": quant} if quant else {})}


def _plain(checkpoint: Checkpoint) -> str:
    """The config as text; a set has no order of its own, so its names are sorted."""
    table = asdict(checkpoint.config)
    for layer in table["layers"]:
        layer["norms"] = sorted(norm.value for norm in layer["norms"])
    return json.dumps(table, sort_keys=True)


def fold(hashes: np.ndarray) -> list[list[str]]:
    """[L + 1][P] of one digest a block of positions, 16 digits each, joined; empty where a phase does not exist."""
    little = hashes.astype("<i8")

    def joined(row: np.ndarray) -> str:
        if (row == UNTRACED).all():
            return ""
        starts = range(0, len(row), _BLOCK)
        return "".join(hashlib.sha256(row[at : at + _BLOCK].tobytes()).hexdigest()[:16] for at in starts)

    return [[joined(row) for row in layer] for layer in little]


def trace_document(engine: Engine, ids: Sequence[int]) -> dict[str, Any]:
    """What a trace file holds. One way is as good as any; this one is quick and holds few logits at a time."""
    traced = compute(engine, ids, _TRACED_AT_ONCE, trace=True)
    return {
        "format": _FORM,
        "model": identity(engine.checkpoint, engine.quant),
        "machine": f"{platform.machine()}, {platform.system()}, {engine.threads} threads",
        "tokens": list(ids),
        "block": _BLOCK,
        "phases": list(PHASES),
        "hashes": fold(traced.hashes),
        "logits": traced.result.logits,
        "kv": list(traced.result.kv),
    }


def refuse_unwritable(path: Path) -> None:
    """Before the work that the trace is made of, rather than after it."""
    folder = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no trace can be written there")


def write_trace(path: Path, document: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(document).encode() + b"\n")


def read_trace(path: Path) -> dict[str, Any]:
    """A trace file of our form, with everything of the type that it should have."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != _FORM:
        raise FormatError(f"{path}: not a trace of this version; it should say {_FORM!r}")
    tokens, blocks = document.get("tokens"), 0
    sound = _is_list_of(tokens, int) and document.get("block") == _BLOCK and document.get("phases") == list(PHASES)
    if sound and tokens:
        blocks = -(-len(tokens) // _BLOCK)
    hashes = document.get("hashes")
    sound = sound and blocks > 0 and _is_list_of(hashes, list) and _is_list_of(document.get("kv"), str)
    sound = sound and isinstance(document.get("model"), dict) and isinstance(document.get("logits"), str)
    if not sound or not all(_is_layer(layer, blocks) for layer in hashes or ()):
        raise FormatError(f"{path}: a damaged trace: not all of its fields are as they should be")
    return document


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _is_layer(layer: list[Any], blocks: int) -> bool:
    return _is_list_of(layer, str) and len(layer) == len(PHASES) and all(len(row) in (0, 16 * blocks) for row in layer)


def refuse_other_runs(trace: dict[str, Any], path: Path, engine: Engine, tokens: int | None) -> None:
    """A comparison means something only of the same model and the same tokens. Known before the work begins.

    tokens: how many were asked for, if anybody did.
    """
    if trace["model"] != identity(engine.checkpoint, engine.quant):
        raise InputError(f"{path}: a trace of another model or quant, not of {engine.path}")
    length = len(trace["tokens"])
    if tokens not in (None, length):
        raise InputError(
            f"{path}: a trace of {length} tokens, not {tokens}: leave --tokens out, or trace as many there"
        )
    if trace["tokens"] != prompt(length, engine.config.vocab_size):
        raise InputError(f"{path}: a trace of {length} other tokens than the fixed prompt's")
    if len(trace["hashes"]) != len(trace["kv"]) + 1 or len(trace["kv"]) != len(engine.config.layers):
        raise FormatError(f"{path}: a damaged trace: {len(trace['hashes'])} layers")


def compare(trace: dict[str, Any], made: dict[str, Any], between: str) -> Difference | None:
    """The first difference of two traces of the same tokens."""
    for layer, (ours, theirs) in enumerate(zip(made["hashes"], trace["hashes"], strict=True)):
        for phase, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                return Difference(between, layer, PHASES[phase], *_positions(a, b, len(made["tokens"])))
    for layer, (a, b) in enumerate(zip(made["kv"], trace["kv"], strict=True)):
        if a != b:
            return Difference(between, layer, "rows kept in the cache")
    return None if made["logits"] == trace["logits"] else Difference(between, None, "logits")


def _positions(a: str, b: str, tokens: int) -> tuple[int, int]:
    """First and last of the first block that differs; all of them where one side has none."""
    blocks: Iterable[int] = range(0, min(len(a), len(b)), 16)
    at = next((at for at in blocks if a[at : at + 16] != b[at : at + 16]), None)
    if at is None:
        return 0, tokens - 1
    first = at // 16 * _BLOCK
    return first, min(first + _BLOCK, tokens) - 1
