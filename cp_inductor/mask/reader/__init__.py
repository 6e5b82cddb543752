"""From the aten ops that make a mask to a rule.

trace, writes       the mask's part of a graph, as aten ops
values, sequences   what a value is: cases, dtype, range
aten                the table of ops, by OpOverload
read, to_rule       from a value to a rule
"""
