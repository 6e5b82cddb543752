"""What the documents say of the tests is what the tests are."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

import cp_inductor
from cp_inductor.inspect.load import CannotLoad
from tests.support.combinations import table
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

GUIDES = {
    "fsdp_cp": "fsdp.md",
    "tp_cp": "tensor-parallel.md",
    "from_context_parallel": "from-context-parallel.md",
    "hf_trainer": "hugging-face.md",
}


def test_the_table_of_combinations_is_that_of_the_tests() -> None:
    assert (DOCS / "combinations.md").read_text() == table(), (
        "run python -m tests.support.combinations"
    )


def test_contributing_names_files_that_exist() -> None:
    """Newcomers are led by its table of changes; modules move."""
    folders = [ROOT, ROOT / "cp_inductor"]
    named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 40
    assert not [name for name in named if not any((folder / name).is_file() for folder in folders)]


def test_links_to_files_lead_somewhere() -> None:
    """The site checks links between pages; those to source files it leaves alone."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(((?!https?:)[\w./-]+)(?:#[\w-]+)?\)", without_code(page))
    ]
    assert len(links) > 100
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_guides_name_their_scripts() -> None:
    for script, guide in GUIDES.items():
        assert f"examples/{script}.py" in (DOCS / guide).read_text()


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("page", "least"), [("correctness.md", 50), ("reliability.md", 12)])
def test_what_is_promised_has_its_tests(page: str, least: int) -> None:
    """By path and name, and each row of the page has some."""
    text = (DOCS / page).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > least
    functions = {path: functions_of(ROOT / path) for path, _ in named}
    for path, name in named:
        assert name in functions[path], f"{path}::{name}"
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    for row in rows:
        is_head = row.endswith("| held by |")
        assert is_head or "::test_" in row or "combinations.md" in row, row


def test_every_benchmark_is_one_that_make_runs() -> None:
    """`make bench` runs all files there but those that it leaves out by name."""
    (left_out,) = re.findall(r"filter-out (.*),\$\(wildcard", (ROOT / "Makefile").read_text())
    for path in (ROOT / "benchmarks").glob("*.py"):
        is_run = f"benchmarks/{path.name}" not in left_out.split()
        assert is_run == ('if __name__ == "__main__":' in path.read_text()), path.name


def test_documents_distribute_by_what_keeps_ties() -> None:
    for path in (ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.py")):
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert max(map(len, (ROOT / "README.md").read_text().splitlines())) <= 320


def test_an_index_gets_the_readme_without_links_to_files() -> None:
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    shown = setup.call_args.kwargs["long_description"]
    assert not re.findall(r"\]\((?!https?:)", shown)
    kept = re.findall(r"\[([^\]]+)\]\(docs/\S+\.md\)", (ROOT / "README.md").read_text())
    assert len(kept) > 20
    assert all(text in shown for text in kept)


def test_every_error_has_its_paragraph() -> None:
    """And says where it is, at the end of its traceback."""
    headings = re.findall(r"^## (\w+)$", (DOCS / "errors.md").read_text(), re.M)
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
        assert note == "See docs/errors.md#unevensequence"
    assert CannotLoad.page_anchor() == "cperror"


def test_the_version_is_that_of_the_package() -> None:
    assert cp_inductor.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{cp_inductor.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_flags_and_options_are_documented() -> None:
    text = (DOCS / "options.md").read_text()
    names = [name for name in cp_inductor.config._config if name.islower()]
    assert len(names) > 10
    for name in names:
        assert f"`{name}`" in text, name
