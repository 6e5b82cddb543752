"""A hook of mkdocs: the front page of the site is the README, with links to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the README on the front page; links to files that are no pages become their text."""
    if page.file.src_path != "index.md":
        return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
    readme = (ROOT / "README.md").read_text()
    readme = readme.replace("](docs/", "](")
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)]+)\)", _page_or_text, readme)


def _page_or_text(link: re.Match[str]) -> str:
    is_page = (ROOT / "docs" / link[2].partition("#")[0]).exists()
    return link[0] if is_page else link[1]
