"""The long tail is dealt out fairly, and a part of it is each commit's turn; what a run says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support import tail
from tests.support.tail import (
    NUM_PARTS,
    ROOT,
    cpu_seconds,
    describe_costs,
    is_selected,
    listed_long,
    parts_of,
    read_tail,
    turn_of,
)


def test_the_parts_are_the_whole() -> None:
    cases = [f"case {n}" for n in range(2 * NUM_PARTS + 3)]
    parts = parts_of(cases)
    runs = [{c for c in cases if is_selected(str(n), parts[c])} for n in range(NUM_PARTS)]
    assert Counter(case for run in runs for case in run) == Counter(cases)
    for first in (0, 37):  # neighbours, which cost alike, are in different parts
        assert all(len(run & {*cases[first : first + NUM_PARTS]}) == 1 for run in runs)
    assert all(is_selected("all", part) for part in parts.values())
    assert not any(is_selected("none", part) for part in parts.values())


def test_what_is_listed_exists() -> None:
    for case in listed_long():
        path, _, name = case.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / path).read_text(), case


@pytest.mark.parametrize("given", ["some", "240", "-1", "", "٣"])
def test_what_is_no_part_of_the_tail(given: str) -> None:
    with pytest.raises(ValueError, match="expected all, none, commit or 0 to 239"):
        read_tail(given)


# In a repository of its own


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *names, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "A commit")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A suite of two cases that are not marked, of which one is listed, and 280 long ones."""
    folder = tmp_path / "project"
    (folder / "tests/support").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
    support = ("__init__.py", "kept_kernels.py", "tail.py")
    for name in ("__init__.py", "conftest.py", *(f"support/{name}" for name in support)):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    (folder / "tests/support/long_cases.txt").write_text("# some\ntests/test_some.py::test[1]\n")
    (folder / "tests/test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test(n): pass\n"
        "@pytest.mark.long\n"
        "@pytest.mark.parametrize('n', range(280))\n"
        "def test_long(n): pass\n"
    )
    git(folder, "init", "--quiet", "--initial-branch", "main")
    return folder


PASSED = r"::(\S+) PASSED|PASSED \S+::(\S+)"


def run_suite(folder: Path, *arguments: str) -> tuple[set[str], str]:
    """Return the cases that passed, in this process or in others, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    return {here or there for here, there in re.findall(PASSED, said)}, said


@pytest.mark.slow
def test_what_runs_and_what_is_said(project: Path) -> None:
    commit(project)
    ran, said = run_suite(project, "--tail=commit", "--numprocesses=2", "--dist=worksteal")
    assert "2 of 281 cases, part 1 of 0 to 239" in said
    assert "all of 3 cases" in said
    # What -k leaves out does not move the rest, in which the listed case is the first.
    again, _ = run_suite(project, "--tail=1", "-k", "test[0] or test_long[0] or test_long[1]")
    assert again == {"test[0]", "test_long[0]"}
    assert ran == {"test[0]", "test_long[0]", "test_long[240]"}
    ran, said = run_suite(project, "--tail=none")
    assert ran == {"test[0]"}
    assert "The long tail: none of 281 cases." in said


def test_a_wrong_option_is_said(project: Path) -> None:
    _, said = run_suite(project, "--tail=most")
    assert "--tail=most: expected all, none, commit or 0 to 239" in said


def test_turns(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go by the number of commits; a merge is one, however many a branch brings."""
    assert turn_of(tmp_path) == turn_of(project) == 0  # no repository, no commit yet
    commit(project)
    git(project, "checkout", "--quiet", "-b", "work")
    for _ in range(4):
        commit(project)
    assert turn_of(project) == 5
    git(project, "checkout", "--quiet", "main")
    git(project, "merge", "--quiet", "--no-ff", "--message", "Merge", "work")
    assert turn_of(project) == 2
    git(tmp_path, "clone", "--quiet", "--depth=1", project.as_uri(), "shallow")
    head = int(git(project, "rev-parse", "HEAD"), 16)
    assert turn_of(tmp_path / "shallow") == head % NUM_PARTS
    monkeypatch.setattr(tail, "NUM_PARTS", 3)
    turns = []
    for _ in range(tail.NUM_PARTS):
        commit(project)
        turns.append(turn_of(project))
    assert turns == [0, 1, 2]  # as many commits in a row as there are parts run all of them


# Costs


def test_costs_in_words() -> None:
    costs = {f"tests/test_a.py::test[{n}]": float(n) for n in range(15)}
    costs["tests/test_b.py::test"] = 3.5
    lines = describe_costs(costs)
    assert lines[0].split() == ["14.0", "s", "tests/test_a.py::test[14]"]
    assert lines[9].endswith("tests/test_a.py::test[5]")
    # 0 + ... + 14 = 105 s, which is more than a file should take; the other file is not named.
    assert lines[10:13] == ["", "Files of more than 90 s:", "  105.0 s  tests/test_a.py"]
    assert lines[13:] == ["", "  108.5 s  all of 16 cases"]


def test_children_are_counted() -> None:
    before = cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert cpu_seconds() - before >= 0.45  # of 0.5, in ticks of 0.01
