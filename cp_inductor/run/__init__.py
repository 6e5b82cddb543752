"""A rank's part of an attention, run or traced: exchanges, tiles, and what goes home.

attention                   the description of one attention; where its plan is from
executor                    the loop over stages, and their tiles
views                       parts of plans known when a graph is compiled: constant slices
  merge                       results of tiles and ranks, put together
  store, records              what is at hand; what messages are made of, also to oneself
  messages                    from transfers to one all_to_all_single, and back to views
tables                      parts of plans that the batch decides: rows, read from numbers
"""
