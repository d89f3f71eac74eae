"""Count the source files whose code runs for a token: Python functions of a traced run, and the kernels that they call.

    python tools/count_path.py [decode | stream | both] [MODEL] [--functions] [--json]

decode: a token of `Engine.generate` after the first. stream: a token of a streamed chat completion, from the logits to
the server's socket. A run is divided into windows of a few tokens. A function counts if at least half of the windows
call it, so that timers do not count. Compiled kernels cannot be traced, so the tool looks for the names of kernels in
the callers' bytecode. Functions that only tests and diagnosis use do not count. With --json each mode is one line, a
JSON object.
"""

import argparse
import dis
import json
import sys
import threading
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

import gemma_py

PACKAGE = Path(gemma_py.__file__).parent
WINDOWS, TOKENS = 20, 4  # number of windows, and tokens in each window
# Files that only tests and diagnosis use.
OFF = {"runtime/fault_injection.py", "runtime/profile.py", "runtime/trace.py"}
TIMERS = {"Server.on_tick"}  # on a busy machine, where windows take long, this timer runs in most of them
Place = tuple[str, str]  # (file within the package, function)


class Recorder:
    """Collects the Python functions of the package that any thread calls, unless `window` is None."""

    def __init__(self) -> None:
        self.window: dict[types.CodeType, dict[str, Any]] | None = None
        self.windows: list[dict[types.CodeType, dict[str, Any]]] = []
        self._prefix = f"{PACKAGE}/"

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        window = self.window
        if window is not None and event == "call" and frame.f_code.co_filename.startswith(self._prefix):
            window[frame.f_code] = frame.f_globals

    def cut(self) -> None:
        if self.window is not None:
            self.windows.append(self.window)
        self.window = {}

    def called(self) -> dict[types.CodeType, dict[str, Any]]:
        self.window = None
        every = {code: names for window in self.windows for code, names in window.items()}
        often = Counter(code for window in self.windows for code in window)
        return {code: names for code, names in every.items() if 2 * often[code] >= len(self.windows)}


def named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield the global objects that a function names, attributes of modules, and members of named tuples."""
    at: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            at = names.get(instruction.argval)
        elif isinstance(at, types.ModuleType) and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            at = getattr(at, instruction.argval, None)
        else:
            continue
        yield from at if isinstance(at, tuple) else (at,)


def kernel_function(thing: Any) -> types.FunctionType | None:
    for attribute in ("py_func", "_defn"):  # numba's attributes of kernels and of intrinsics
        function = getattr(thing, attribute, None)
        if isinstance(function, types.FunctionType):
            return function
    return None


def kernels(called: dict[types.CodeType, dict[str, Any]]) -> set[types.CodeType]:
    found: set[types.CodeType] = set()
    left = list(called.items())
    while left:
        for thing in named(*left.pop()):
            function = kernel_function(thing)
            if function is not None and function.__code__ not in found and not is_off(function.__code__):
                found.add(function.__code__)
                left.append((function.__code__, function.__globals__))
    return found


def is_off(code: types.CodeType) -> bool:
    return any(code.co_filename.endswith(f"/{file}") for file in OFF)


def places(codes: Any) -> set[Place]:
    files = ((Path(code.co_filename), code.co_qualname) for code in codes if code.co_qualname not in TIMERS)
    return {(str(file.relative_to(PACKAGE)), name) for file, name in files if file.is_relative_to(PACKAGE)}


def decode(engine: gemma_py.Engine, recorder: Recorder) -> None:
    ids = list(range(2, 20))
    bias = dict.fromkeys(engine.config.eos_token_ids, -100.0)
    # A greedy text would repeat itself. One pass would then compute the guessed tokens of several windows.
    tokens = engine.generate(ids, (WINDOWS + 2) * TOKENS, temperature=1.0, seed=1, logit_bias=bias)
    for number, _ in enumerate(tokens):
        if number and number % TOKENS == 0:
            recorder.cut()


def stream(engine: gemma_py.Engine, recorder: Recorder) -> None:
    from serving import serving

    bias = {str(token): -100.0 for token in engine.ends(engine.template())}
    messages = [{"role": "user", "content": "Count."}]
    asked = {"messages": messages, "stream": True, "max_tokens": (WINDOWS + 2) * TOKENS, "logit_bias": bias}
    with serving(engine) as server:
        connection = server.send("POST", "/v1/chat/completions", json.dumps(asked).encode(), closing=True)
        with connection, connection.makefile() as lines:
            number = 0
            for line in lines:
                number += line.startswith("data: {")
                if number and number % TOKENS == 0 and line.startswith("data: {"):
                    recorder.cut()


def count(mode: str, model: str) -> dict[str, Any]:
    run: Callable[[gemma_py.Engine, Recorder], None] = {"decode": decode, "stream": stream}[mode]
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        with gemma_py.load(model, threads=2) as engine:
            sys.setprofile(recorder)
            run(engine, recorder)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    called = recorder.called()
    traced, files = {file for file, _ in places(called)}, defaultdict(list)
    for file, function in sorted(places(called) | places(kernels(called))):
        files[file].append(function)
    python = sum(file in traced for file in files)
    return {"mode": mode, "files": len(files), "python": python, "functions": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", default="both", choices=("decode", "stream", "both"))
    parser.add_argument("model", nargs="?", default="tiny-gemma3")
    parser.add_argument("--functions", action="store_true", help="name the functions of each file")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for mode in ("decode", "stream") if args.mode == "both" else (args.mode,):
        found = count(mode, args.model)
        if args.json:
            print(json.dumps(found))
            continue
        kernel_files = found["files"] - found["python"]
        print(
            f"{mode}: {found['files']} files, {found['python']} with Python that runs and {kernel_files} of kernels alone"
        )
        for file, functions in found["functions"].items():
            print(f"  {file}" + (f": {', '.join(functions)}" if args.functions else ""))


if __name__ == "__main__":
    main()
