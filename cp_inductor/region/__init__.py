"""Regions: code that runs on shards, in which attention sees the whole sequence.

context     context_parallel, context_parallel_unshard; ContextParallel, for parallelize_module
regions     the mode of both: attention is over the whole sequence
modes       what all modes share; those in which each rank computes within its own shard
marks       what they write into graphs while Dynamo traces them
"""
