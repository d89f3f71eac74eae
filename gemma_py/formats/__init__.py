"""Readers and writers of files: GGUF, safetensors and JSON."""
