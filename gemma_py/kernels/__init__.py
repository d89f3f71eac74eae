"""Numba kernels: functions of arrays and scalars, without access to files, configuration or the engine."""
