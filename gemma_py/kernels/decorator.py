"""Decorators for all compiled code, and the directory in which the machine code is cached.

This module overrides internals of numba, because numba 0.68 has no public options for the purpose. pyproject.toml pins
numba's version, because internals may change.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba import types
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from gemma_py.paths import cache_dir, private_dir

# numba's own cache would not notice edits in other source files, or changes of these settings of numba. Therefore the name
# of the cache directory contains a hash of all sources and of these settings.
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK")


def _sources() -> list[Path]:
    package = Path(__file__).parent.parent
    return sorted(
        file for part in ("kernels", "models", "runtime", "weights") for file in (package / part).rglob("*.py")
    )


def _cache_path() -> Path | None:
    """Return the private cache directory for these sources and settings, or None if the directory cannot be written."""
    key = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for switch in _SWITCHES:
        key.update(f"{switch}={getattr(numba.config, switch, None)!r}".encode())
    for source in _sources():
        key.update(source.read_bytes())
    try:
        # The cache directory must be private: whoever can write to it can make this process run any machine code.
        path = private_dir(cache_dir() / "kernels" / key.hexdigest()[:24])
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return None


CACHE = _cache_path()


class _SelfRepairingCache(FunctionCache):
    """numba's on-disk cache of one kernel, changed to load faster and to survive a damaged file.

    numba's own `load_overload` first calls `target_context.refresh()`, which takes 0.25 s and 20 MB at every start,
    because `refresh` registers everything that numba can compile. Loading machine code without reference counts does not
    need this registration, and compiling calls `refresh()` by itself. So this class leaves out the call.

    numba handles cache files that are missing or of another version. But a file that a full disk or a crash has
    truncated raises an arbitrary exception. This class then empties the kernel's index, so that the kernel is compiled
    again.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._load_overload(sig, target_context)
        except Exception:
            self.flush()
            return None


class _Dispatcher(CPUDispatcher):
    """numba's dispatcher, changed to compile fewer functions and to use `_SelfRepairingCache`."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the signature for a call, in which a constant argument counts as a variable.

        numba would otherwise compile a function again for every constant argument: 226 functions instead of 150 for a
        forward pass, in 70 s of CPU time instead of 51 s.
        """
        return super().get_call_template([types.unliteral(kind) for kind in args], kws)

    def enable_caching(self) -> None:
        self._cache = _SelfRepairingCache(self.py_func)


class _InlinedLibrary(JITCodeLibrary):
    """numba's library of a function's LLVM code, changed to emit no machine code for helper functions.

    The code of a helper is linked into kernels, and only the kernels are executed. For some 200 helpers, numba would also
    emit separate machine code: a forward pass would take 56 s of CPU time to compile instead of 37 s.
    """

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing. numba's environment is for Python objects and exceptions, which kernels do not use."""

    def _optimize_final_module(self) -> None:
        """Do nothing, because LLVM optimises a helper together with the kernel into which the helper is linked.

        numba would also optimise a helper with its own helpers, and these again with each of their callers. Compiling a forward
        pass would take 43 s of CPU time instead of 34 s, and the machine code would not be faster.
        """

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


class _InliningCompiler(Compiler):
    def __init__(self, typing_context: Any, target_context: Any, _: None, *rest: Any) -> None:
        super().__init__(typing_context, target_context, _InlinedLibrary(target_context.codegen(), "inlined"), *rest)


class _KernelLibrary(JITCodeLibrary):
    """numba's library of a kernel's LLVM code, changed to store only the machine code.

    numba would store the LLVM code too, so that a later compilation could link the kernel into another one. Reading that
    code takes 15 MiB at every start. Kernels are not linked into other kernels (see `_KernelDispatcher`).
    """

    def serialize_using_object_code(self) -> tuple[str, str, tuple[bytes, bytes]]:
        self._ensure_finalized()
        module = self._get_module_for_linking()
        # numba reads from the stored LLVM code which symbols the machine code defines.
        lines = [
            f"define void @{_quoted(symbol.name)}() {{ ret void }}"
            for symbol in module.functions
            if not symbol.is_declaration
        ]
        lines += [
            f"@{_quoted(symbol.name)} = global i8 0" for symbol in module.global_variables if not symbol.is_declaration
        ]
        symbols = llvmlite.binding.parse_assembly("\n".join(lines))
        return self.name, "object", (self._get_compiled_object(), symbols.as_bitcode())


def _quoted(name: str) -> str:
    return f'"{name}"'


class _KernelCompiler(Compiler):
    def __init__(self, typing_context: Any, target_context: Any, _: None, *rest: Any) -> None:
        library = _KernelLibrary(target_context.codegen(), "kernel")
        library.enable_object_caching()
        super().__init__(typing_context, target_context, library, *rest)


class _KernelDispatcher(_Dispatcher):
    """A dispatcher for functions that only Python calls."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} can only be called by Python, because its LLVM code is not stored")


class _InnerDispatcher(_Dispatcher):
    """A dispatcher for functions that only kernels call.

    Such a function has no entry point for Python, because compiling one would take half of the compile time.
    """

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} can only be called by a kernel")


_names: Counter[tuple[str, str]] = Counter()  # (module, name) -> how many functions have this name


def _make_name_unique(function: Callable[..., Any]) -> None:
    """Append a number to a function's name if an earlier function of the module has this name.

    numba makes a compiled function's symbol from the name and a counter of the process. The phases are compiled in several
    processes. So two closures of one name could get one symbol, and the linker would keep only one of them.
    """
    name = function.__module__, function.__qualname__
    if _names[name]:
        function.__qualname__ += f"_{_names[name]}"
    _names[name] += 1


def _compiled(
    kind: type[_Dispatcher],
    function: Callable[..., Any],
    cached: bool = False,
    compiler: type[Compiler] = Compiler,
    **options: Any,
) -> Any:
    """Return a dispatcher that compiles `function` without the GIL, without fastmath, and with IEEE division by zero.

    `_nrt=False` turns off reference counting. Kernels allocate nothing, and their callers hold the arrays, so nothing has
    to be counted. With reference counting, every use of an array in a tuple would be an atomic addition, and a call of
    runtime/sync.py would take 60 ns instead of 6 ns. Hazard: a function may return an array only if the array is an
    argument of the function, or inside a tuple.

    `no_cfunc_wrapper` leaves out an entry point for C, which nothing calls.
    """
    _make_name_unique(function)
    options |= {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
    dispatcher = kind(function, targetoptions={**options, "no_cfunc_wrapper": True}, pipeline_class=compiler)
    if cached and CACHE is not None:
        before = numba.config.CACHE_DIR  # restored below, because other packages' functions must be cached elsewhere
        numba.config.CACHE_DIR = str(CACHE)
        try:
            dispatcher.enable_caching()
        finally:
            numba.config.CACHE_DIR = before
    return dispatcher


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, and cache the machine code on disk."""
    return _compiled(_KernelDispatcher, function, cached=True, compiler=_KernelCompiler)


def phase(function: Callable[..., Any]) -> Any:
    """Compile a large part of a kernel, and cache the machine code on disk.

    The part has a cache entry of its own, so that another process can compile it (see runtime/compiling.py).
    """
    return _compiled(_InnerDispatcher, function, cached=True, no_cpython_wrapper=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a small helper as part of the kernels that call it. The helper has no cache entry."""
    return _compiled(_InnerDispatcher, function, compiler=_InliningCompiler, no_cpython_wrapper=True)


def force_inlined(function: Callable[..., Any]) -> Any:
    """Compile a helper of an innermost loop, and make LLVM inline the helper at every call, however large it is.

    LLVM alone does not inline some helpers. A call of such a helper passes every tuple of arrays through memory, as some
    thirty numbers.
    """
    return _compiled(_InnerDispatcher, function, compiler=_InliningCompiler, no_cpython_wrapper=True, forceinline=True)
