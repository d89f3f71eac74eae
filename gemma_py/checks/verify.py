"""`verify` checks that this machine computes equal bits with every number of threads and of shards and every chunk size.

    T tokens   V vocabulary   L layers   P phases of a layer

Every setting runs one prompt. Digests of each token's logits and of each layer's KV cache are compared. If two settings
differ, the two settings run again with a trace: a hash of what each phase computed for each token. The first hash that
differs shows where the error is. A trace does not depend on threads or chunk size, so a trace in a file can be compared
with a run on another machine.

An embedding model takes each text whole, so it has no chunks. Then the prompt is cut into texts, and a setting has a number of
texts in a pass instead of a chunk size.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from gemma_py import reference
from gemma_py.errors import ComputationError, MismatchError
from gemma_py.formats.floats import bytes_for_digest, with_one_nan
from gemma_py.generate.embedding import embed_pass
from gemma_py.generate.engine import Engine
from gemma_py.generate.session import Session
from gemma_py.runtime.cache import Cache, check_context
from gemma_py.runtime.trace import Trace

OpenEngine = Callable[[int, int], Engine]  # called with the numbers of threads and of shards
ReportFraction = Callable[[str, float], None]  # called with (current step, fraction of the work that is done, 0 to 1)

TOKENS, REFERENCE = 256, 16
_ATTEMPTS = 5  # attempts to reproduce a difference, because a race does not show in every run
_MASK = (1 << 64) - 1


def prompt(length: int, vocabulary: int) -> list[int]:
    """Return a fixed prompt of pseudorandom ids. The ids come from splitmix64, because numpy may change its generators."""
    ids, state = [], 0
    for _ in range(length):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        ids.append((z ^ (z >> 31)) % vocabulary)
    return ids


def prompt_length(wanted: int | None, context: int) -> int:
    if wanted is not None:
        check_context(context, wanted)
    return min(TOKENS, context) if wanted is None else wanted


def texts_of(ids: Sequence[int]) -> list[list[int]]:
    """Divide the prompt into texts for an embedding model: the first half is one text, and the rest is texts of 1, 2, 3
    and so on tokens.
    """
    made, first = [list(ids[: (len(ids) + 1) // 2])], (len(ids) + 1) // 2
    while first < len(ids):
        made.append(list(ids[first : first + len(made)]))
        first += len(made[-1])
    return made


# --- one run ----------------------------------------------------------------------------------------------------------


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


@dataclass(frozen=True)
class RunSetting:
    """How a run divides the work.

    chunk: the number of tokens in a pass or, for an embedding model, the number of texts in a pass
    embeds: whether the model is an embedding model
    shards: the number of processes among which the layers are divided
    """

    threads: int
    chunk: int
    embeds: bool = False
    shards: int = 1

    def __str__(self) -> str:
        if self.embeds:
            return f"{threads_text(self.threads)} with {self.chunk} text{'s' * (self.chunk > 1)} in a pass"
        shards = f" and {self.shards} shards" if self.shards > 1 else ""
        return f"{threads_text(self.threads)}{shards} in chunks of {self.chunk}"


@dataclass(frozen=True)
class RunResult:
    """Digests of what a run computed.

    rows: the sha256 of each token's logits, or of each text's embedding
    kv: the digest of each layer that stores KV rows, from `Session.kv_digest`
    nan: whether a logit, or a number of an embedding, is NaN
    embeds: whether the model is an embedding model
    """

    rows: tuple[bytes, ...]
    kv: tuple[str, ...]
    nan: bool = False
    embeds: bool = False

    @property
    def logits(self) -> str:
        return hashlib.sha256(b"".join(self.rows)).hexdigest()

    @property
    def digest(self) -> str:
        return hashlib.sha256(" ".join([self.logits, *self.kv]).encode()).hexdigest()


@dataclass(frozen=True)
class TracedRun:
    """A run with its trace. session: None for an embedding model, which has one KV cache for each text."""

    result: RunResult
    session: Session | None
    hashes: np.ndarray  # int64 [L + 1, P, T]; UNTRACED where a layer does not have the phase
    workers: np.ndarray  # the shape of `hashes`: the number of the worker that computed each hashed row, or -1
    phases: tuple[str, ...]
    store_label: int


def row_digests(logits: np.ndarray) -> list[bytes]:
    """Return the sha256 of each row, as little-endian float32. Every NaN has the bits 0x7FC00000."""
    return [hashlib.sha256(bytes_for_digest(row)).digest() for row in logits]


def compute(
    engine: Engine,
    ids: Sequence[int],
    chunk: int,
    trace: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> TracedRun:
    """Run the prompt in chunks, from an empty KV cache.

    Scratch memory and unwritten KV rows are filled with NaN first. If a worker reads a row before the row is written, the
    result then has NaN. Otherwise the row could hold the correct values of an earlier run, and hide the error.
    """
    instruments = engine.instruments
    instruments.poison = True
    embeds, caches = engine.config.embedding is not None, list[Cache]()
    session, rows, nan, done = None if embeds else engine.session(), [], False, 0
    traces: list[Trace] = []
    instruments.traces = traces if trace else None
    try:
        for tokens, made in (
            _passes_of_texts(engine, ids, chunk, caches) if session is None else _passes(session, ids, chunk)
        ):
            nan = nan or bool(np.isnan(made).any())
            rows += row_digests(made)
            done += tokens
            progress(done)
    finally:
        instruments.traces = None
    kv = joined_digests([cache.digest() for cache in caches]) if session is None else session.kv_digest()
    result = RunResult(tuple(rows), tuple(kv), nan, embeds)
    if not trace:
        return TracedRun(result, session, np.empty((0, 0, 0), np.int64), np.empty((0, 0, 0), np.int64), (), -1)
    shape = (engine.program.layers, len(engine.program.labels), len(ids))
    hashes, workers = (np.concatenate(parts, axis=1).reshape(shape) for parts in zip(*traces, strict=True))
    return TracedRun(result, session, hashes, workers, engine.program.labels, engine.program.store_label)


def _passes(session: Session, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of tokens and the logits of each pass."""
    for first in range(0, len(ids), chunk):
        piece = list(ids[first : first + chunk])
        yield len(piece), session.prefill(piece, chunk=chunk, all_logits=True)


def _passes_of_texts(
    engine: Engine, ids: Sequence[int], count: int, caches: list[Cache]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of tokens and the embeddings of each pass, and append the KV cache of each text."""
    texts = texts_of(ids)
    for first in range(0, len(texts), count):
        part, own = texts[first : first + count], list[Cache]()
        yield sum(map(len, part)), embed_pass(engine, part, own)
        caches += own


def joined_digests(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return one sha256 for each layer, made from the digests [texts][layers] of the texts' KV caches."""
    return [hashlib.sha256(" ".join(layer).encode()).hexdigest() for layer in zip(*texts, strict=True)]


# --- differences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The place where two results first differ. Fields that are not known are None.

    first, last: the range of positions. workers: for each run, the worker that computed the differing output.
    """

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
    """Return the difference as a JSON object. Its "message" is the text for people."""
    return None if difference is None else {"message": str(difference), **asdict(difference)}


def first_phase(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int] | None:
    """Return where two tables [L + 1, P, ...] first differ, in the order of a pass: (layer, phase, index).

    The index is the number of a position, or of a block of positions.
    """
    places = np.argwhere(a != b)
    return (int(places[0][0]), int(places[0][1]), int(places[0][2])) if len(places) else None


def first_row(a: Sequence[np.ndarray], b: Sequence[np.ndarray], first: int) -> int | None:
    """Return the first position whose KV rows [G, E] differ in a bit. The arrays are [positions, G, E].

    first: the position of row 0
    """
    unequal = np.zeros(len(a[0]), bool)
    for x, y in zip(a, b, strict=True):
        unequal |= (with_one_nan(x).view(np.uint32) != with_one_nan(y).view(np.uint32)).any(axis=(1, 2))
    return first + int(unequal.argmax()) if unequal.any() else None


def changed_row(a: TracedRun, b: TracedRun, layer: int) -> int | None:
    """Return the first KV row of a layer that was overwritten after it was stored.

    Both runs stored equal rows, but the rows differ at the end of the runs.
    """
    if a.session is None or b.session is None:
        return None
    owners, phase = a.session.engine.config.kv_owners, a.store_label
    if layer not in owners:
        return None
    rows = a.session.kv_rows(owners.index(layer)), b.session.kv_rows(owners.index(layer))
    position = first_row(rows[0], rows[1], a.session.position - len(rows[0][0]))
    if position is None or a.hashes[layer, phase, position] != b.hashes[layer, phase, position]:
        return None
    return position


def where_traces_part(a: TracedRun, b: TracedRun, between: str) -> Difference | None:
    """Return the first phase whose hashes differ, or else the first KV row that was overwritten after it was stored."""
    found = first_phase(a.hashes, b.hashes)
    if found is not None:
        layer, phase, position = found
        workers = (int(a.workers[found]), int(b.workers[found]))
        row = changed_row(a, b, layer)
        note = (
            "" if row is None else f"the KV rows of position {row} differ too, although both runs computed equal rows"
        )
        return Difference(between, layer, a.phases[phase], position, position, workers, note)
    for layer in () if a.session is None else a.session.engine.config.kv_owners:
        row = changed_row(a, b, layer)
        if row is not None:
            return Difference(between, layer, "rows kept in the cache", row, row, note="both runs computed equal rows")
    return None


def where_results_part(a: RunResult, b: RunResult, between: str, note: str = "") -> Difference:
    """Return the first layer whose keys and values differ, and the first token whose logits or embedding differ.

    Only traces would tell in which phase of the forward pass the difference arose.

    `Difference.layer` is an index into `Config.kv_owners`, the layers that store KV rows.
    """
    layer = next((number for number, (x, y) in enumerate(zip(a.kv, b.kv, strict=True)) if x != y), None)
    row = next((number for number, (x, y) in enumerate(zip(a.rows, b.rows, strict=True)) if x != y), None)
    made = "embeddings" if a.embeds else "logits"
    what = made if layer is None else "keys and values" if row is None else f"keys and values, and {made} from"
    if a.embeds and row is not None:  # a row belongs to a text and has no position
        return Difference(between, layer, f"{what} text {row}", note=note)
    return Difference(between, layer, what, row, row, note=note)


def locate(
    open_engine: OpenEngine, ids: Sequence[int], a: RunSetting, b: RunSetting, results: tuple[RunResult, RunResult]
) -> Difference:
    """Run two settings again with traces, up to _ATTEMPTS times, until the traces differ."""
    between = f"{a} and {b}"
    with open_engine(a.threads, a.shards) as one, open_engine(b.threads, b.shards) as other:
        for _ in range(_ATTEMPTS):
            found = where_traces_part(
                compute(one, ids, a.chunk, trace=True), compute(other, ids, b.chunk, trace=True), between
            )
            if found is not None:
                return found
    note = f"{_ATTEMPTS} more runs with a trace were equal, so the cause is a race or a hardware error"
    return where_results_part(*results, between, note)


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyReport:
    tokens: int
    reference_tokens: int
    settings: tuple[RunSetting, ...]
    results: tuple[RunResult, ...]
    difference: Difference | None = None

    @property
    def different(self) -> tuple[RunSetting, ...]:
        pairs = zip(self.settings, self.results, strict=True)
        return tuple(setting for setting, result in pairs if result != self.results[0])

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"threads": setting.threads, "shards": setting.shards, "texts_in_a_pass" if setting.embeds else "chunk": setting.chunk,
             "embeddings" if setting.embeds else "logits": result.logits, "kv": list(result.kv)}
            for setting, result in zip(self.settings, self.results, strict=True)
        ]  # fmt: skip
        return {
            "equal": self.difference is None,
            "tokens": self.tokens,
            "reference_tokens": self.reference_tokens,
            "runs": rows,
            "difference": as_table(self.difference),
        }

    def raise_on_mismatch(self) -> None:
        if self.difference is not None:
            raise MismatchError(str(self.difference))


def cost(tokens: int, chunk: int) -> int:
    """The estimated duration of a run, in units of the time to compute one token. The progress bar uses it.

    Every pass reads all weights, which is assumed to take as long as computing 8 tokens.
    """
    return tokens + 8 * -(-tokens // chunk)


def verify(
    open_engine: OpenEngine,
    threads: Sequence[int],
    chunks: Sequence[int],
    tokens: int,
    reference_tokens: int = REFERENCE,
    progress: ReportFraction = lambda what, part: None,
    shards: Sequence[int] = (1,),
) -> VerifyReport:
    """Compare every combination of threads, shards and chunk size with the first combination.

    reference_tokens: the number of tokens that are also compared with the reference implementation.
    """
    engines = list(product(dict.fromkeys(shards), dict.fromkeys(threads)))
    combinations = list(product(engines, dict.fromkeys(chunks)))
    prefix, results = min(reference_tokens, tokens), []
    total, done = 100 * prefix + sum(cost(tokens, chunk) for _, chunk in combinations), 0
    ids: list[int] = []
    settings: tuple[RunSetting, ...] = ()
    difference = None
    for parts, count in engines:
        with open_engine(count, parts) as engine:
            if not ids:
                ids = prompt(tokens, engine.config.vocab_size)
                embeds = engine.config.embedding is not None
                settings = tuple(RunSetting(of[1], chunk, embeds, of[0]) for of, chunk in combinations)
                if prefix:
                    progress(f"the specification, {prefix} tokens", 0.0)
                    difference = against_specification(engine, ids[:prefix])
                done += 100 * prefix
            for setting in (s for s in settings if (s.shards, s.threads) == (parts, count)):

                def advance(made: int, setting: RunSetting = setting, before: int = done) -> None:
                    progress(str(setting), (before + cost(tokens, setting.chunk) * made / tokens) / total)

                advance(0)
                results.append(compute(engine, ids, setting.chunk, progress=advance).result)
                done += cost(tokens, setting.chunk)
    report = VerifyReport(tokens, prefix, settings, tuple(results), difference)
    if report.different:
        other = settings.index(report.different[0])
        progress(f"where {settings[other]} and {settings[0]} differ", 1.0)
        found = locate(open_engine, ids, settings[0], settings[other], (results[0], results[other]))
        return VerifyReport(tokens, prefix, settings, tuple(results), found)
    if results[0].nan:
        raise ComputationError("all runs gave equal bits, but some results are NaN, so the comparison proves nothing")
    return report


def against_specification(engine: Engine, ids: Sequence[int]) -> Difference | None:
    """Compare the engine's results and KV rows, computed in one pass, with those of the reference implementation."""
    made = compute(engine, ids, len(ids))
    if made.session is None:
        results = [reference.embedding_and_rows(engine, text) for text in texts_of(ids)]
        vectors, kv = np.stack([result for result, _ in results]), [reference.kv_digest(cache) for _, cache in results]
        spec = RunResult(
            tuple(row_digests(vectors)), tuple(joined_digests(kv)), bool(np.isnan(vectors).any()), embeds=True
        )
        if made.result == spec:
            return None
        return where_results_part(spec, made.result, f"the specification and {threads_text(engine.threads)}")
    logits, wanted = reference.logits_and_rows(engine, ids)
    expected = RunResult(tuple(row_digests(logits)), tuple(reference.kv_digest(wanted)), bool(np.isnan(logits).any()))
    if made.result == expected:
        return None
    between = f"the specification and {RunSetting(engine.threads, len(ids))}"
    for layer in range(len(expected.kv)):
        owner, rows = engine.config.kv_owners[layer], made.session.kv_rows(layer)
        first = wanted.position - len(rows[0])
        expected_rows = [values[owner][first : wanted.position] for values in (wanted.keys, wanted.values)]
        position = first_row(rows, expected_rows, first)
        if position is not None:
            return Difference(between, owner, "keys and values", position, position)
    return where_results_part(expected, made.result, between)
