"""Draw who imports whom, for ARCHITECTURE.md: python docs/images/rooms.py.

    rooms, top to bottom, as pyproject.toml lists them      a row for each, and a column
    from cp_inductor.plan import ... in run/                a square in the row of run

Squares stand right of the diagonal alone, because a room imports what is below it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cp_inductor"
STEP, MARGIN, SQUARE = 20, 110, 16
TEXT = '<text x="{}" y="{}"{}>{}</text>'
BOX = '<rect x="{}" y="{}" width="{size}" height="{size}" rx="2" fill="{}"/>'


def rooms() -> list[str]:
    """Return the rooms of the contract in pyproject.toml, from top to bottom."""
    (layers,) = re.findall(
        r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    return re.findall(r"\w+", layers)


def imports(room: str) -> set[str]:
    """Return the rooms that the files of a room import."""
    named = set()
    for path in [PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py")]:
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cp_inductor"):
                _, *inner = (node.module or "").split(".")
                named |= {inner[0]} if inner else {alias.name for alias in node.names}
    return named - {room}


def picture() -> str:
    """Return the picture as SVG."""
    names = rooms()
    height = MARGIN + STEP * len(names)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{height + 60}" height="{height}"']
    lines += ['  font-family="sans-serif" font-size="12">']
    for row, importer in enumerate(names):
        y, imported = MARGIN + STEP * row, imports(importer)
        turned = f' transform="rotate(-60 {y + 12} {MARGIN - 6})"'
        lines.append(TEXT.format(MARGIN - 6, y + 12, ' text-anchor="end"', importer))
        lines.append(TEXT.format(y + 12, MARGIN - 6, turned, importer))
        for column, name in enumerate(names):
            color = "#3465a4" if name in imported else "#aaaaaa" if row == column else "#eeeeee"
            lines.append(BOX.format(MARGIN + STEP * column, y, color, size=SQUARE))
    return "\n".join([*lines, "</svg>"]) + "\n"


PICTURE = Path(__file__).with_suffix(".svg")

if __name__ == "__main__":
    PICTURE.write_text(picture())
