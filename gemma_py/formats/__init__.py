"""Bytes on disk to arrays, nothing else: GGUF, safetensors, JSON."""
