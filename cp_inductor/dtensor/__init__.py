"""Tensors over a mesh: the sequence axis, shards, and what teaches DTensor the rest.

axis                which mesh axis shards a sequence
recipe              from tensors to the recipe of a plan, and the machine that it is made for
limits              what is refused
shard, wrap         shards of a batch, and DTensors of them
packed              packed batches
rules               ops that DTensor has no rule for, or a wrong one
"""
