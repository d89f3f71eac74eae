"""Pipeline shards: a model whose layers are divided among several processes."""
