"""The one decorator of all compiled code, and where its machine code is kept."""

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba.core.runtime import _nrt_python

from gemma_py.paths import cache_dir, private_dir

# numba's own key sees neither edits in other files nor the optimiser's switches, so both are in the directory's name.
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK")


def _sources() -> list[Path]:
    package = Path(__file__).parent.parent
    return sorted(file for part in ("kernels", "model", "runtime") for file in package.glob(f"{part}/*.py"))


def _cache_path() -> Path | None:
    """A private directory for this very code; None where none can be written, and nothing is cached then."""
    key = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for switch in _SWITCHES:
        key.update(f"{switch}={getattr(numba.config, switch, None)!r}".encode())
    for source in _sources():
        key.update(source.read_bytes())
    try:
        # Machine code is loaded from here: nobody else may have put it there.
        path = private_dir(cache_dir() / "kernels" / key.hexdigest()[:24])
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return None


CACHE = _cache_path()


def first_time() -> bool:
    """Whether kernels have never been compiled into the cache here; always, where nothing can be cached."""
    return CACHE is None or not (CACHE / "compiled").exists()


def mark_compiled() -> None:
    if CACHE is not None:
        with contextlib.suppress(OSError):
            (CACHE / "compiled").touch()


def kernel(function: Callable[..., Any]) -> Any:
    """njit without the GIL, without fastmath, with IEEE division, cached. Kernels allocate nothing."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(CACHE or "")
    try:
        made = numba.njit(nogil=True, error_model="numpy", boundscheck=False, cache=CACHE is not None)(function)
    finally:
        numba.config.CACHE_DIR = before
    if CACHE is not None:
        made._cache.load_overload = _mending(made._cache)
    return made


def _mending(cache: Any) -> Callable[..., Any]:
    """numba's loading of a kernel from disk, without what only a compilation needs, and mended where a file is damaged.

    numba would first import and register everything that it can compile: a third of a start in which nothing is compiled,
    and 40 MB. Machine code needs no more than the addresses of its runtime. (A compilation still does all that itself.)

    numba takes care of files that are missing or of another version. A truncated one (a full disk, a machine that went
    down) raises whatever unpickling half of it raises; then the kernel's index is emptied and it is compiled anew.
    """

    def load_or_flush(signature: Any, context: Any) -> Any:
        try:
            _declare_runtime()
            return cache._load_overload(signature, context)
        except Exception:
            cache.flush()
            return None

    return load_or_flush


@functools.cache
def _declare_runtime() -> None:
    for name, address in _nrt_python.c_helpers.items():
        llvmlite.binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def inlined(function: Callable[..., Any]) -> Any:
    """The same for small helpers that kernels call: compiled into them, so never cached alone."""
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)


def borrowing(function: Callable[..., Any]) -> Any:
    """`inlined` for helpers that are called often and only look at their arrays: no reference counts are kept.

    numba counts references at every use of a tuple's array, by atomic additions: 60 ns a call of runtime/sync.py, where
    the work takes 6. The caller holds the arrays, so a helper that neither makes nor returns one can do without.
    """
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, _nrt=False)(function)


def woven(function: Callable[..., Any]) -> Any:
    """`borrowing` for helpers in the innermost loops: always written out where they are called, however large they are.

    LLVM would call some of them, and pass thirty numbers through memory for every tuple of arrays.
    """
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, _nrt=False, forceinline=True)(function)
