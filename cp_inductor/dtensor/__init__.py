"""Tensors over a mesh: where a sequence lies, and what teaches DTensor the rest (`rules`)."""
