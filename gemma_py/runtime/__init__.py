"""What owns threads: the worker team, its waits, and (later) the KV cache and the forward pass."""
