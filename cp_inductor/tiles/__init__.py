"""One attention call of one rank: its kernel, its mask, and what puts the results together.

kernels, kernel_choice      flash attention behind one shape of call; which kernel serves whom
masked_tiles, flex_tiles    tiles under a mask that skip blocks, on the CPU and on CUDA
math_tiles                  tiles in plain ops, for what no kernel does
tile_masks, block_tables    the mask of a tile; which of its blocks hold pairs
combine, stand_in           partials to one result; what stands in for it in the backward
tokens, dims                lengths of chunks in tokens; the dims of tensors
"""
