"""What each aten op makes of types: a rule per op, matched by its overload.

    mm(Shards(0), Same)             Shards(0)
    mm(Shards(1), Shards(0))        Sum: each rank adds up its own tokens
    softmax(Shards(1), dim=2)       Shards(1)
    softmax(Shards(1), dim=1)       raises Mixes
    mul(Sum, Sum)                   raises Mixes: a product of sums is no sum of products

Whatever is not proven raises `Mixes`: an op without a rule, numbers that stand at tokens and are
the same on every rank (positions from 0), a part of the tokens. Two things need no row in the
table: a result that is computed from equal tensors is equal on every rank, and torch itself tags
ops that compute entry by entry.

    call            a call as rules see it; where rules are registered
    elements, along_dims, products, views, indices      the rules, by family
    infer           the types of the results of a call

Assumes: ops as dispatch sees them below autograd, with composite ops decomposed.
"""

from cp_inductor.sequence.rules import along_dims, elements, indices, products, views

__all__ = ["along_dims", "elements", "indices", "products", "views"]
