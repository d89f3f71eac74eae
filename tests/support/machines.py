"""The processors for which kernels are compiled and tested, besides this machine's own."""

NUMPY_WITHOUT = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"

# {architecture: {LLVM's name of a CPU: the feature that this machine needs to run its code}}. "generic" is the oldest
# x86-64 or ARMv8.
MACHINES = {
    "x86_64": {"skylake-avx512": "avx512bw", "alderlake": "avxvnni", "haswell": "avx2", "generic": ""},
    "aarch64": {"neoverse-v1": "sve", "neoverse-n1": "lse", "cortex-a72": "", "generic": ""},
}


def machines(architecture: str) -> dict[str, str]:
    return MACHINES.get({"AMD64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture), {})
