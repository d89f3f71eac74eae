"""Detection of the machine's vector instructions.

Only LLVM knows which instructions a CPU name implies. So each check compiles a small function and looks for an
instruction in the assembly. The answers are stored in the directory of the compiled kernels.
"""

import contextlib
import hashlib
import json
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
from numba.core.registry import cpu_target

from gemma_py.kernels.decorator import CACHE
from gemma_py.kernels.simd.builders import LANES
from gemma_py.paths import atomic_write

llvm.initialize_native_asmparser()  # needed by the inline assembly in dots.py


def assembly_of(target, source):
    """Return the assembly that LLVM generates from LLVM IR for a target."""
    triple, cpu, features = target
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    return machine.emit_assembly(llvm.parse_assembly(source))


@cache
def pair_instruction(triple, cpu, features):
    """Return (name, lanes) of LLVM's pmaddwd intrinsic for this target, or None on targets without pmaddwd.

    The intrinsic is that for the widest registers in which LLVM adds integers on this target.
    """
    if not triple.startswith("x86_64"):
        return None
    kind = "<LANES x i16>"
    source = f"define {kind} @f({kind} %a, {kind} %b) {{ %c = add {kind} %a, %b\n ret {kind} %c }}"
    for register, lanes, name in (("zmm", 16, "llvm.x86.avx512.pmaddw.d.512"), ("ymm", 8, "llvm.x86.avx2.pmadd.wd")):
        assembly = assembly_of((triple, cpu, features), source.replace("LANES", str(2 * lanes)))
        if any("vpaddw" in line and register in line for line in assembly.splitlines()):
            return name, lanes
    return None


@cache
def multiplies_and_adds_pairs(triple, cpu, features):
    """Return whether the target has vpdpwssd for the registers of `pair_instruction`: AVX-512 VNNI or AVX-VNNI.

    The instruction multiplies codes and adds the products in one step.
    """
    name, lanes = pair_instruction(triple, cpu, features) or ("", 0)
    if not name:
        return False
    pairs, sums = f"<{2 * lanes} x i16>", f"<{lanes} x i32>"
    source = f"""
        declare {sums} @{name}({pairs}, {pairs})
        define {sums} @f({sums} %total, {pairs} %a, {pairs} %b) {{
            %products = call {sums} @{name}({pairs} %a, {pairs} %b)
            %sum = add {sums} %total, %products
            ret {sums} %sum
        }}"""
    return "vpdpwssd" in assembly_of((triple, cpu, features), source)


def uses_vnni(triple, cpu, features):
    """Return whether the target has AVX-512 VNNI, which also multiplies bytes (vpdpbusd) in registers of 512 bits."""
    _, lanes = pair_instruction(triple, cpu, features) or ("", 0)
    return lanes == LANES and multiplies_and_adds_pairs(triple, cpu, features)


def is_arm64(triple):
    return triple.startswith(("aarch64", "arm64"))


def is_zen(cpu):
    """Return whether this is LLVM's name of one of AMD's processors since 2017."""
    return cpu.startswith("znver")


@cache
def has_neon_dot(name, triple, cpu, features):
    """Return whether the target has this instruction of ARM64, which multiplies bytes and adds the products of each quad.

    name: sdot, which multiplies signed bytes (FEAT_DotProd, which also has udot for unsigned bytes), or usdot, which
    multiplies unsigned with signed bytes (FEAT_I8MM, which also has smmla and usmmla for matrices of two rows)
    """
    if not is_arm64(triple):
        return False
    source = f"""
        declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)
        define <4 x i32> @f(<4 x i32> %total, <16 x i8> %a, <16 x i8> %b) {{
            %x = {"zext" if name == "usdot" else "sext"} <16 x i8> %a to <16 x i32>
            %y = sext <16 x i8> %b to <16 x i32>
            %products = mul <16 x i32> %x, %y
            %sum = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %total, <16 x i32> %products)
            ret <4 x i32> %sum
        }}"""
    return name in assembly_of((triple, cpu, features), source)


@cache
def uses_zmm(triple, cpu, features):
    """Return whether sixteen floats fit in one register (zmm) of this target.

    Targets with zmm have 32 such registers. AVX2 has 16 registers of half the width.
    """
    source = "define <16 x float> @f(<16 x float> %a) { %b = fadd <16 x float> %a, %a\n ret <16 x float> %b }"
    return "zmm" in assembly_of((triple, cpu, features), source)


class Instructions(NamedTuple):
    """The answers of LLVM that decide which kernels a target has."""

    zmm: bool
    vnni: bool
    sdot: bool
    i8mm: bool


def ask_llvm(target):
    return Instructions(
        uses_zmm(*target), uses_vnni(*target), has_neon_dot("sdot", *target), has_neon_dot("usdot", *target)
    )


def key_of(target):
    """Return a part of the names of files that are for this target only. Machines of two kinds may share a home directory."""
    return hashlib.sha256(repr(target).encode()).hexdigest()[:16]


def instructions_of(target, folder):
    """Return LLVM's answers for a target, from the file in `folder` that an earlier process has written, if there is one.

    Compiling the checks would take 5 to 9 ms and 10 MiB of memory at every start. Loading compiled kernels does not need this
    part of LLVM.

    folder: the directory of the compiled kernels, or None if it cannot be written
    """
    if folder is None:
        return ask_llvm(target)
    path = folder / f"instructions-{key_of(target)}.json"
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(path.read_bytes())
        if isinstance(stored, list) and [type(answer) for answer in stored] == [bool] * len(Instructions._fields):
            return Instructions(*stored)
    answers = ask_llvm(target)
    with contextlib.suppress(OSError), atomic_write(path) as file:
        file.write(json.dumps(answers).encode())
    return answers


# The triple, the CPU name and the features for which numba compiles in this process.
TARGET: tuple[str, str, str] = cpu_target.target_context.codegen().magic_tuple()
USES_ZMM, USES_VNNI, USES_SDOT, USES_I8MM = instructions_of(TARGET, CACHE)
IS_ARM64: bool = is_arm64(TARGET[0])
IS_ZEN: bool = is_zen(TARGET[1])
# Whether no instruction multiplies unsigned bytes of inputs with signed weights. Then the weights are made unsigned by adding
# 128, which flips their sign bits.
FLIPS_LOW: bool = USES_SDOT and not USES_I8MM
