"""Ranks compare what they are about to run, and say what failed.

agreement, ledger           before an attention runs: is it the same on all ranks
course                      which way each rank goes, and who waits for whom
failures                    which exchange failed, and whose fault it was
unreduced                   gradients of shards that nobody sums
bounded_store               a store that answers in time, or raises
"""
