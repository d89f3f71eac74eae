"""Compare the speed of gemma_py with other runtimes, with the weights of one GGUF file, equal ids and equal threads.

    python tools/compare_peers.py [MODEL] [--threads 2] [--rounds 5] [--peers llama.cpp,torch,CTranslate2,OpenVINO]
    python tools/compare_peers.py --ik-llama-bench PATH      # a llama-bench built from the source of ik_llama.cpp
    python tools/compare_peers.py --neighbour 0 19           # also beside a process that keeps one core busy

Needs an idle machine and a GGUF file (by default the demo model). Peers that are not installed are reported and
skipped. Each runtime has a process of its own, and one process works at a time. In a round, every runtime runs every
test, so that compared runs are close in time. The first round is a warm-up and does not count. llama.cpp runs with
several settings, of which the fastest for a test counts. torch computes in float32 with dequantised weights, and its
NLL is the reference. CTranslate2 and OpenVINO quantise the dequantised weights again, to 8 bits with one scale per row.
llama-bench of ik_llama.cpp computes as many tokens, but random ones, and prints no logits.

Prints a markdown table; the last line is one JSON object. The exit code is 1 if a runtime failed, but not if one is
missing.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from peers import texts

from gemma_py import machine
from gemma_py.catalog import DEFAULT_MODEL, resolve
from gemma_py.errors import GemmaError

OURS = "gemma_py"
PEERS_TOOL = Path(__file__).with_name("peers.py")
PROMPT = "The capital of France is Paris. The capital of Germany is"
PAUSE = 0.3


@dataclass(frozen=True)
class Peer:
    """A runtime to compare with.

    modules: Python modules that the runtime needs.
    install: the command that installs these modules.
    settings: name -> options. The fastest setting for a test counts.
    prepared: a file that `peers.py prepare` writes for this runtime.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    settings: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    prepared: str = "."


_TORCH = ("torch", "transformers", "gguf", "accelerate")
_INSTALL_TORCH = "pip install torch==2.13.0 'transformers==5.23.*' gguf accelerate"
PEERS = (
    Peer(
        "llama.cpp",
        ("llama_cpp",),
        "pip install llama-cpp-python  (compiles for some minutes; where its first pass dies of signal 11, seen with GCC "
        "12 on a processor with AMX, leave AMX out: CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON "
        "-DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON')",
        {
            "flash attention": {"flash_attn": True, "n_ubatch": 512},
            "flash attention, batch 2048": {"flash_attn": True, "n_ubatch": 2048},
            "no flash attention": {"flash_attn": False, "n_ubatch": 512},
        },
    ),
    Peer("torch", _TORCH, _INSTALL_TORCH, prepared="float32/config.json"),
    Peer("CTranslate2", ("ctranslate2", *_TORCH), f"{_INSTALL_TORCH} ctranslate2", prepared="int8/config.json"),
    Peer(
        "OpenVINO",
        ("openvino", "optimum", "nncf", *_TORCH),
        "pip install openvino nncf optimum-intel 'transformers==4.57.*' gguf accelerate  (optimum-intel exports Gemma 3 only with "
        "this version of transformers)",
        prepared="openvino/config.json",
    ),
)
PACKAGES = ("gemma_py", "numpy", "numba", "llama_cpp_python", "torch", "transformers", "ctranslate2", "openvino")


class PeerError(Exception):
    """The process of a runtime ended or could not be prepared."""


class Worker:
    """A runtime in a child process, which computes only during `call`."""

    def __init__(self, name: str, command: Sequence[object], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._answer("starting")

    def call(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` reports that the process has ended
            print(json.dumps([method, *arguments]), file=self.process.stdin, flush=True)
        return self._answer(method)

    def _answer(self, doing: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.close()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise PeerError(f"{self.name} ended with {how} while {doing}: {last:.200}")
        return json.loads(line)

    def close(self) -> None:
        """A worker may be closed twice."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Spread(NamedTuple):
    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The speed of gemma_py relative to a peer in each round. The arguments are seconds."""
    return spread([b / a for a, b in zip(ours, theirs, strict=True)])


def best_setting(seconds: dict[str, list[float]]) -> str:
    return min(seconds, key=lambda setting: statistics.median(seconds[setting]))


def missing(peer: Peer) -> list[str]:
    return [module for module in peer.modules if importlib.util.find_spec(module) is None]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Measurements of a runtime.

    seconds: {test: {setting: [seconds of each round]}}
    memory: {setting: peak bytes}
    nll: the NLL of each token, with the first setting
    """

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    nll: list[float] = field(default_factory=list)
    failed: str | None = None

    def best(self, test: str) -> tuple[str, list[float]]:
        setting = best_setting(self.seconds[test])
        return setting, self.seconds[test][setting]


Test = Callable[[Worker], float]


def tests(ids: list[int], prefills: Sequence[int], after: int, count: int) -> dict[str, tuple[int, Test]]:
    """{name of a test: (number of tokens, function that runs the test in a worker)}"""

    def prefill(length: int) -> Test:
        return lambda worker: float(worker.call("prefill", ids[:length]))

    made: dict[str, tuple[int, Test]] = {f"prefill {length}": (length, prefill(length)) for length in prefills}
    made[f"decode {count} after {after}"] = (count, lambda worker: float(worker.call("decode", ids[:after], count)))
    return made


def beside_neighbour(ask: Test, niceness: int) -> Test:
    """The same test beside a process that keeps one core busy."""

    def asked(worker: Worker) -> float:
        busy = subprocess.Popen(["nice", "-n", str(niceness), sys.executable, "-c", "while True: pass"])
        try:
            return ask(worker)
        finally:
            busy.kill()
            busy.wait()

    return asked


def run_rounds(
    workers: dict[tuple[str, str], Worker], work: dict[str, tuple[int, Test]], rounds: int, figures: dict[str, Figures]
) -> None:
    for number in range(rounds + 1):
        for (name, setting), worker in workers.items():
            for test, (_, ask) in work.items():
                if figures[name].failed:
                    continue
                time.sleep(PAUSE)
                try:
                    seconds = ask(worker)
                except PeerError as error:
                    figures[name].failed = str(error)
                    say(f"FAILED: {error}")
                    continue
                if number:
                    figures[name].seconds.setdefault(test, {}).setdefault(setting, []).append(seconds)
        say(f"round {number} of {rounds}" if number else "warmed up")


def whole_process(path: Path, threads: int, rounds: int, with_llama: bool) -> dict[str, list[float]]:
    """{runtime: seconds of a process that loads the model and generates one token, for each round}"""
    ours = [sys.executable, "-m", "gemma_py", "generate", path, "--prompt", PROMPT, "--max-tokens", "1"]
    commands = {OURS: [*ours, "--threads", threads]}
    if with_llama:
        program = (
            f"import llama_cpp; m = llama_cpp.Llama({str(path)!r}, n_threads={threads}, n_threads_batch={threads}, "
            f"verbose=False); print(m({PROMPT!r}, max_tokens=1, temperature=0.0)['choices'][0]['text'])"
        )
        commands["llama.cpp"] = [sys.executable, "-c", program]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run([str(part) for part in command], check=True, capture_output=True)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


# --- printing ---------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def times(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x ({ratio.least:.2f} to {ratio.most:.2f})"


def errors(nll: Sequence[float], truth: Sequence[float]) -> tuple[float, float]:
    apart = [abs(a - b) for a, b in zip(nll, truth, strict=True)]
    return statistics.fmean(apart), max(apart)


def cell(figures: dict[str, Figures], name: str, test: str, count: int) -> str:
    """A runtime's median tokens per second and, for a peer, the relative speed of gemma_py."""
    if test not in figures[name].seconds:
        return "failed"
    setting, theirs = figures[name].best(test)
    rate = spread([count / seconds for seconds in theirs])
    if name == OURS:
        return f"{rate.median:,.1f} tok/s ({rate.least:,.1f} to {rate.most:,.1f})"
    ours = figures[OURS].best(test)[1]
    note = f"; {setting}" if setting else ""
    if len(ours) != len(theirs):  # the runtime failed during the rounds
        return f"{rate.median:,.1f} tok/s, then failed"
    return f"{rate.median:,.1f} tok/s: {times(ratios(ours, theirs))}{note}"


def quality(figures: dict[str, Figures], name: str) -> str:
    if name == "torch":
        return "reference"
    if "torch" not in figures or not figures["torch"].nll or not figures[name].nll:
        return "not measured"
    mean, most = errors(figures[name].nll, figures["torch"].nll)
    return f"{mean:.5f} ({most:.4f})"


def table(
    figures: dict[str, Figures], counts: dict[str, int], whole: dict[str, list[float]], skipped: dict[str, str]
) -> str:
    names = list(figures)
    rows = [["", *names, *skipped], ["---"] * (1 + len(names) + len(skipped))]
    rows += [[test, *(cell(figures, name, test, count) for name in names)] for test, count in counts.items()]
    process = ["process with 1 token"]
    for name in names:
        if name not in whole:
            process.append("")
            continue
        ratio = "" if name == OURS else f": {times(ratios(whole[OURS], whole[name]))}"
        process.append(f"{statistics.median(whole[name]):.2f} s{ratio}")
    rows.append(process)
    peaks = {name: figures[name].memory.values() for name in names}
    rows.append(["peak memory", *(f"{min(peaks[name]) / 1e6:,.0f} MB" if peaks[name] else "" for name in names)])
    rows.append(["NLL, mean (largest) error", *(quality(figures, name) for name in names)])
    return "\n".join(f"| {' | '.join(row + ['missing'] * (len(rows[0]) - len(row)))} |" for row in rows)


def report(figures: dict[str, Figures], counts: dict[str, int], whole: dict[str, list[float]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, figure in figures.items():
        speeds = {
            test: {
                setting: list(spread([count / s for s in seconds])) for setting, seconds in figure.seconds[test].items()
            }
            for test, count in counts.items()
            if test in figure.seconds
        }
        made[name] = {"tok/s": speeds, "memory": figure.memory, "failed": figure.failed}
        if name in whole:
            made[name]["process"] = list(spread(whole[name]))
        if "torch" in figures and figures["torch"].nll and figure.nll:
            made[name]["nll_error"] = list(errors(figure.nll, figures["torch"].nll))
        if name != OURS:
            made[name]["ours/theirs"] = {
                test: list(ratios(figures[OURS].best(test)[1], figure.best(test)[1]))
                for test in speeds
                if figure.failed is None
            }
    return made


# --- the program ------------------------------------------------------------------------------------------------------


def start(
    peers: Sequence[Peer], path: Path, directory: Path, threads: int, figures: dict[str, Figures]
) -> dict[tuple[str, str], Worker]:
    """Start a process for gemma_py and for every setting of every peer. A runtime that does not start is marked as
    failed.
    """
    workers = {}
    wanted = [
        (OURS, "", {}),
        *((peer.name, name, settings) for peer in peers for name, settings in peer.settings.items()),
    ]
    for name, setting, settings in wanted:
        figures.setdefault(name, Figures())
        log = directory / f"{name}-{setting}.log"
        command = [sys.executable, PEERS_TOOL, "serve", name, path, directory, threads, json.dumps(settings)]
        try:
            workers[name, setting] = Worker(name, command, log)
        except PeerError as error:
            figures[name].failed = str(error)
            say(f"FAILED: {error}")
    return workers


def ik_llama(program: Path) -> Peer:
    repack = {"repacked": 1, "not repacked": 0}
    return Peer("ik_llama.cpp", (), "", {name: {"program": str(program), "repack": repack[name]} for name in repack})


def present(wanted: Sequence[str]) -> tuple[list[Peer], dict[str, str]]:
    unknown = set(wanted) - {peer.name for peer in PEERS}
    if unknown:
        raise SystemExit(
            f"unknown peer {', '.join(sorted(unknown))}; expected some of {', '.join(p.name for p in PEERS)}"
        )
    there, skipped = [], {}
    for peer in PEERS:
        if peer.name not in wanted:
            continue
        lacking = missing(peer)
        if lacking:
            skipped[peer.name] = peer.install
            say(f"SKIPPED: {peer.name}, without {', '.join(lacking)}. To install it: {peer.install}")
        else:
            there.append(peer)
    return there, skipped


def compare(args: argparse.Namespace, path: Path, directory: Path) -> int:
    there, skipped = present([name for name in args.peers.split(",") if name])
    if args.ik_llama_bench:
        there.append(ik_llama(args.ik_llama_bench))
    if not all((directory / peer.prepared).exists() for peer in there):
        say("dequantising")
        command = [
            sys.executable,
            str(PEERS_TOOL),
            "prepare",
            str(path),
            str(directory),
            *(peer.name for peer in there),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerError(
                f"the float32 weights for the peers could not be written: {done.stderr.strip().rpartition(chr(10))[2]:.300}"
            )
    figures: dict[str, Figures] = {}
    workers = start(there, path, directory, args.threads, figures)
    try:
        if figures[OURS].failed:
            return 1
        prefills = [int(part) for part in args.prefill.split(",")]
        ids = workers[OURS, ""].call("encode", "\n".join(texts()))
        most = max(*prefills, args.after, args.score)
        if len(ids) < most:
            raise SystemExit(f"the test text has {len(ids)} tokens, but the tests need {most}")
        work = tests(ids, prefills, args.after, args.decode)
        alone = list(work.items())
        for niceness in args.neighbour:
            for name, (count, ask) in alone:
                work[f"{name}, neighbour of nice {niceness}"] = count, beside_neighbour(ask, niceness)
        run_rounds(workers, work, args.rounds, figures)
        for (name, setting), worker in workers.items():
            if not figures[name].failed:
                figures[name].memory[setting] = worker.call("memory")
        for (name, _), worker in workers.items():
            if not figures[name].failed and not figures[name].nll:
                try:
                    figures[name].nll = worker.call("nll", ids[: args.score])
                except PeerError as error:  # the speeds that were measured so far are kept
                    say(f"FAILED: {error}")
    finally:
        for worker in workers.values():
            worker.close()
    llama = any(peer.name == "llama.cpp" and not figures["llama.cpp"].failed for peer in there)
    whole = whole_process(path, args.threads, args.rounds, llama)
    counts = {test: count for test, (count, _) in work.items()}
    header: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "processor": machine.name(), "processors": os.cpu_count(),
        "threads": args.threads, "rounds": args.rounds, "model": path.name, "load_before": round(args.load, 2),
        "versions": versions(),
    }  # fmt: skip
    packages = ", ".join(f"{package} {number}" for package, number in header["versions"].items())
    print(
        f"{header['date']}, {header['processor']}, {args.threads} threads, medians of {args.rounds} rounds; {path.name}; {packages}\n"
    )
    print(table(figures, counts, whole, skipped))
    print(
        f"\n2.00x: gemma_py is twice as fast; in parentheses, the smallest and largest ratio of a round. NLL over {args.score} tokens.\n"
    )
    print(json.dumps({**header, "skipped": skipped, "runtimes": report(figures, counts, whole)}))
    return 1 if any(figure.failed for figure in figures.values()) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", default="512,2048", help="the lengths of the prompts")
    parser.add_argument("--decode", type=int, default=64, help="the number of tokens to decode")
    parser.add_argument("--after", type=int, default=512, help="the number of tokens before the decoded ones")
    parser.add_argument(
        "--score",
        type=int,
        default=512,
        help="the number of tokens of the text for NLL; CTranslate2 supports at most 512 with this model",
    )
    parser.add_argument(
        "--peers",
        default=",".join(peer.name for peer in PEERS),
        help="names of the runtimes to compare with; empty: measure gemma_py alone",
    )
    parser.add_argument("--ik-llama-bench", type=Path, help="the program llama-bench of ik_llama.cpp")
    parser.add_argument(
        "--neighbour", type=int, nargs="*", default=[], help="the niceness of a busy process beside the tests"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder in which logs and dequantised weights (1.3 GB) are kept and used again",
    )
    args = parser.parse_args(arguments)
    args.load = os.getloadavg()[0]
    if args.load > 0.5:
        say(f"the machine is busy (load {args.load:.1f}): the measured speeds will be too low")
    try:
        path = resolve(args.model)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            return compare(args, path, args.keep)
        with tempfile.TemporaryDirectory() as directory:
            return compare(args, path, Path(directory))
    except (PeerError, GemmaError) as error:
        say(f"compare_peers: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
