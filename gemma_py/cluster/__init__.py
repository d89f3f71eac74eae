"""Pipeline shards: a model whose layers are divided among several processes."""

BEAT = None  # a message that only shows that a process is alive
