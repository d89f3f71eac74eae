"""exp, tanh, log and other functions of the kernels and of the specification are separate code, and give equal bits.

Negative controls change a constant of the kernels or of the specification by one ulp. The comparison must then fail.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
import pytest

from gemma_py.kernels import elementary as production
from gemma_py.kernels import intrinsics, rows
from gemma_py.kernels.simd.codes import load_f16
from gemma_py.kernels.simd.vectors import store
from gemma_py.models.config import Rope
from gemma_py.reference import arithmetic, operations
from gemma_py.reference import elementary as specification

F32 = ("exp", "tanh")
F64 = ("exp64", "log64", "sine_cosine64")
SIDES: dict[str, ModuleType] = {"kernels": production, "specification": specification}


def unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where the bits differ. NaNs count as equal, because machines differ in the bits of a NaN."""
    whole = {4: np.uint32, 8: np.uint64}[a.itemsize]
    return (a.view(whole) != b.view(whole)) & ~(np.isnan(a) & np.isnan(b))


# --- inputs -----------------------------------------------------------------------------------------------------------


def around(x: np.ndarray) -> np.ndarray:
    """The numbers x, the four next floats on either side of each, and the negatives of all these."""
    made, up, down = [x], x, x
    with np.errstate(all="ignore"):  # the next float may be infinite or subnormal
        for _ in range(4):
            up, down = np.nextafter(up, x.dtype.type(np.inf)), np.nextafter(down, x.dtype.type(-np.inf))
            made += [up, down]
    both = np.concatenate(made)
    return np.concatenate([both, -both])


@functools.cache
def inputs32(every: int) -> np.ndarray:
    """Inputs at which implementations of a function are likely to differ, and every `every`-th pattern of bits.

    Implementations differ where a rounding, a branch or a range changes, and at subnormals, infinities and NaN.
    """
    whole = np.arange(-140, 141)
    special = [
        (whole + 0.5) * np.log(2),  # exp writes x as n * ln 2 + r; n changes at these x
        whole * np.log(2),
        [0.0, 0.625, 87.0, 88.0, 1.0, 9.0, np.inf, np.nan, np.finfo(np.float32).max, 1e-45, 1e-38],
        2.0 ** np.arange(-149, 128),
    ]
    edges = around(np.concatenate(special).astype(np.float32))
    patterns = np.arange(0, 2**32, every, dtype=np.uint64).astype(np.uint32).view(np.float32)
    dense = np.random.default_rng(1).uniform(-90, 90, 200_000).astype(np.float32)
    return np.concatenate([edges, patterns, dense, dense / 64])


@functools.cache
def inputs64() -> np.ndarray:
    whole = np.arange(-2000, 2001)
    special = [
        (whole + 0.5) * np.log(2), whole * np.log(2), (whole + 0.5) * np.pi / 2, whole * np.pi / 2,
        (np.arange(1, 4000) ** 3 + 0.5) * np.pi / 2,  # up to 2^36
        [0.0, 1.0, np.sqrt(2.0), 700.0, np.inf, np.nan, np.finfo(np.float64).max, 5e-324, 2.0**26],
        2.0 ** np.arange(-1074.0, 1024.0), np.sqrt(2.0) * 2.0 ** np.arange(-1022.0, 1023.0),
    ]  # fmt: skip
    rng = np.random.default_rng(2)
    patterns = rng.integers(0, 2**64, 300_000, dtype=np.uint64).view(np.float64)
    dense = np.concatenate([rng.uniform(-710, 710, 300_000), rng.uniform(-3, 3, 300_000)])
    return np.concatenate([around(np.concatenate(special)), patterns, dense])


def values(function: Any, x: np.ndarray) -> np.ndarray:
    """Return the results [n, 2]: sine and cosine of sine_cosine64, or twice the result of another function."""
    pair = function.py_func.__name__ == "sine_cosine64"

    @numba.njit(error_model="numpy")
    def each(x: Any, y: Any) -> None:
        for i in range(len(x)):
            if pair:
                y[i, 0], y[i, 1] = function(x[i])
            else:
                y[i, 0] = y[i, 1] = function(x[i])

    y = np.empty((len(x), 2), x.dtype)
    each(x, y)
    return y


# --- both sides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", F32 + F64)
def test_elementary_functions_of_the_kernels_match_the_specification(name: str) -> None:
    x = inputs32(every=499) if name in F32 else inputs64()
    wrong = unequal(values(getattr(production, name), x), values(getattr(specification, name), x)).any(1)
    assert not wrong.any(), x[wrong][:5]


@numba.njit(error_model="numpy")
def both_fma(a, b, c, y):
    for i in range(len(a)):
        y[i, 0], y[i, 1] = intrinsics.fma(a[i], b[i], c[i]), arithmetic.fma(a[i], b[i], c[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_of_the_kernels_matches_the_specification(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.standard_normal(200_000).astype(dtype) for _ in range(3))
    c[:100_000] = -(a * b)[:100_000]
    y = np.empty((len(a), 2), dtype)
    both_fma(a, b, c, y)
    assert not unequal(y[:, 0], y[:, 1]).any()
    assert unequal(y[:, 0], a * b + c).any()


@numba.njit(error_model="numpy")
def both_widened(bits, y):
    for i in range(len(bits)):
        y[i, 0], y[i, 1] = intrinsics.widen(bits[i]), arithmetic.float32_of(bits[i])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_stored_floats_of_the_kernels_match_the_specification(dtype: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    stored = bits if dtype == np.uint16 else (bits.astype(np.uint32) << 16).view(np.float32)
    y = np.empty((len(stored), 2), np.float32)
    both_widened(stored, y)
    expected = bits.astype(np.uint32) << 16
    assert (y.view(np.uint32) == expected[:, None]).all()


@numba.njit
def load_halves(halves, y):
    for at in range(0, len(y), 16):
        store(y, at, load_f16(halves, 2 * at))


def test_every_finite_float16_is_loaded_exactly() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[bits & 0x7C00 != 0x7C00].view(np.float16)
    y = np.empty(len(finite), np.float32)
    load_halves(finite.view(np.int8), y)
    assert not unequal(y, finite.astype(np.float32)).any()


def test_rounding_to_bfloat16_gives_the_nearest_with_ties_to_even() -> None:
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = ((np.arange(2**16, dtype=np.uint32) << 16)[:, None] | low).reshape(-1)
    x = bits.view(np.float32)
    y = operations.round_to_bfloat16(x.reshape(1, -1))[0]
    assert not (y.view(np.uint32) & 0xFFFF).any()
    assert (np.isnan(y) == np.isnan(x)).all()
    below, above = bits & np.uint32(0xFFFF0000), (bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)
    finite = np.isfinite(x) & np.isfinite(above.view(np.float32))
    x, y, below, above = x[finite], y[finite], below[finite], above[finite]
    exact = x.astype(np.float64)
    down, up = (np.abs(side.view(np.float32).astype(np.float64) - exact) for side in (below, above))
    upward = (up < down) | ((up == down) & (below & 0x10000 != 0))
    assert (y.view(np.uint32) == np.where(upward, above, below)).all()


# --- planted differences ----------------------------------------------------------------------------------------------


# A change of one ulp in these constants changes no result: the first moves the 107th bit of a number, and the others
# are added and then subtracted again.
_UNSEEN = {("kernels", 2.3190468138462996e-17), ("specification", 2.3190468138462996e-17), ("specification", 12582912.0),
           ("specification", 6755399441055744.0)}  # fmt: skip

# A change of one ulp in these coefficients changes only one result in ten million, so they change by more ulps.
_STEPS = {1.9875691e-4: 1000, 1.3981999e-3: 1000, 5.7049887e-3: 1000}


def floats(tree: ast.Module) -> list[tuple[ast.Constant, bool, ast.stmt]]:
    """(node, whether it is a float32, statement) for each float constant of a module, except 0, 1/2, 1 and 2."""
    found = []
    for statement in tree.body:
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_F"]
        singles = {inner for call in calls for inner in ast.walk(call)}
        for node in ast.walk(statement):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, float)
                and node.value not in (0.0, 0.5, 1.0, 2.0)
            ):
                found.append((node, node in singles, statement))
    return found


def constants(side: str) -> Iterator[Any]:
    """(side, index in `floats`, name of a function that uses the constant) for each constant."""
    tree = ast.parse(inspect.getsource(SIDES[side]))
    mentioned = {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    for number, (node, _, statement) in enumerate(floats(tree)):
        if (side, node.value) in _UNSEEN:
            continue
        if isinstance(statement, ast.FunctionDef):
            user = statement.name
        else:
            stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            user = next(name for name, names in mentioned.items() if names & stored)
        user = user.replace("_tanh_of_positive", "tanh")
        yield pytest.param(side, number, user, id=f"{side}, {user}, {node.value!r}")


def changed(module: ModuleType, number: int, name: str) -> Callable[..., Any]:
    """A function from a copy of the module in which one constant is the next larger float, or larger by _STEPS."""
    tree = ast.parse(inspect.getsource(module))
    node, single, _ = floats(tree)[number]
    kind = np.float32 if single else np.float64
    value: Any = kind(node.value)  # type: ignore[arg-type]
    for _ in range(_STEPS.get(node.value, 1)):  # type: ignore[arg-type]
        value = np.nextafter(value, kind(np.inf))
    node.value = float(value)
    made: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(tree, module.__file__ or "", "exec"), made)
    function: Callable[..., Any] = made[name]
    return function


@pytest.mark.parametrize(("side", "number", "name"), [case for side in SIDES for case in constants(side)])
def test_control_a_constant_changed_by_one_ulp(side: str, number: int, name: str) -> None:
    other = "kernels" if side == "specification" else "specification"
    x = inputs32(every=99_991) if name in F32 else inputs64()
    assert unequal(values(changed(SIDES[side], number, name), x), expected(other, name)).any()


@functools.cache
def expected(side: str, name: str) -> np.ndarray:
    return values(getattr(SIDES[side], name), inputs32(every=99_991) if name in F32 else inputs64())


# --- rope -------------------------------------------------------------------------------------------------------------


def frequencies_differ(kernel: Callable[..., None]) -> bool:
    """Whether the kernel and the specification give different rope frequencies for any of these configs."""
    wrong = False
    for width in (2, 6, 64, 128, 256, 512):
        for theta in (1.0, 500.0, 10_000.0, 1e6, 8e6, 1e-3):
            for factor, share in ((1.0, 1.0), (2.0, 0.25), (8.0, 0.5), (3.7, 1.0)):
                made = np.full(width // 2, np.nan, np.float32)
                kernel(theta, np.float32(factor), Rope(theta, factor, share).turning(width), made)
                wanted = operations.rope_frequencies(width, theta, np.float32(factor), share)
                wrong |= bool(unequal(made, wanted).any())
    return wrong


def test_rope_frequencies_of_the_kernels_match_the_specification() -> None:
    assert not frequencies_differ(rows.rope_frequencies)


@pytest.mark.parametrize(("old", "new"), [
    (" / factor", " * (_F(1.0) / factor)"), ("_F(exp64(", "(exp64("), ("np.float64(half)", "np.float64(half - 1)"), ("-(", "("),
    ("[turning:]", "[turning + 1 :]"), ("range(turning)", "range(half)"),
])  # fmt: skip
def test_control_other_rope_frequencies(old: str, new: str) -> None:
    function: FunctionType = rows.rope_frequencies.py_func
    source = inspect.getsource(function).replace("@kernel", "@numba.njit(error_model='numpy')")
    assert old in source
    made = {**vars(rows), "numba": numba}
    exec(source.replace(old, new), made)
    assert frequencies_differ(made["rope_frequencies"])
