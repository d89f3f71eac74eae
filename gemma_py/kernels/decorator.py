"""The decorators of all compiled code, and where its machine code is kept."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core.registry import CPUDispatcher

from gemma_py.paths import cache_dir, private_dir

# numba's own key sees neither edits in other files nor the optimiser's switches, so both are in the directory's name.
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK")


def _sources() -> list[Path]:
    package = Path(__file__).parent.parent
    return sorted(
        file
        for part in ("kernels", "models", "reference", "runtime", "weights")
        for file in (package / part).rglob("*.py")
    )


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


class _Compiled(CPUDispatcher):
    """numba's, without what kernels can do without: a first start spends its time on that."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Constants are values: numba would compile a function anew for every one that it is called with."""
        return super().get_call_template([types.unliteral(kind) for kind in args], kws)


class _Inner(_Compiled):
    """For kernels alone. It has no entry for Python, which would take half of its time to compile."""

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} can only be called by a kernel")


def _compiled(made: type[_Compiled], function: Callable[..., Any], cached: bool = False, **options: Any) -> Any:
    """Without the GIL, without fastmath, with IEEE division, and without counting references.

    Whoever calls a kernel holds the arrays, and kernels allocate nothing, so nothing need be counted; numba would count at
    every use of a tuple's array, by atomic additions: 60 ns a call of runtime/sync.py, where the work takes 6. The price:
    no function may return an array, unless it is one of its arguments. (In a tuple it may.)
    """
    options |= {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
    dispatcher = made(function, targetoptions={**options, "no_cfunc_wrapper": True})
    if cached and CACHE is not None:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(CACHE)
        try:
            dispatcher.enable_caching()
        finally:
            numba.config.CACHE_DIR = before
        dispatcher._cache.load_overload = _self_repairing(dispatcher._cache)
    return dispatcher


def kernel(function: Callable[..., Any]) -> Any:
    """What Python calls. Kept on disk."""
    return _compiled(_Compiled, function, cached=True)


def phase(function: Callable[..., Any]) -> Any:
    """A large part of a kernel. Kept on disk, so that another process can compile it (see runtime/compiling.py)."""
    return _compiled(_Inner, function, cached=True, no_cpython_wrapper=True)


def _self_repairing(cache: Any) -> Callable[..., Any]:
    """numba's loading of a kernel from disk, without what only a compilation needs, and mended where a file is damaged.

    numba would first import and register everything that it can compile: a third of a start in which nothing is compiled,
    and 40 MB. Machine code that counts no references needs none of it. (A compilation still does all that itself.)

    numba takes care of files that are missing or of another version. A truncated one (a full disk, a machine that went
    down) raises whatever unpickling half of it raises; then the kernel's index is emptied and it is compiled anew.
    """

    def load_or_flush(signature: Any, context: Any) -> Any:
        try:
            return cache._load_overload(signature, context)
        except Exception:
            cache.flush()
            return None

    return load_or_flush


def inlined(function: Callable[..., Any]) -> Any:
    """For small helpers: compiled into the kernels that call them, so never kept alone."""
    return _compiled(_Inner, function, no_cpython_wrapper=True)


def force_inlined(function: Callable[..., Any]) -> Any:
    """`inlined` for helpers in the innermost loops: always written out where they are called, however large they are.

    LLVM would call some of them, and pass thirty numbers through memory for every tuple of arrays.
    """
    return _compiled(_Inner, function, no_cpython_wrapper=True, forceinline=True)
