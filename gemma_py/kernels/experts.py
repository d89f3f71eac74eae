"""Mixture of experts: the choice of experts for a row, the rows of each expert, and the sum over a row's experts.

    T rows   X experts   C chosen experts of a row   K inputs of a matrix   D outputs of an expert

A row of `routes` has 2 C numbers: the numbers of the chosen experts in ascending order, then the weights of these
experts. Row t is multiplied with C experts, and these products have the numbers t * C .. t * C + C - 1, in the order of
the routes.
"""

import numpy as np

from gemma_py.kernels.decorator import inlined
from gemma_py.kernels.elementary import exp
from gemma_py.kernels.panels import COLUMNS, INPUT_BLOCK, SMALL_GROUP
from gemma_py.kernels.simd.vectors import fma, splat, zero
from gemma_py.kernels.vector_math import load_up_to, store_up_to

_F = np.float32
_ZERO, _CHOSEN = _F(0.0), _F(-1.0)


# --- rows -------------------------------------------------------------------------------------------------------------


@inlined
def _softmax(x, at, X, scale):
    """Replace the numbers x[at : at + X] by softmax(scale * these numbers). The terms are added in the order of their indices."""
    largest = x[at] * scale
    for i in range(at, at + X):
        x[i] = x[i] * scale
        if x[i] > largest:
            largest = x[i]
    total = _ZERO
    for i in range(at, at + X):
        x[i] = exp(x[i] - largest)
        total = total + x[i]
    for i in range(at, at + X):
        x[i] = x[i] / total


@inlined
def _largest(x, at, X):
    """Return the index of the largest number of x[at : at + X], or of the first such number. Skip chosen experts."""
    best = np.int64(-1)
    for i in range(at, at + X):
        if x[i] != _CHOSEN and (best < 0 or x[i] > x[best]):
            best = np.int64(i)
    return best


@inlined
def route_rows(logits, X, scale, gain, C, routes, first, last):
    """Choose C experts for each row: those with the largest probability, softmax(scale * logits). Among experts of equal
    probability, those with lower numbers are chosen.

    An expert's weight is probability / (sum of the probabilities of the chosen experts, ascending) * gain[expert].

    logits: [T * X] f32, read and overwritten
    gain: [X] f32, read
    routes: [T * 2 C] f32, written for rows first .. last - 1

    The probability of a chosen expert is moved to `routes` and replaced by -1, which marks the expert as chosen. With NaN,
    the first C experts are chosen, because no comparison with NaN is true.
    """
    for t in range(first, last):
        at, out = t * X, t * 2 * C
        _softmax(logits, at, X, scale)
        for number in range(C):
            best = _largest(logits, at, X)
            place = number  # insert the new route so that the routes stay in ascending order
            while place > 0 and routes[out + place - 1] > _F(best - at):
                routes[out + place] = routes[out + place - 1]
                routes[out + C + place] = routes[out + C + place - 1]
                place -= 1
            routes[out + place], routes[out + C + place] = _F(best - at), logits[best]
            logits[best] = _CHOSEN
        total = _ZERO
        for number in range(out + C, out + 2 * C):
            total = total + routes[number]
        for number in range(out, out + C):
            routes[number + C] = routes[number + C] / total * gain[np.int64(routes[number])]


@inlined
def mix_rows(x, routes, C, D, y, first, last):
    """Compute y[t, d] = sum over c of weight[t, c] * x[t, c, d], c ascending, one fused multiply-add per product.

    x: [T * C * D] f32, read   routes: [T * 2 C] f32, read
    y: [T * D] f32, written for rows first .. last - 1
    """
    for t in range(first, last):
        for d in range(0, D, COLUMNS):
            total = zero()
            for c in range(C):
                at = (t * C + c) * D
                total = fma(splat(routes[t * 2 * C + C + c]), load_up_to(x, at + d, at + D), total)
            store_up_to(y, t * D + d, (t + 1) * D, total)


# --- the rows of each expert ------------------------------------------------------------------------------------------


def lists_size(T: int, X: int, C: int) -> int:
    """Return the length of the array that `list_products` writes."""
    return X + 1 + 2 * T * C


@inlined
def list_products(routes, T, X, C, lists):
    """List the products of each expert in ascending order.

    lists: int64 [X + 1 + 2 T C], written. Index x has the place in `lists` of the first product of expert x, and index X
    has the place after the last product of all experts. The next T C numbers are the products, expert after expert. The
    rest is scratch.

    A product is left out if its route is not the number of an expert. Otherwise, a wrong route would make a later function
    access memory outside the arrays.
    """
    start, experts = X + 1, X + 1 + T * C
    for expert in range(X + 1):
        lists[expert] = 0
    for product in range(T * C):
        route = routes[product // C * 2 * C + product % C]
        number = np.int64(route) if route >= _ZERO and route < _F(X) else np.int64(-1)
        if number >= 0:
            lists[number + 1] += 1
        lists[experts + product] = number
    lists[0] = start
    for expert in range(X):
        lists[expert + 1] += lists[expert]
    for product in range(T * C):
        number = lists[experts + product]
        if number >= 0:
            lists[lists[number]] = product
            lists[number] += 1
    # Listing a product has moved its expert's index on by one, so lists[x] is now where the products of expert x + 1 begin.
    for expert in range(X, 0, -1):
        lists[expert] = lists[expert - 1]
    lists[0] = start


@inlined
def _copy(x, at, y, to, count):
    for i in range(count):
        y[to + i] = x[at + i]


@inlined
def gather_floats(x, lists, first, last, share, K, y):
    """Copy the input rows of the products lists[first : last]. One row is the input of `share` neighbouring products.

    x: [rows * K] f32, read   y: [(last - first) * K] f32, written
    """
    for place in range(first, last):
        _copy(x, lists[place] // share * K, y, (place - first) * K, K)


@inlined
def gather_codes(x, lists, first, last, share, K, y):
    """Copy the quantised input rows of the products lists[first : last], as `gather_floats` copies floats.

    x: CodedRows, read   y: CodedRows, written
    """
    blocks, groups = K // INPUT_BLOCK, K // SMALL_GROUP
    for place in range(first, last):
        row, to = lists[place] // share, place - first
        _copy(x.codes, row * K, y.codes, to * K, K)
        _copy(x.byte_planes, row * 2 * K, y.byte_planes, to * 2 * K, 2 * K)
        _copy(x.scales, row * blocks, y.scales, to * blocks, blocks)
        _copy(x.sums, row * blocks, y.sums, to * blocks, blocks)
        _copy(x.flip_sums, row * groups, y.flip_sums, to * groups, groups)
        _copy(x.sums_of_16, row * groups, y.sums_of_16, to * groups, groups)


@inlined
def scatter_floats(x, lists, first, last, N, left, right, y):
    """Copy columns left .. right - 1 of an expert's outputs to the rows lists[first : last] of y.

    A row of y belongs to one token and one of the C experts chosen for the token.

    x: [(last - first) * N] f32, read   y: [T * C * N] f32, written in these rows and columns
    """
    for place in range(first, last):
        _copy(x, (place - first) * N + left, y, lists[place] * N + left, right - left)
