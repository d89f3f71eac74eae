"""Benchmarks like those of llama-bench: pp512 processes a prompt of 512 tokens, tg64 generates 64 tokens.

The suffix `@ d2048` means that the KV cache holds 2,048 tokens before the clock starts. Only forward passes are timed:
the token ids are fixed, so there is no tokenisation and no sampling.
"""

import hashlib
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gemma_py import machine
from gemma_py.checks import limits, verify
from gemma_py.checks.cost import BYTES, FLOP, run_cost
from gemma_py.checks.limits import Limits
from gemma_py.checks.verify import ReportFraction
from gemma_py.errors import InputError, MismatchError
from gemma_py.formats.floats import bytes_for_digest
from gemma_py.generate.engine import Engine
from gemma_py.runtime.cache import Cache, check_context
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.runtime.profile import WAIT, WORK, Profile
from gemma_py.runtime.runner import CHUNK, SequenceInput


@dataclass(frozen=True)
class BenchTest:
    """One test of the benchmark, which computes a prompt in chunks (pp) or decodes tokens one by one (tg).

    depth: the number of tokens in the KV cache before the test
    """

    prompt: bool
    tokens: int
    depth: int = 0
    whole: bool = False  # the prompt is one pass, because an embedding model takes a text whole

    def __str__(self) -> str:
        at = f" @ d{self.depth}" if self.depth else ""
        return f"{'pp' if self.prompt else 'tg'}{self.tokens}{at}"

    @property
    def passes(self) -> list[int]:
        if not self.prompt:
            return [1] * self.tokens
        if self.whole:
            return [self.tokens]
        return [min(CHUNK, self.tokens - first) for first in range(0, self.tokens, CHUNK)]

    @property
    def weight(self) -> int:
        """The estimated duration of a run, in units of the time to compute one token. The progress bar uses it.

        Every pass reads all weights, which is assumed to take as long as computing 8 tokens.
        """
        return self.tokens + 8 * len(self.passes)


@dataclass
class BenchRow:
    """The durations of one test with one number of threads, in seconds per round."""

    threads: int
    test: BenchTest
    seconds: list[float] = field(default_factory=list)
    digest: str = ""  # sha256 of the last logits and the final KV cache
    profiles: list[Profile] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [self.test.tokens / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        """The median over the rounds, in tokens per second."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


def for_embeddings(tests: Sequence[BenchTest]) -> tuple[BenchTest, ...]:
    """Return the tests, changed so that each prompt is one text. Raise InputError if a test cannot run with an embedding
    model.
    """
    for test in tests:
        if not test.prompt or test.depth:
            raise InputError(
                f"{test}: an embedding model takes a text whole and generates nothing; use `-p TOKENS -n 0` and leave -d out"
            )
    return tuple(replace(test, whole=True) for test in tests)


def check_tests_fit(tests: Sequence[BenchTest], context: int) -> None:
    for test in tests:
        check_context(context, test.tokens, after=test.depth or None)


class Benchmark:
    """Runs every test with every number of threads. `rows` has the results so far."""

    def __init__(self, engine: Engine, threads: Sequence[int], tests: Sequence[BenchTest]) -> None:
        if engine.config.embedding is not None:
            tests = for_embeddings(tests)
        check_tests_fit(tests, engine.context)
        self.engine = engine
        self._all = [BenchRow(count, test) for count in threads for test in tests]
        self._limits = {count: Limits(count) for count in threads}
        self._starts: dict[int, Cache] = {}
        self._digests: dict[BenchTest, str] = {}

    @property
    def rows(self) -> list[BenchRow]:
        return [row for row in self._all if row.seconds]

    @property
    def limits(self) -> list[Limits]:
        return [found for found in self._limits.values() if found.samples]

    def run(self, rounds: int, profile: bool, progress: ReportFraction) -> None:
        """Run every test once per round, so that a slow phase of the machine affects all tests alike."""
        total = rounds * sum(row.test.weight for row in self._all)
        total += sum(depth for depth in {row.test.depth for row in self._all})
        done = 0
        values = limits.memory_to_read()
        for number in range(rounds):
            before = 0
            for row in self._all:
                if row.threads != before:
                    before = row.threads
                    self.engine.set_threads(row.threads)
                    self._warm_up()
                done += 0 if row.test.depth in self._starts else row.test.depth
                progress(
                    f"{row.test} on {verify.threads_text(row.threads)}, round {number + 1} of {rounds}", done / total
                )
                self._measure(row, profile)
                self._limits[row.threads].sample(self.engine.run_kernel, values)
                done += row.test.weight

    def _warm_up(self) -> None:
        """Run one untimed pass, because the first pass of a worker team allocates memory."""
        longest = max(max(row.test.passes) for row in self._all)
        self._pass(self.engine.new_cache(), self._ids(longest))

    def _measure(self, row: BenchRow, profile: bool) -> None:
        instruments, ids = self.engine.instruments, self._ids(row.test.tokens)
        cache = self._start(row.test.depth)
        instruments.profile = Profile(row.threads, len(self.engine.program.labels)) if profile else None
        first = 0
        try:
            start = time.perf_counter()
            for T in row.test.passes:
                logits = self._pass(cache, ids[first : first + T])
                first += T
            seconds = time.perf_counter() - start
            row.profiles += [instruments.profile] if instruments.profile else []
        finally:
            instruments.profile = None
        row.seconds.append(seconds)
        self._compare(row, hashlib.sha256(bytes_for_digest(logits) + " ".join(cache.digest()).encode()).hexdigest())

    def _compare(self, row: BenchRow, digest: str) -> None:
        row.digest = digest
        if self._digests.setdefault(row.test, digest) != digest:
            raise MismatchError(
                f"{row.test} on {verify.threads_text(row.threads)} gave other bits than an earlier run; `gemma_py verify` shows where"
            )

    def _pass(self, cache: Cache, ids: list[int]) -> np.ndarray:
        ((logits,),) = self.engine.run_together([SequenceInput(cache, ids)])
        return logits

    def _ids(self, count: int) -> list[int]:
        return verify.prompt(count, self.engine.config.vocab_size)

    def _start(self, depth: int) -> Cache:
        """Return a copy of a KV cache with `depth` tokens. The tokens are computed only at the first call."""
        if depth not in self._starts:
            cache = self.engine.new_cache()
            ids = self._ids(depth)
            for first in range(0, depth, CHUNK):
                self._pass(cache, ids[first : first + CHUNK])
            self._starts[depth] = cache
        return self._starts[depth].copy()


# --- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSummary:
    """The size of the measured model. bytes: the total size of the tensors in the checkpoint."""

    name: str
    bytes: int
    parameters: int


def model_summary(engine: Engine) -> ModelSummary:
    tensors = engine.checkpoint.tensors.values()
    parameters = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in tensors)
    return ModelSummary(engine.name.removesuffix(".gguf"), sum(tensor.data.nbytes for tensor in tensors), parameters)


def cost_of(engine: Engine, test: BenchTest) -> np.ndarray:
    """Return the floating-point operations and the bytes read in one run of a test: int64 [names of phases, 2]."""
    return run_cost(engine.program, KV_TYPES[engine.kv_type], test.depth, test.passes)


def figures(engine: Engine, row: BenchRow, limit: Limits) -> dict[str, Any]:
    """Return the results of the median run, for JSON and tables. Rates are in 10^9 per second."""
    flop, read = (int(part) for part in cost_of(engine, row.test).sum(0))
    seconds = row.test.tokens / row.rate
    return {
        "threads": row.threads, "test": str(row.test), "tokens": row.test.tokens, "depth": row.test.depth,
        "tokens_per_second": row.rate, "stdev": row.spread, "rounds": row.rates,
        "gflops": flop / seconds / 1e9, "gbytes_per_second": read / seconds / 1e9,
        "of_f32": flop / seconds / limit.f32, "of_int16": flop / seconds / limit.int16,
        "of_memory": read / seconds / limit.memory, "digest": row.digest,
    }  # fmt: skip


# For each line of the printed profile, the phases whose times the line sums. Lines are in the order of a pass. A line whose
# phases a model does not have is not printed.
GROUPS: dict[str, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "norms, gelu, codes": (
        "middle", "end", "feed-forward end", "output input", "down input", "experts' down input", "dense input",
        "wanted rows",
    ),
    "streams": (
        "stream projections", "streams", "router", "modalities", "coefficients", "predict", "correct",
    ),
    "query, key, value": ("query, key and value",),
    "rope and KV": ("rope and kv",),
    "attention": ("scores", "attention"),
    "output": ("output",),
    "feed-forward: gate, up": ("gate and up",),
    "feed-forward: down": ("down",),
    "experts": ("experts' gate and up", "experts' down"),
    "per-layer inputs": (
        "per-layer inputs", "per-layer gate", "per-layer projection", "layer input gate", "layer input",
        "layer input projection",
    ),
    "head": ("head", "dense"),
}  # fmt: skip


def phases(engine: Engine, row: BenchRow, limit: Limits) -> list[dict[str, Any]]:
    """Return the lines of the profile, each with rates and with the mean of the workers' times in seconds.

    The line "waiting" is the time that workers wait at barriers and for KV rows. The line "waking, Python" is the rest of
    the elapsed time.
    """
    cost, total = len(row.seconds) * cost_of(engine, row.test), sum(row.seconds)
    spent = np.sum([profile.nanoseconds for profile in row.profiles], axis=0).mean(0) / 1e9
    table = []
    for name, members in GROUPS.items():
        numbers = [engine.program.label(member) for member in members if member in engine.program.labels]
        if not numbers:
            continue
        seconds = float(spent[numbers, WORK].sum())
        flop, read = (int(cost[numbers, what].sum()) for what in (FLOP, BYTES))
        entry: dict[str, Any] = {"phase": name, "seconds": seconds, "share": seconds / total}
        if flop and seconds:
            entry |= {
                "gflops": flop / seconds / 1e9, "gbytes_per_second": read / seconds / 1e9,
                "of_f32": flop / seconds / limit.f32, "of_int16": flop / seconds / limit.int16,
                "of_memory": read / seconds / limit.memory,
            }  # fmt: skip
        table.append(entry)
    waiting = float(spent[:, WAIT].sum())
    outside = total - float(spent.sum())
    for name, seconds in (("waiting", waiting), ("waking, Python", outside)):
        table.append({"phase": name, "seconds": seconds, "share": seconds / total})
    return table


def report(engine: Engine, bench: Benchmark) -> dict[str, Any]:
    model, by_threads = model_summary(engine), {limit.threads: limit for limit in bench.limits}
    tests = []
    for row in bench.rows:
        limit = by_threads[row.threads]
        entry = figures(engine, row, limit)
        if row.profiles:
            entry["profile"] = phases(engine, row, limit)
            entry["passes"] = sum(profile.passes for profile in row.profiles)
            entry["barriers"] = sum(profile.barriers for profile in row.profiles)
        tests.append(entry)
    return {
        "model": model.name, "bytes": model.bytes, "parameters": model.parameters, "format": engine.checkpoint.format,
        "machine": {"processor": machine.name(), "system": platform.platform(), "cores": machine.threads()},
        "limits": [
            {"threads": limit.threads, "f32_gflops": limit.f32 / 1e9, "int16_gops": limit.int16 / 1e9,
             "memory_gbytes_per_second": limit.memory / 1e9}
            for limit in bench.limits
        ],
        "tests": tests,
    }  # fmt: skip
