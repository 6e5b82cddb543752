"""Tensors over a mesh: the sequence axis, and what DTensor is taught about attention.

axis                which mesh axis holds the pieces of a sequence
attention, limits   attention over DTensors, and what of it is refused
loss                means over tokens of all ranks
recipe              from tensors to the recipe of a plan
shard, layout       pieces of a batch, and how ranks hold them
distribute, ties    parameters over a mesh, with what they share
dropout             seeds by global position
"""
