"""The language of masks: a rule says which (query, key) pairs exist and what biases their scores.

    language       the indices b, h, q, k, run-time tables, and steps
    rule           a rule, its text, in words, and what it says of a box of pairs
    grammar        reads the text of a rule
    canonical      one form for each relation
    intervals      decides a condition for all pairs of a box
    evaluate       computes an expression on arrays or tensors of indices
    reader/        reads a rule from the graph that computes a mask

All but `reader/` import no torch.
"""
