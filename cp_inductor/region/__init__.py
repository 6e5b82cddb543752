"""Regions: code that runs on shards, in which attention sees the whole sequence.

context     context_parallel, context_parallel_unshard
style       ContextParallel, for parallelize_module
regions     what both use: a mode in which attention is over the whole sequence
"""
