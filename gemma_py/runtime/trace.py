"""A trace of a pass: a hash of every row that each phase wrote, and which worker wrote it. Used to find where two passes differ.

A trace has a row for each layer and each name of a phase. Phases of the same name and layer share a row.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import bits_of_f32
from gemma_py.kernels.panels import INPUT_BLOCK

UNTRACED = -3750763034362895579  # FNV-1a's first value, as a signed number


class Trace(NamedTuple):
    """Empty arrays switch tracing off. A row of a matmul or of attention has several tiles; `workers` names the worker that claimed
    the last of them."""

    hashes: np.ndarray  # int64 [layers * labels, T], UNTRACED before the pass
    workers: np.ndarray  # int64, the same shape; -1: no worker


NO_TRACE = Trace(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))


def new_trace(rows: int, T: int) -> Trace:
    """For one pass of T tokens."""
    return Trace(np.full((rows, T), UNTRACED, np.int64), np.full((rows, T), -1, np.int64))


@inlined
def is_traced(trace):
    return trace.hashes.shape[0] > 0


@inlined
def hash_word(digest, word):
    """FNV-1a, 32 bits at a time: every step is a bijection, so rows that differ in one word have different hashes."""
    return np.int64((np.uint64(digest) ^ np.uint64(np.uint32(word))) * np.uint64(1099511628211))


@inlined
def trace_rows(trace, at, tokens, x, width, first, last):
    """Add the bits of rows first .. last - 1 of x to the hashes of their tokens.    tokens: [rows], each row's token"""
    for t in range(first, last):
        token = tokens[t]
        for i in range(t * width, (t + 1) * width):
            trace.hashes[at, token] = hash_word(trace.hashes[at, token], bits_of_f32(x[i]))


@inlined
def trace_codes(trace, at, tokens, coded, K, first, last):
    """The same for an input's codes and scales; the sums follow from the codes."""
    for t in range(first, last):
        token = tokens[t]
        for k in range(t * K, (t + 1) * K):
            trace.hashes[at, token] = hash_word(trace.hashes[at, token], coded.codes[k])
        for block in range(t * (K // INPUT_BLOCK), (t + 1) * (K // INPUT_BLOCK)):
            trace.hashes[at, token] = hash_word(trace.hashes[at, token], bits_of_f32(coded.scales[block]))


@inlined
def trace_worker(worker, trace, at, tokens, first, last):
    """Record that this worker computes these rows."""
    for t in range(first, last):
        trace.workers[at, tokens[t]] = worker
