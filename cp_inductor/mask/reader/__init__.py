"""Read the rule of a mask from the graph that computes it.

    Dynamo graph -> trace      the part of the graph that computes the mask, in core aten ops
                 -> read       each node of it as a `Value`, by the row of its op in `aten.OPS`, and
                               the mask's value as a rule: which pairs exist, and their bias

`writes` finds tensors that are written in place, `values` and `sequences` say what a tensor is as a
function of its indices. `lengths` asks at which other lengths the rule is the same.
"""
