"""SIMD vectors as numba types. Each operation is an explicit LLVM operation on 16 lanes.

    vectors     loads, stores, arithmetic, comparisons, reductions
    codes       operations on the bytes and 16-bit words of quantised weights and inputs
    dots        exact dot products of integer codes
    neon        exact dot products of integer codes on ARM64
    tiles       operations on tiles of R rows by C vectors
    target      detection of the machine's instructions
    builders    the vector types, and helpers that build LLVM IR

LLVM maps 16 lanes to one AVX-512 register, two AVX2 registers or four NEON registers, so neither the optimiser nor the
register width changes the order of a sum. No operation adds floats across lanes. Sums and maximums across lanes use
integers, which are exact.

Loads and stores take a one-dimensional array and an index. The index is not checked, because numba's check for negative
indices would halve the speed of an inner loop.
"""
