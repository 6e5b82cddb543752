"""Whole modules over a mesh: models that take whole batches, and modules that run in another way.

parallelize, whole_batches  models that take whole batches, of which each rank takes its part
reading, sharded_weights    plain weights, or shards, that are read as DTensors
same_model, ties            ranks compare their models; weights that are tied
tokenwise, whole            modules that run on this rank's tokens, and on those of all ranks
libraries                   what libraries of models tell about their modules
"""
