"""Ranks compare what they are about to run, and say what failed.

log, record                 the one comparison: what a rank tells, and who waits for whom
cause, comparing            why ranks give up; the threads that compare beside the program
notes                       what ranks tell each other beside it: samples of gradients, hosts
claims                      what a rank says about an attention
agreement, graph_agreement  what is compared, in eager code and around a compiled graph
graph_fields                what a graph says of itself
failures, processes         which exchange failed, whose fault it was, and which process that is
unreduced                   gradients of shards that nobody sums
bounded_store               a store that answers in time
profiler_ranges             exchanges and tiles in a profile
"""
