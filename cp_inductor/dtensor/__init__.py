"""Tensors over a mesh: the sequence axis, and handlers that teach DTensor attention and losses.

axis                which mesh axis shards a sequence
attention, limits   attention over DTensors, and what is refused
concatenate         with empty tensors, as caches begin
convolve            along a sharded dim
loss                means over the tokens of all ranks
on_whole            ops without a sharding rule, on all tokens
own_parts           of replicated tensors, in graphs that do not know their rank
recipe              from tensors to the recipe of a plan
shard, layout       shards of a batch, and how ranks hold them
distribute, ties    parameters over a mesh, and weights that are tied
tokenwise           modules that run on this rank's tokens
shift_labels        of encoder-decoders
whole               modules that run on all tokens, on every rank
local_weights       plain weights for both
draws               one draw for all ranks that hold the same
conditions          one answer for all ranks that branch on it
dropout             seeds by global position
"""
