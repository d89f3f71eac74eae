import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import numpy as np
import pytest
from repository import TINY, child_environment

import gemma_py
from gemma_py.cli.progress import LoadProgress
from gemma_py.errors import GemmaWarning
from gemma_py.kernels.decorator import CACHE, inlined
from gemma_py.kernels.simd import target
from gemma_py.kernels.simd.target import TARGET, Instructions, instructions_of, key_of
from gemma_py.runtime import compiling
from gemma_py.runtime.cache import KV_TYPES

LONG = 300.0
KERNELS = [kernel for share in (*compiling.SHARES, (compiling.forward,)) for kernel in share]
linux = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")

# Compiles three small phases instead of all phases. Prints the number compiled in other processes and in this process.
PROGRAM = """
import signal, sys, time
from gemma_py.cli.progress import LoadProgress, shown_warnings
from gemma_py.runtime import compiling
from gemma_py.runtime.phases import rows_phase, scores_phase, trace_phase

few = (trace_phase, scores_phase, rows_phase)
with shown_warnings(), compiling.Compilation("float32", LoadProgress(), (few[:1], few[1:2]), few[2]) as compilation:
    print("begun", flush=True)
    if "die" in sys.argv:
        compilation.processes[0].kill()
    if "stop" in sys.argv:
        compiling._SILENCE = 3.0
        compilation.processes[0].send_signal(signal.SIGSTOP)
    if "stay" in sys.argv:
        time.sleep(600)
    compilation.wait()
left = [process for process in compilation.processes if process.returncode is None]
for kernel in few:
    kernel.compile(compiling.signature(kernel, "float32"))
print(sum(not kernel.stats.cache_misses for kernel in few), sum(bool(kernel.stats.cache_misses) for kernel in few), len(left))
"""


def start(cache: Path, *command: str) -> "subprocess.Popen[str]":
    environment = child_environment(XDG_CACHE_HOME=str(cache))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=pipe, stderr=pipe, text=True)


def helpers(cache: Path) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes()
        except OSError:
            continue
        if b"gemma_py.runtime.compiling" in arguments and os.fsencode(cache) in arguments:
            found.append(int(file.parent.name))
    return found


def comes_true(what: Callable[[], object]) -> bool:
    end = time.monotonic() + LONG
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(what())


@contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def test_what_is_compiled_ahead_is_what_the_pass_asks_for(tiny_engine: gemma_py.Engine) -> None:
    """If the types of arguments differed, a first start would compile kernels twice, which only a clock would show."""
    assert CACHE is not None
    for made in KERNELS:
        known = {tuple(key[0]) for key in made._cache._cache_file._load_index()}
        wanted = {compiling.signature(made, kv) for kv in KV_TYPES}
        assert known and known <= wanted, made.__name__


def test_with_poison_a_pass_compares_its_machine_code_with_the_types_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gemma_py.load(TINY, threads=1) as engine:
        engine.instruments.poison = True
        engine.session().prefill([1, 2, 3])
        monkeypatch.setattr(engine.runner, "_forward", lambda *arguments: True)
        with pytest.raises(AssertionError):
            engine.session().prefill([1, 2, 3])


def test_another_processor_on_one_home_directory_compiles_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triple, cpu, features = compiling.TARGET
    monkeypatch.setattr(compiling, "CACHE", tmp_path)
    compiling.mark_compiled("float32")
    assert [kv for kv in KV_TYPES if compiling.first_time(kv)] == ["bfloat16", "q8_0"]
    for other in (
        ("aarch64-unknown-linux-gnu", cpu, features),
        (triple, "another", features),
        (triple, cpu, "+another"),
    ):
        monkeypatch.setattr(compiling, "TARGET", other)
        assert compiling.first_time("float32")


def test_answers_of_llvm_are_stored_for_each_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triple, cpu, features = TARGET
    asked = []

    def ask(what: tuple[str, str, str]) -> Instructions:
        asked.append(what)
        return Instructions(zmm=True, vnni=what == TARGET, sdot=False, i8mm=False)

    monkeypatch.setattr(target, "ask_llvm", ask)
    others = [("aarch64", cpu, features), (triple, "another", features), (triple, cpu, "+another")]
    for what in (TARGET, *others) * 2:
        assert instructions_of(what, tmp_path) == (True, what == TARGET, False, False)
    assert asked == [TARGET, *others]
    (file,) = tmp_path.glob(f"*{key_of(TARGET)}*")
    for damaged in (b"", b"5", b"[true]", b"[1, 1, 0, 0]", b"\xff", b"[true, true"):
        file.write_bytes(damaged)
        assert instructions_of(TARGET, tmp_path) == instructions_of(TARGET, tmp_path) == (True, True, False, False)
    assert asked[4:] == [TARGET] * 6
    for folder in (None, Path("/proc/nowhere")):
        assert instructions_of(TARGET, folder) == (True, True, False, False)
    assert asked[10:] == [TARGET] * 2


def test_processes_compile_what_this_one_finds(tmp_path: Path) -> None:
    for times in range(2):
        out, err = start(tmp_path, "-c", PROGRAM).communicate(timeout=LONG)
        assert out.split() == ["begun", "3", "0", "0"], err
        assert err == "compiling kernels, once on this machine for each value of --kv: about a minute\n", times


@pytest.mark.parametrize("what", ["die", "stop"])
def test_a_process_that_dies_or_stops_is_replaced_by_this_process(tmp_path: Path, what: str) -> None:
    out, err = start(tmp_path, "-c", PROGRAM, what).communicate(timeout=LONG)
    _, elsewhere, here, left = out.split()
    assert int(here) >= 1 and int(elsewhere) + int(here) == 3 and left == "0"
    assert err.splitlines()[1:] == [
        "gemma_py: a process that compiles kernels ended early; the main process compiles the remaining kernels"
    ]


# Acts as a compiling process that answers after six seconds. Until then it sends signs of life or stays silent.
SLOW = """
import sys, time
for line in sys.stdin:
    for _ in range(60):
        time.sleep(0.1)
        if "silent" not in sys.argv:
            print(flush=True)
    print(line, end="", flush=True)
"""


@pytest.mark.parametrize("how", ["alive", "silent"])
def test_a_slow_process_is_waited_for_while_it_shows_life(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(compiling, "first_time", lambda kv: True)
    monkeypatch.setattr(compiling, "_SILENCE", 3.0)
    monkeypatch.setattr(compiling.machine, "threads", lambda: 1)
    start_process = subprocess.Popen

    def slow(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        return start_process([sys.executable, "-c", SLOW, how], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", slow)
    with compiling.Compilation("float32", shares=[KERNELS[:1]], last=KERNELS[1]) as compilation:
        if how == "alive":
            compilation.wait()
        else:
            with pytest.warns(GemmaWarning, match="kernels ended early"):
                compilation.wait()
    assert compilation._done == (2 if how == "alive" else 0)


def test_a_process_shows_life_only_while_it_computes(tmp_path: Path) -> None:
    program = "import sys; from gemma_py.runtime import compiling; sys.argv = ['', str(compiling.CACHE), 'float32']; compiling.main()"
    environment = child_environment(XDG_CACHE_HOME=str(tmp_path))
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    with ended(process):
        process.stdin.write("rows_phase\n")
        process.stdin.flush()
        lines = [process.stdout.readline()]
        while lines[-1] != "rows_phase\n":
            assert lines[-1] == "\n"
            lines.append(process.stdout.readline())
        assert len(lines) > 1
        if select.select([process.stdout], [], [], 2 * compiling._BEAT)[0]:  # the process may send a last sign of life
            assert process.stdout.readline() == "\n"
        assert not select.select([process.stdout], [], [], 3 * compiling._BEAT)[0]


@linux
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = start(tmp_path, "-c", PROGRAM, "stay")
    with ended(program):
        assert comes_true(lambda: helpers(tmp_path))
    assert comes_true(lambda: not helpers(tmp_path))


@linux
def test_an_interrupted_compilation_ends_soon_and_leaves_no_process(tmp_path: Path) -> None:
    program = start(tmp_path, "-m", "gemma_py", "generate", str(TINY), "--prompt", "a")
    with ended(program):
        assert comes_true(lambda: helpers(tmp_path))
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=LONG)
        assert program.returncode == 130, err
        assert out == ""
        assert len(err.splitlines()) == 1, err
    # The main process cannot stop a process whose start was interrupted. Such a process ends when its stdin is closed.
    assert comes_true(lambda: not helpers(tmp_path))
    assert not list(tmp_path.rglob("compiled-*"))  # finished kernels are kept for the next start


@linux
def test_an_interrupt_between_the_starts_of_two_processes_ends_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "first_time", lambda kv: True)
    monkeypatch.setattr(compiling.machine, "threads", lambda: 2)
    begun: list[subprocess.Popen[bytes]] = []
    start_process = subprocess.Popen

    def interrupted_at_the_second(*arguments: object, **options: object) -> "subprocess.Popen[bytes]":
        if begun:
            raise KeyboardInterrupt
        begun.append(start_process(*arguments, **options))  # type: ignore[call-overload]
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted_at_the_second)
    with pytest.raises(KeyboardInterrupt), compiling.Compilation("float32"):
        pass
    assert begun[0].returncode is not None


@linux
def test_an_interrupt_after_the_start_of_a_thread_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is still running when its pipes are closed would print a traceback."""
    monkeypatch.setattr(compiling, "first_time", lambda kv: True)
    joined: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            joined.append(self)

    monkeypatch.setattr(compiling.threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt), compiling.Compilation("float32"):
        pass
    assert len(joined) == 1 and not joined[0].is_alive()


def test_no_process_is_started_if_all_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "first_time", lambda kv: False)
    with compiling.Compilation("float32") as compilation:
        compilation.wait()
    assert compilation.processes == []


def test_a_terminal_shows_the_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadProgress()
    compilation = compiling.Compilation("float32", progress, [KERNELS[:2]])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress("compiling kernels", 0, 3, "kernels")
    compilation._done = 2
    compilation._feeders = [threading.Thread(target=time.sleep, args=(0.5,))]
    compilation._feeders[0].start()
    with pytest.warns(GemmaWarning, match="kernels ended early"):
        compilation.wait()
    first, shown = capsys.readouterr().err.split("\n")
    assert first == "compiling kernels, once on this machine for each value of --kv: about a minute"
    assert shown == "\r\x1b[Kcompiling kernels: 2 of 3\r\x1b[K"


def test_no_process_is_started_without_a_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "CACHE", None)
    with compiling.Compilation("float32", LoadProgress()) as compilation:
        compilation.wait()
    assert compilation.processes == []
    assert capsys.readouterr().err.startswith("compiling kernels")


# --- checks of the compiled code --------------------------------------------------------------------------------------


@inlined
def _next(x, by):
    return x + by


@inlined
def _three_more(x):
    return _next(_next(x, 1), 2)


def test_a_helper_is_compiled_once_whatever_constants_it_is_called_with() -> None:
    _three_more.compile((numba.int64,))
    assert list(_next.overloads) == [(numba.int64, numba.int64)]


def test_a_helper_has_no_entry_for_python() -> None:
    with pytest.raises(TypeError, match="_next can only be called by a kernel"):
        _next(1, 2)


@inlined
def _allocating(n):
    return (np.zeros(n),)


def test_what_allocates_is_not_compiled() -> None:
    """Compiled code counts no references, so memory that it allocated would never be freed."""
    with pytest.raises(numba.TypingError, match="Only accept returning of array passed into the function"):
        _allocating.compile((numba.int64,))
