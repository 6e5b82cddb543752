"""Every place at which torch does something else because of this package, and what ends it.

Settings of torch that it offers to programs (`implicit_replication`, `_cp_options`, its configs)
are no such places, nor are objects that this package has made, nor Python's import hooks, of which
`cp_inductor.imported` is one.

`patches.md` is the table: our function (below cp_inductor), what it replaces (below torch), when
that is in place, why, the issue or pull request of pytorch/pytorch, and what has to be true for it
to go. `python -m cp_inductor doctor` prints it, docs/support.md leads to it, and a test finds each
function below torch_private/ and in inspect/pretend.py that changes torch without a row.
"""

from __future__ import annotations

from pathlib import Path

TABLE = (Path(__file__).parent / "patches.md").read_text()


def patches() -> list[dict[str, str]]:
    """Return the rows of the table, by the names of its columns."""
    names, _, *rows = (line.strip("| ").split(" | ") for line in TABLE.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]


def as_text() -> str:
    """Return the table for a terminal: some lines for each patch."""
    return "\n".join(f"{name:<10}{text}" for patch in patches() for name, text in patch.items())
