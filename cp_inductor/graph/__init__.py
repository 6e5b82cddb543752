"""Reading FX graphs: subgraphs such as checkpointed bodies, and collectives."""
