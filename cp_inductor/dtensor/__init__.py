"""Tensors over a mesh: the sequence axis, shards, and what teaches DTensor the rest.

axis                which mesh axis shards a sequence
recipe, limits      from tensors to the recipe of a plan; what is refused
shard, wrap         shards of a batch, and DTensors of them
permuted            refuses what torch's load balancer may have permuted
pad, documents      packed batches
rules               ops that DTensor has no rule for, or a wrong one
"""
