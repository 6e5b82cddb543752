"""The graph passes, imported as `cp_inductor.passes` through a symlink.

The folder is at the top level of the repository because the passes are the product.
"""

if __name__ != "cp_inductor.passes":
    raise ImportError("import cp_inductor.passes; the folder passes/ is not a package of its own")
