"""Whole modules over a mesh: models that take whole batches, and modules that run in another way.

parallelize, whole_batches  models that take whole batches, of which each rank takes its part
model                       what ranks check and compare before; which modules run in another way
reading, weights            plain weights, or shards, that are read as DTensors; ties of weights
mixers                      modules that mix tokens: on those of all ranks, or on a rank's own
tokenwise                   modules that treat every token alone
along_sequence, recurrences states that are passed along the sequence
"""
