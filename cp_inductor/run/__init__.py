"""A rank's part of an attention, run or traced: exchanges, tiles, and what goes home.

attention                   the description of one attention; where its plan is from
stages                      the loop over stages, of both
view_executor               plans known when a graph is compiled: tiles read views
  tile_calls                  one tile, from what it reads to its result
  merge, patches              results of tiles and ranks, put together
  store, records              what is at hand; what messages are made of
  send, receive               from transfers to one all_to_all_single, and back to views
  own_transfers               what a rank sends itself
gather_executor             plans that the batch decides: tiles gather rows, read from numbers
  batch_parts, row_pool       a plan's numbers, part by part; the rows that a rank has
"""
