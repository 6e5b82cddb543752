"""Whole modules over a mesh: replicated, or run on shards or on the whole sequence.

distribute, same_model      weights over a mesh, after ranks have compared their models
ties                        weights that are tied
tokenwise, whole            modules that run on this rank's tokens, and on those of all ranks
local_weights               plain weights for both
full_state                  whole weights and state of optimizers, for one file
libraries                   what libraries of models tell about their modules
"""
