"""The graph passes, imported as `cp_inductor.passes` through a symlink.

pipeline        the list of passes: on which graph each runs, in which order, and why
settings        options and flags of one compile
attentions      which functions are attention, and what is known of one that was found
nodes           calls that are inserted, and which nodes of a lowered graph are heavy
report          logs, counters, artifacts
all others      a pass each

The folder is at the top level of the repository because the passes are the product.
"""

if __name__ != "cp_inductor.passes":
    raise ImportError("import cp_inductor.passes; the folder passes/ is not a package of its own")
