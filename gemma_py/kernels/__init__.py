"""Numba kernels: pure functions of arrays and scalars. They know no files, no config and no engine."""
