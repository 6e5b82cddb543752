"""Read FX graphs: subgraphs, such as checkpointed regions, and collectives."""
