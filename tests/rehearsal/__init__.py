"""Rehearse: run the programs of all ranks of a GPU job together, on the CPU.

    python -m tests.rehearsal model.py:build --world-size 4

It is how we know, without a GPU, that the programs that are generated for one compute what one
process computes, and touch nothing that they must not touch. `rehearse` says how, and `report` what
cannot be seen this way.
"""
