"""The language of masks: a rule says which (query, key) pairs exist and what biases their scores.

    language       indices, run-time tables, steps, functions, and the one form of relations
    rule           a rule, its text, in words, and what it says of a box of pairs
    grammar        reads the text of a rule
    intervals      decides a condition for all pairs of a box
    evaluate       computes an expression on arrays or tensors of indices
    reader/        reads a rule from the graph that computes a mask

All but `reader/` import no torch.
"""
