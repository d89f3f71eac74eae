"""The trace of a pass: a hash of every row that each phase wrote. Two traces show where two passes differ.

The hash arrays have one row for each pair of a layer and a phase name, and one column for each token of the pass.
"""

from typing import NamedTuple

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.intrinsics import bits_of_f32
from gemma_py.kernels.panels import INPUT_BLOCK

UNTRACED = -3750763034362895579  # the offset basis of 64-bit FNV-1a, as a signed integer


class Trace(NamedTuple):
    """The hashes of a pass, and the workers that computed the hashed rows. If the arrays are empty, nothing is traced.

    If several workers compute parts of a row, `workers` has the worker that was recorded last.
    """

    hashes: np.ndarray  # int64 [layers * labels, T], UNTRACED before the pass
    workers: np.ndarray  # int64 [layers * labels, T]; -1 before the pass


NO_TRACE = Trace(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))


def new_trace(rows: int, T: int) -> Trace:
    """Return an empty trace for a pass of T tokens. rows: the number of layers times the number of phase names."""
    return Trace(np.full((rows, T), UNTRACED, np.int64), np.full((rows, T), -1, np.int64))


@inlined
def is_traced(trace):
    return trace.hashes.shape[0] > 0


@inlined
def hash_word(digest, word):
    """Return the FNV-1a hash `digest` after one more word of 32 bits.

    For every word, this is a bijection of `digest`. So two rows that differ in only one word have different hashes.
    """
    return np.int64((np.uint64(digest) ^ np.uint64(np.uint32(word))) * np.uint64(1099511628211))


@inlined
def _bits(x):
    """Return the bits of a float. Every NaN has the bits 0x7FC00000, because the sign of a NaN differs between processors."""
    if x != x:
        return np.int32(0x7FC00000)
    return bits_of_f32(x)


@inlined
def trace_rows(trace, at, tokens, x, width, first, last):
    """Update the hashes in row `at` of the trace with rows first .. last - 1 of x. Row t of x belongs to column tokens[t]."""
    for t in range(first, last):
        token = tokens[t]
        for i in range(t * width, (t + 1) * width):
            trace.hashes[at, token] = hash_word(trace.hashes[at, token], _bits(x[i]))


@inlined
def trace_codes(trace, at, tokens, coded, K, first, last):
    """Update the hashes in row `at` of the trace with codes and scales of rows first .. last - 1 of an input.

    Sums of codes are not traced, because they follow from the codes.
    """
    for t in range(first, last):
        token = tokens[t]
        for k in range(t * K, (t + 1) * K):
            trace.hashes[at, token] = hash_word(trace.hashes[at, token], coded.codes[k])
        for block in range(t * (K // INPUT_BLOCK), (t + 1) * (K // INPUT_BLOCK)):
            trace.hashes[at, token] = hash_word(trace.hashes[at, token], _bits(coded.scales[block]))


@inlined
def trace_worker(worker, trace, at, tokens, first, last):
    for t in range(first, last):
        trace.workers[at, tokens[t]] = worker
