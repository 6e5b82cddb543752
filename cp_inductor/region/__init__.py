"""Code that runs on shards and says so.

context     context_parallel, context_parallel_unshard
style       ContextParallel, for parallelize_module
regions     what both stand on: a mode in which attention is over the whole sequence
"""
