"""Optimizers of sharded parameters: elementwise ones on shards, matrix ones on owners."""
