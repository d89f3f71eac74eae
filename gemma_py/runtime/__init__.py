"""The runtime: the worker team and its synchronisation, the KV cache, the prefix cache and the forward pass."""
