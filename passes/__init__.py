"""The graph passes. They stand at the top level of the repository because they are the product,
and are imported as `cp_inductor.passes`, through a symlink.
"""

if __name__ != "cp_inductor.passes":
    raise ImportError("import cp_inductor.passes; the folder passes/ is not a package of its own")
