"""Ranks compare what they are about to run, and say what failed.

log, record  the one comparison: what a rank tells, who waits for whom, and why ranks give up
claims       what a rank says about an attention, a table and a graph
agreement    what is compared, in eager code and around a compiled graph
exchanges    which exchange failed, and whose fault it was; ranges in a profile
unreduced    gradients of shards that nobody sums
"""
