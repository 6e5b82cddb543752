"""One attention call of one rank: its kernel, its mask, and what puts the results together.

kernels, kernel_table       one shape of call, and what a kernel can do; which kernel serves whom
aten_kernels                tiles that are FULL or CAUSAL, or whose mask is a bias; in plain ops
masked_tiles, flex_tiles    tiles under a mask that skip blocks, on the CPU and on CUDA
tile_masks, block_tables    the mask of a tile; which of its blocks hold pairs
combine, stand_in           partials to one result; what stands in for it in the backward
dims                        the dims of tensors, and lengths of chunks in tokens
"""
