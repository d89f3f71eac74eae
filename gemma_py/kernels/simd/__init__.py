"""SIMD values as numba types: every operation is one explicit LLVM instruction on 16 lanes.

    vectors     loads, stores, arithmetic, comparisons
    codes       the bytes and 16-bit words of quantised weights and inputs
    dots        exact dot products of codes
    tiles       the same operations on R rows by C vectors of totals
    target      which instructions the machine has
    builders    the vector types, and the pieces of LLVM IR that the others are made of

LLVM splits 16 lanes into one AVX-512 register, two of AVX2 or four of NEON: neither the optimiser nor the machine's
width decides the order of a sum. Nothing here adds floats across lanes; whatever adds or compares across lanes works on
integers, exactly. Loads and stores take an array of one dimension and an index that is not checked: numba's own check
for negative indices halves the speed of an inner loop.
"""
