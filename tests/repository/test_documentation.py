"""What the documents say of the tests is what the tests are."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

import cp_inductor
from cp_inductor.inspect.world import CannotLoad
from tests.support.combinations import PAGE, SCRIPT, combined
from tests.support.pages import read_part
from tests.support.processes import ROOT, run_python

DOCS = ROOT / "docs"
OTHERS = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING")]
PROMISES = ROOT / "tests" / "PROMISES.md"
PAGES = [*OTHERS, *sorted(DOCS.glob("*.md")), PROMISES]


def test_the_list_of_combinations_is_that_of_the_tests() -> None:
    assert read_part(PAGE, SCRIPT) == combined(), "run python -m tests.support.combinations"


@pytest.mark.parametrize(("page", "least"), [("ARCHITECTURE.md", 20), ("CONTRIBUTING.md", 30)])
def test_files_that_are_named_exist(page: str, least: int) -> None:
    """Newcomers are led by them; modules move."""
    folders = [ROOT, ROOT / "cp_inductor"]
    named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", (ROOT / page).read_text())
    assert len(named) > least
    assert not [name for name in named if not any((folder / name).is_file() for folder in folders)]


def test_the_drawing_is_that_of_the_imports() -> None:
    drawn = runpy.run_path(str(DOCS / "images" / "rooms.py"))
    assert drawn["PICTURE"].read_text() == drawn["picture"](), "run python docs/images/rooms.py"


def test_links_to_files_lead_somewhere() -> None:
    """The site checks links between pages; those to source files it leaves alone."""
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(((?!https?:)[\w./-]+)(?:#[\w-]+)?\)", without_code(page))
    ]
    assert len(links) > 60
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_public_names_in_pages_exist() -> None:
    """But for the changelog, which names what is gone."""
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        for name in re.findall(r"\bcp_inductor\.(\w+)", page.read_text()):
            is_file = any((ROOT / "cp_inductor").glob(f"{name}*"))
            assert is_file or name in cp_inductor.__all__, (page, name)


def test_every_example_is_named_by_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in (ROOT / "examples").glob("*.py"):
        is_run = 'if __name__ == "__main__":' in path.read_text()
        assert not is_run or f"examples/{path.name}" in text, path.name


def test_what_is_promised_has_its_tests() -> None:
    """By path and name, and each row of the page has some."""
    text = PROMISES.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 60
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named or row.endswith("| held by |"), row
        for path, name in named:
            assert name in functions_of(ROOT / "tests" / path), f"{path}::{name}"


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_benchmark_is_one_that_make_runs() -> None:
    """`make bench` runs all files there but those that it leaves out by name."""
    (left_out,) = re.findall(r"filter-out (.*),\$\(wildcard", (ROOT / "Makefile").read_text())
    for path in (ROOT / "benchmarks").glob("*.py"):
        is_run = f"benchmarks/{path.name}" not in left_out.split()
        assert is_run == ('if __name__ == "__main__":' in path.read_text()), path.name


def test_documents_distribute_by_what_keeps_ties() -> None:
    for path in (*PAGES, *(ROOT / "examples").glob("*.py")):
        assert "distribute_module(" not in path.read_text(), path.name


@pytest.mark.slow
def test_the_site_builds_without_a_network(tmp_path: Path) -> None:
    """All pages, all links, and the reference that is made from docstrings."""
    offline = {"NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://localhost:9"}
    run_python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path, **offline)
    page = (tmp_path / "api.html").read_text()
    for name in set(cp_inductor.__all__) - {"config"}:
        ids = (f'id="cp_inductor.{name}"', f'id="cp_inductor.errors.{name}"')
        assert any(identifier in page for identifier in ids), name
    assert "Against the alternatives" in (tmp_path / "index.html").read_text()


def test_pages_are_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in PAGES}
    assert words["README.md"] <= 900
    assert words["ARCHITECTURE.md"] <= 1000
    assert words["CHANGELOG.md"] <= 1200
    assert sum(words.values()) - words["PROMISES.md"] <= 22_000
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 320


def test_an_index_gets_the_readme_without_links_to_files() -> None:
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    shown = setup.call_args.kwargs["long_description"]
    assert not re.findall(r"\]\((?!https?:)", shown)
    kept = re.findall(r"\[([^\]]+)\]\(docs/\S+\.md\)", (ROOT / "README.md").read_text())
    assert len(kept) > 10
    assert all(text in shown for text in kept)


def test_every_error_has_its_paragraph() -> None:
    """And says where it is, at the end of its traceback."""
    headings = re.findall(r"^### (\w+)$", (DOCS / "support.md").read_text(), re.M)
    names = [
        name
        for name in cp_inductor.__all__
        if isinstance(getattr(cp_inductor, name), type)
        and issubclass(getattr(cp_inductor, name), (Exception, Warning))
    ]
    assert sorted(headings) == sorted(names)
    error = cp_inductor.UnevenSequence(site="here", expected="a", got="b", remedy="c")
    assert str(error) == "here: expected a, got b; c"
    if sys.version_info >= (3, 11):
        (note,) = error.__notes__
        assert note == "See docs/support.md#unevensequence"
    assert CannotLoad.page_anchor() == "cperror"


def test_the_version_is_that_of_the_package() -> None:
    assert f"## [{cp_inductor.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{cp_inductor.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_flags_and_options_are_documented() -> None:
    text = (DOCS / "options.md").read_text()
    names = [name for name in cp_inductor.config._config if name.islower()]
    assert len(names) > 10
    for name in names:
        assert f"`{name}`" in text, name
