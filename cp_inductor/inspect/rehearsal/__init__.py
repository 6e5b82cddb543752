"""Rehearse: run the programs of all ranks of a GPU job together, on the CPU."""
