"""The decorators of all compiled code, and the directory in which its machine code is cached.

Three things here lean on numba's internals, because numba 0.68 has no public option that does the same. Each says what it
saves. pyproject.toml pins the version for their sake.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core.caching import FunctionCache
from numba.core.registry import CPUDispatcher

from gemma_py.paths import cache_dir, private_dir

# numba's own cache key sees neither edits in other files nor the optimiser's switches, so the directory's name holds both.
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK")


def _sources() -> list[Path]:
    package = Path(__file__).parent.parent
    return sorted(
        file for part in ("kernels", "models", "runtime", "weights") for file in (package / part).rglob("*.py")
    )


def _cache_path() -> Path | None:
    """A private directory for exactly this code; None where none can be written, and then nothing is cached."""
    key = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for switch in _SWITCHES:
        key.update(f"{switch}={getattr(numba.config, switch, None)!r}".encode())
    for source in _sources():
        key.update(source.read_bytes())
    try:
        # Machine code is loaded from this directory, so no other user may write to it.
        path = private_dir(cache_dir() / "kernels" / key.hexdigest()[:24])
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return None


CACHE = _cache_path()


class _SelfRepairingCache(FunctionCache):
    """numba's cache of one kernel on disk, which loads faster and survives a damaged file.

    It leaves out `target_context.refresh()`, by which numba imports and registers everything that it can compile before
    it loads what is compiled already: 0.25 s and 20 MB of every start. Machine code that counts no references needs none of
    that, and a compilation refreshes the context itself.

    numba handles files that are missing or of another version, but a truncated one (a full disk, a crash) raises
    whatever error unpickling half of it gives. Then the kernel's index is emptied and the kernel is compiled anew.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._load_overload(sig, target_context)
        except Exception:
            self.flush()
            return None


class _Dispatcher(CPUDispatcher):
    """numba's dispatcher, made to compile less."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Treat a constant argument as a value of its type.

        numba would compile a function once more for every constant that it is called with: 226 functions for a forward pass
        instead of 150, in 70 s of CPU time instead of 51.
        """
        return super().get_call_template([types.unliteral(kind) for kind in args], kws)

    def enable_caching(self) -> None:
        self._cache = _SelfRepairingCache(self.py_func)


class _InnerDispatcher(_Dispatcher):
    """For functions that only kernels call. They have no entry for Python, which would take half of their compile time."""

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} can only be called by a kernel")


def _compiled(kind: type[_Dispatcher], function: Callable[..., Any], cached: bool = False, **options: Any) -> Any:
    """A dispatcher that compiles `function` without the GIL, without fastmath, and with IEEE division.

    `_nrt=False` turns off reference counting. The caller of a kernel holds the arrays and kernels allocate nothing, so
    nothing has to be counted; numba would count, by atomic additions, at every use of an array in a tuple: a call of
    runtime/sync.py would take 60 ns instead of 6. The price: no function may return an array that is not one of its
    arguments. (Within a tuple it may.)

    `no_cfunc_wrapper` leaves out an entry for C, which nothing calls.
    """
    options |= {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
    dispatcher = kind(function, targetoptions={**options, "no_cfunc_wrapper": True})
    if cached and CACHE is not None:
        before = numba.config.CACHE_DIR  # set for these kernels alone: other packages' functions are cached elsewhere
        numba.config.CACHE_DIR = str(CACHE)
        try:
            dispatcher.enable_caching()
        finally:
            numba.config.CACHE_DIR = before
    return dispatcher


def kernel(function: Callable[..., Any]) -> Any:
    """Decorates a function that Python calls. Its machine code is cached on disk."""
    return _compiled(_Dispatcher, function, cached=True)


def phase(function: Callable[..., Any]) -> Any:
    """Decorates a large part of a kernel. Cached on disk, so that another process can compile it (runtime/compiling.py)."""
    return _compiled(_InnerDispatcher, function, cached=True, no_cpython_wrapper=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorates a small helper. It is compiled into the kernels that call it and is not cached by itself."""
    return _compiled(_InnerDispatcher, function, no_cpython_wrapper=True)


def force_inlined(function: Callable[..., Any]) -> Any:
    """Decorates a helper of the innermost loops: `inlined`, and LLVM must inline it at every call, however large it is.

    Otherwise LLVM calls some of them, and each tuple of arrays that they take goes through memory as some thirty numbers.
    """
    return _compiled(_InnerDispatcher, function, no_cpython_wrapper=True, forceinline=True)
