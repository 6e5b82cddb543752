"""What a mask that a graph computes is: from nodes to a rule.

    Dynamo graph -> trace    the mask's slice of the graph, in core aten ops
                    read     each of them by its row of the table in `aten`, as a `Value`
                 -> rule     the mask's value: which pairs exist, what is added to their scores

Each step stands in a file of its own; `passes/recognize_mask.py` takes them one after the other.
"""
