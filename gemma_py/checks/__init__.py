"""Verification, traces, audits and benchmarks."""
