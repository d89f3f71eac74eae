"""Compare results of machine code for other processors, ARM64 in an emulator, with the results of this x86-64 machine.

    python tools/arm64.py [--cpus neoverse-v1,generic] [--table] [--no-demo] [--work DIRECTORY]

Runs `verify` on tiny models of every family, with weights in F32, Q8_0 and Q4_K, and traces the demo model. numba on this
machine compiles the kernels for ARM64 into a cache on disk. An ARM64 Python in the emulator qemu loads the kernels from
this cache. The first run downloads 160 MB with apt and pip: the emulator, Debian's ARM64 Python, and the packages
numpy, numba, llvmlite, safetensors and tokenizers. The tool needs neither root nor a configured emulator.

--table runs more x86-64 and ARM64 processors, every quantised type, and KV rows in bfloat16 and q8_0. In --cpus, x86-64
processors have the prefix x86-64: and are not emulated. The last line is one JSON object; the exit code is 1 if a
result differs.
"""

import argparse
import hashlib
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRIPLE = "aarch64-unknown-linux-gnu"
PACKAGES = ("numpy", "numba", "llvmlite", "safetensors", "tokenizers")
X86 = "x86-64:"
CPUS = ("neoverse-v1", "generic")
TABLE = (f"{X86}haswell", f"{X86}znver3", f"{X86}generic", "neoverse-n1", "neoverse-v1", "cortex-a72", "generic")
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
THREADS, CHUNKS, TOKENS, TRACED = (1, 3), (5, 64), 40, 24


# --- what is downloaded -----------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True)


def prepare(work: Path) -> Path:
    """Download the emulator and an ARM64 Python, unless they exist. Returns the path of this Python."""
    python = work / "arm64" / "bin" / "python"
    if python.exists():
        return python
    unfinished = work / "download"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    run("apt-get", "-qq", "download", "qemu-user-static", cwd=unfinished)
    (package,) = unfinished.glob("qemu-user-static_*.deb")
    run("dpkg-deb", "-x", package, unfinished / "emulator")
    emulator = work / "qemu-aarch64"
    (unfinished / "emulator" / "usr" / "bin" / "qemu-aarch64-static").replace(emulator)
    system = work / "system"
    download_system(unfinished / "apt", system)
    site = python.parent.parent / "lib" / PYTHON / "site-packages"
    download_packages(unfinished / "wheels", site)
    (site.parent.parent.parent / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    python.parent.mkdir()
    # `-0` sets sys.executable to this script, so that Python processes that gemma_py starts are emulated too.
    script = f'#!/bin/sh\nexec "{emulator}" -0 "{python}" -L "{system}" "{system}/usr/bin/{PYTHON}" "$@"\n'
    shutil.rmtree(unfinished)
    python.write_text(script)
    python.chmod(0o755)
    return python


def download_system(apt: Path, system: Path) -> None:
    """Unpack Debian's ARM64 Python without installing it, from the mirror that apt uses on this machine."""
    for folder in ("lists/partial", "archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    files = sorted(Path("/etc/apt").glob("sources.list.d/*.sources")) + sorted(Path("/etc/apt").glob("sources.list*"))
    debian = [file for file in files if file.is_file() and "debian-archive-keyring" in file.read_text()]
    settings = {
        "Dir::State::lists": apt / "lists", "Dir::State::status": apt / "status", "Dir::Cache": apt,
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "", "Debug::NoLocking": "1",
        "APT::Install-Recommends": "0",
    }  # fmt: skip
    if debian:
        settings |= {"Dir::Etc::sourcelist": debian[0], "Dir::Etc::sourceparts": "/dev/null"}
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    wanted = (PYTHON, f"lib{PYTHON}-stdlib", "libstdc++6", "libgomp1")
    run("apt-get", "-qq", *options, "update")
    run("apt-get", "-qq", *options, "install", "-y", "--download-only", *wanted)
    for package in (apt / "archives").glob("*.deb"):
        run("dpkg-deb", "-x", package, system)


def download_packages(wheels: Path, site: Path) -> None:
    """Unpack ARM64 wheels of PACKAGES, in the versions that are installed here."""
    tag = PYTHON.removeprefix("python").replace(".", "")
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
    run(
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels,
        "--implementation", "cp", "--python-version", tag, "--abi", f"cp{tag}", "--abi", "abi3", "--abi", "none",
        *(part for name in platforms for part in ("--platform", name)),
        *(f"{name}=={version(name)}" for name in PACKAGES),
    )  # fmt: skip
    for wheel in wheels.iterdir():
        run(sys.executable, "-m", "zipfile", "-e", wheel, site)


# --- the computation, on this machine or in the emulator --------------------------------------------------------------


def compute(models: Path, out: Path, kvs: Sequence[str], demo: str) -> None:
    """Write the digests of `verify` for each model and KV type, and of the demo model's trace, as JSON.

    The file `out` with the suffix .kernels gets the names and argument types of the kernels that were called.
    """
    import gemma_py
    from gemma_py.checks import verify
    from gemma_py.checks.trace_file import trace_document

    digests = {}
    for path in sorted(models.iterdir()):
        for kv in kvs:

            def opened(threads: int, shards: int, path: Path = path, kv: str = kv) -> gemma_py.Engine:
                return gemma_py.load(path, threads=threads, kv=kv, shards=shards)

            report = verify.verify(opened, THREADS, CHUNKS, TOKENS, reference_tokens=0)
            report.raise_on_mismatch()
            digests[f"{path.stem}, KV {kv}"] = report.results[0].digest
            print(f"{path.stem}, KV {kv}", file=sys.stderr, flush=True)
    if demo:
        with gemma_py.load(demo, threads=2) as engine:
            document = trace_document(engine, verify.prompt(TRACED, engine.config.vocab_size))
        del document["machine"]
        digests["trace of the demo model"] = hashlib.sha256(json.dumps(document).encode()).hexdigest()
    out.write_text(json.dumps(digests))
    out.with_suffix(".kernels").write_bytes(pickle.dumps(called_kernels()))


def called_kernels() -> list[tuple[str, str, tuple[object, ...]]]:
    """(module, name, argument types) of each kernel that was compiled or loaded from the disk."""
    from gemma_py.kernels.decorator import _Dispatcher, _SelfRepairingCache

    modules = [module for name, module in sys.modules.items() if name.startswith("gemma_py.")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, _Dispatcher)}
    cached = [kernel for kernel in kernels if isinstance(kernel._cache, _SelfRepairingCache)]
    return [(kernel.__module__, kernel.__name__, tuple(types)) for kernel in cached for types in kernel.signatures]


def cross_compile(kernels: Path, kvs: Sequence[str]) -> None:
    """Compile kernels for ARM64 into numba's cache on disk, because compiling in the emulator would take half an hour."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = llvm.get_default_triple = lambda: TRIPLE
    from gemma_py.runtime import compiling

    for kv in kvs:
        for kernel in (*(kernel for share in compiling.SHARES for kernel in share), compiling.forward):
            kernel.compile(compiling.signature(kernel, kv))
        compiling.mark_compiled(kv)
    for module, name, types in pickle.loads(kernels.read_bytes()):
        getattr(importlib.import_module(module), name).compile(types)


# --- the comparison ---------------------------------------------------------------------------------------------------


def write_models(folder: Path, every_type: bool) -> None:
    """Write a tiny model of each family in F32, a Q8_0 file if the rows are whole blocks, and Gemma 3 in many types."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]
    import tiny_checkpoints as tiny
    import tiny_families
    import tiny_models
    from equivalence import PARTS, WIDE
    from gguf_files import write_model
    from golden_bits import EMBEDDING, QUANTISED
    from machine_digests import FLOATS

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (*FLOATS, *EMBEDDING):
        tiny.write((tiny.VARIANTS | tiny_families.VARIANTS)[name], folder / name, seed=1)
    for name, variant in tiny_models.WIDE.items():
        for quant in ("Q8_0", "Q4_0") if every_type else ("Q8_0",):
            write_model(folder / f"{name} in {quant}.gguf", variant, seed=3, quant=quant)
    for kind in QUANTISED if every_type else ("Q8_0", "Q4_K"):
        write_model(folder / f"gemma3 in {kind}.gguf", WIDE, seed=4, kinds=dict.fromkeys(PARTS, kind))


def results(cpu: str, work: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Digests from the machine code for a processor. cpu: "" for the code that gemma_py normally uses on this machine."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(work / "cache")}
    if cpu:  # an empty list of features, because numba otherwise adds this machine's features
        environment |= {"NUMBA_CPU_NAME": cpu.removeprefix(X86), "NUMBA_CPU_FEATURES": ""}
    out, python, here = work / f"results-{cpu or 'host'}.json", Path(sys.executable), str(Path(__file__))
    if cpu and not cpu.startswith(X86):
        # A separate cache, so that the emulated Python packs the weights itself.
        environment["XDG_CACHE_HOME"] = str(work / "cache-arm64")
        run(python, here, "--step", "compile", work / "results-host.kernels", *arguments[1:], environment=environment)
        python = prepare(work)
    run(python, "-W", "ignore", here, "--step", "compute", arguments[0], out, *arguments[1:], environment=environment)
    digests: dict[str, str] = json.loads(out.read_text())
    return digests


def main() -> int:
    if sys.argv[1:2] == ["--step"]:
        step, *paths, kvs, demo = sys.argv[2:]
        if step == "compute":
            compute(Path(paths[0]), Path(paths[1]), kvs.split(","), demo)
        else:
            cross_compile(Path(paths[0]), kvs.split(","))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", type=lambda text: text.split(","), help="names of processors, as LLVM knows them")
    parser.add_argument(
        "--table", action="store_true", help="more processors, quantised types and KV types (10 to 60 min)"
    )
    parser.add_argument("--no-demo", action="store_true", help="do not trace the demo model, a download of 240 MiB")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "gemma_py-arm64")
    args = parser.parse_args()
    start, work = time.monotonic(), args.work.resolve()
    write_models(work / "models", args.table)
    from gemma_py.catalog import DEFAULT_MODEL, resolve

    demo = "" if args.no_demo else str(resolve(DEFAULT_MODEL))
    arguments = (str(work / "models"), "float32,bfloat16,q8_0" if args.table else "float32", demo)
    cpus = args.cpus or (TABLE if args.table else CPUS)
    # The download waits for the network while the first computation uses the processor.
    with ThreadPoolExecutor(2) as pool:
        downloading = pool.submit(prepare, work)
        expected = results("", work, arguments)
        downloading.result()
        found = dict(zip(cpus, pool.map(lambda cpu: results(cpu, work, arguments), cpus), strict=True))
    different = {
        cpu: sorted(name for name in expected if made.get(name) != expected[name]) for cpu, made in found.items()
    }
    for cpu in cpus:
        how = "" if cpu.startswith(X86) else ", emulated"
        print(f"{cpu}{how}: {len(expected) - len(different[cpu])} of {len(expected)} results equal this machine's")
        print("".join(f"  differs: {name}\n" for name in different[cpu]), end="")
    seconds = round(time.monotonic() - start)
    print(json.dumps({"results": len(expected), "different": different, "seconds": seconds}))
    return 1 if any(different.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
