"""A rank's part of a plan, run or traced: exchanges, tiles, and what goes home.

execute                     plans that are known when a graph is compiled: stages of views
messages                    from their transfers to one all_to_all_single, and back to tensors
batch, batch_parts          plans that the batch decides: stages of gathers, read from numbers
"""
