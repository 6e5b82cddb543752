"""What runs along the dims of the tensors of a graph, and where the sequence is among it."""
