"""Ranks compare what they are about to run, and say what failed.

claims, ledger              what a rank says about an attention, and who says otherwise
agreement, graph_agreement  the comparison, in eager code and around a compiled graph
course, trail               which way each rank goes, and who waits for whom
failures                    which exchange failed, and whose fault it was
hosts                       which ranks run on one host
unreduced                   gradients of shards that nobody sums
board, bounded_store        where ranks write for each other; a store that answers in time
"""
