"""A rank's part of a plan, run or traced: exchanges, tiles, and what combines them.

ops                 the op pair that a graph holds: attention, attention_backward
execute             stages: fetch, tiles, home
messages            from transfers to one all_to_all_single, and from what arrived to tensors
kernels, tile_masks one attention call, and its mask
combine, stand_in   partials to one result; what stands in for it in the backward
agreement, ledger   ranks compare what they are about to run
"""
