"""Estimate how many multiply-adds a cycle the hottest loops compute on ARM64 processors, with llvm-mca.

    python tools/estimate_arm64.py [--cpus neoverse-n1,neoverse-v1] [--mca llvm-mca-19]

For each processor, the tool compiles the kernels on this machine, finds the loops that multiply in their assembly, and
lets llvm-mca (Debian's package llvm-19) simulate the loops. llvm-mca knows the execution units of the processors, but
assumes that every load hits the L1 cache and every branch is predicted. So the figures are estimates of the most that a
processor can reach; nothing is measured on hardware.

decode     one row, codes of 4 bits (as in Q4_0) or of 8 bits (as in Q8_0)
prefill    a tile of many rows, with a scale for every 32 weights
scores     attention's products of queries and keys, in float32
values     attention's sums of weighted values, in float32

Of decode and prefill, a multiply-add multiplies a 16-bit input code with a weight, and adds the product to a sum. The last
line is one JSON object.
"""

import argparse
import heapq
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CPUS = ("neoverse-n1", "neoverse-v1", "neoverse-v2", "apple-m1", "cortex-a72")
# {row of the table: the compiled functions of which a processor's code has one}
LOOPS = {"decode, 4 bits": ["one_row"], "decode, 8 bits": ["one_row_3"], "prefill": ["_quad_tile", "_code_tile"]}
ATTENTION = ("scores", "values")
RUN = 16 * 32  # multiply-adds of one row: 16 outputs of a panel, 32 inputs
JUMP = re.compile(r"b\.\w+|b|cbn?z|tbn?z|ret|br")
Kinds = dict[re.Pattern[str], int]
# {vector instruction: its multiply-adds}. The instructions for 16 bytes count half, because an input has two bytes.
MULTIPLY_ADDS = {
    re.compile(r"(s|us)mmla"): 16,
    re.compile(r"(s|u|us|su)dot"): 8,
    re.compile(r"[su]m(la|ul)l2?|mla|mul"): 4,
}
FLOAT_MULTIPLY_ADDS = {re.compile("fmla"): 4}
ITERATIONS = 100


# --- the assembly -----------------------------------------------------------------------------------------------------


def compile_kernels() -> None:
    """Print the assembly of the products of quantised weights and of attention, and how many rows a tile has."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import arm64_assembly

    from gemma_py.kernels import matmul

    wanted = (arm64_assembly.products, arm64_assembly.scores, arm64_assembly.values)
    text = "\n".join(arm64_assembly.assembly(function, arm64_assembly.KERNELS[function]) for function in wanted)
    rows = {"_quad_tile": matmul.QUAD_ROWS, "_code_tile": matmul.CODE_ROWS}
    print(json.dumps({"assembly": text, "rows": rows}))


def functions(assembly: str) -> dict[str, list[str]]:
    """{name without its module: lines} of the compiled functions."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in assembly.splitlines():
        if symbol := re.match(r"_ZN([\w$.]+):", line):
            rest, name = symbol[1], ""
            while length := re.match(r"\d+", rest):
                name, rest = rest[length.end() :][: int(length[0])], rest[length.end() + int(length[0]) :]
            lines = found.setdefault(name, [])
        lines.append(line.split("//")[0].rstrip())
    return found


@dataclass
class Block:
    """Instructions that are executed one after the other."""

    instructions: list[str]
    successors: list[int]  # the numbers of the blocks of which one is executed next
    multiply_adds: int


def multiply_adds(instruction: str, known: Kinds = MULTIPLY_ADDS) -> int:
    name, _, operands = instruction.partition("\t")
    counts = [count for pattern, count in known.items() if pattern.fullmatch(name)]
    return sum(counts) if operands.startswith("v") else 0


def blocks_of(lines: Iterable[str], known: Kinds = MULTIPLY_ADDS) -> list[Block]:
    """known: the instructions that are counted as multiply-adds"""
    parts: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in lines:
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(parts)
            parts.append([])
        elif re.match(r"\t[a-z]", line):
            parts[-1].append(line.strip())
            if JUMP.fullmatch(line.split()[0]):
                parts.append([])
    blocks = []
    for number, part in enumerate(parts):
        name, target = (part[-1].split()[0], part[-1].split()[-1]) if part else ("", "")
        successors = [labels[target]] if JUMP.fullmatch(name) and target in labels else []
        if name not in ("b", "ret", "br") and number + 1 < len(parts):
            successors.append(number + 1)
        blocks.append(Block(part, successors, sum(multiply_adds(line, known) for line in part)))
    return blocks


# --- the loop ---------------------------------------------------------------------------------------------------------


def shortest(blocks: Sequence[Block], nodes: set[int], first: int, last: int) -> list[int]:
    """Return the blocks after `first` up to `last` on the path with the fewest instructions, inside `nodes`."""
    waiting: list[tuple[int, list[int]]] = [(0, [first])]
    reached = set()
    while waiting:
        length, path = heapq.heappop(waiting)
        if path[-1] == last and len(path) > 1:
            return path[1:]
        if path[-1] not in reached or path == [first]:
            reached.add(path[-1])
            for number in nodes.intersection(blocks[path[-1]].successors):
                heapq.heappush(waiting, (length + len(blocks[number].instructions), [*path, number]))
    return []


def loop_around(blocks: Sequence[Block], nodes: set[int], block: int) -> set[int]:
    """Return the blocks of `nodes` that are both reachable from `block` and lead back to it."""

    def reachable(edges: dict[int, list[int]]) -> set[int]:
        found: set[int] = set()
        waiting = [block]
        while waiting:
            for number in edges[waiting.pop()]:
                if number not in found:
                    found.add(number)
                    waiting.append(number)
        return found

    after = {number: [n for n in blocks[number].successors if n in nodes] for number in nodes}
    before = {number: [n for n in nodes if number in after[n]] for number in nodes}
    return reachable(after) & reachable(before)


def header_of(blocks: Sequence[Block], loop: set[int]) -> int:
    """Return the block at which a loop is entered."""
    reached = {0}.union(*(block.successors for block in blocks))
    outside = [block for number, block in enumerate(blocks) if number not in loop and number in reached]
    return min(number for block in outside for number in block.successors if number in loop)


def executed(blocks: Sequence[Block], rows: int) -> list[str]:
    """Return the instructions that multiply 32 inputs of each row, in the order of execution.

    Formats with sub-scales or minimums take longer paths; this is the shortest path through the outermost loop and
    everything that multiplies. An inner loop that multiplies 16 inputs is executed twice.
    """
    hot = [number for number, block in enumerate(blocks) if block.multiply_adds]
    loop = loop_around(blocks, set(range(len(blocks))), max(hot, key=lambda number: blocks[number].multiply_adds))
    header = header_of(blocks, loop)
    path, here = [header], header
    for number in [n for n in hot if n in loop]:
        if number != here:
            path += shortest(blocks, loop, here, number)
        here = number
        inner = loop_around(blocks, loop - {header}, number)
        if inner and header_of(blocks, inner) != header:
            again = shortest(blocks, inner, number, number)
            if sum(blocks[block].multiply_adds for block in again) < rows * RUN:
                path += again
    path += shortest(blocks, loop, here, header)[:-1]
    found = sum(blocks[number].multiply_adds for number in path)
    if found != rows * RUN:
        raise SystemExit(f"{rows * RUN} multiply-adds were expected, but {found} were found")
    return [instruction for number in path for instruction in blocks[number].instructions]


def innermost(blocks: Sequence[Block]) -> tuple[list[str], int]:
    """Return the instructions of one round of the loop with the most multiply-adds, and how many multiply-adds it has."""
    hot = max(range(len(blocks)), key=lambda number: blocks[number].multiply_adds)
    path = shortest(blocks, loop_around(blocks, set(range(len(blocks))), hot), hot, hot)
    instructions = [instruction for number in path for instruction in blocks[number].instructions]
    return instructions, sum(blocks[number].multiply_adds for number in path)


# --- the estimate -----------------------------------------------------------------------------------------------------


def cycles(mca: str, cpu: str, instructions: Sequence[str]) -> float:
    command = [mca, "-mtriple=aarch64", f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(instructions), capture_output=True, text=True, check=True)
    (total,) = re.findall(r"Total Cycles:\s+(\d+)", done.stdout)
    return int(total) / ITERATIONS


def estimate(mca: str, cpu: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--step"]
    with tempfile.TemporaryDirectory() as cache:  # numba shows no assembly of kernels that it loads from its cache
        environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "", "XDG_CACHE_HOME": cache}
        made = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    compiled = functions(made["assembly"])
    figures = {}
    for title, names in LOOPS.items():
        (name,) = (name for name in names if name in compiled)
        rows = made["rows"].get(name, 1)
        figures[title] = rows * RUN / cycles(mca, cpu, executed(blocks_of(compiled[name]), rows))
    for title in ATTENTION:
        instructions, count = innermost(blocks_of(compiled[title], FLOAT_MULTIPLY_ADDS))
        figures[title] = count / cycles(mca, cpu, instructions)
    return figures


def main() -> None:
    if sys.argv[1:] == ["--step"]:
        compile_kernels()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", type=lambda text: text.split(","), default=CPUS, help="names as LLVM knows them")
    parser.add_argument("--mca", default="llvm-mca-19", help="the llvm-mca to run")
    args = parser.parse_args()
    if not shutil.which(args.mca):
        parser.error(f"{args.mca} is not installed; on Debian: apt-get install llvm-19")
    table = {}
    print("multiply-adds a cycle".ljust(24) + "".join(title.rjust(16) for title in (*LOOPS, *ATTENTION)))
    for cpu in args.cpus:
        table[cpu] = estimate(args.mca, cpu)
        print(cpu.ljust(24) + "".join(f"{figure:16.1f}" for figure in table[cpu].values()), flush=True)
    print(json.dumps({cpu: {title: round(figure, 2) for title, figure in row.items()} for cpu, row in table.items()}))


if __name__ == "__main__":
    main()
