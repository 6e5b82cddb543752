"""What pyproject.toml cannot say: a package index shows the README without its links to files."""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
without_pictures = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n(\n\*[^*]+\*\n)?", "", README)

setup(
    long_description=re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", without_pictures),
    long_description_content_type="text/markdown",
)
