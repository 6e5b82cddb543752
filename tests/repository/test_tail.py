"""The long tail is dealt out fairly, and eighty commits run all of it; what a run says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tail import (
    NUM_PARTS,
    ROOT,
    cpu_seconds,
    describe_costs,
    is_selected,
    listed_long,
    parts_of,
    read_tail,
    slowest,
    turn_of,
)

FILES = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def cases_of(sizes: list[int]) -> list[str]:
    return [f"tests/test_{n}.py::test[{k}]" for n, size in enumerate(sizes) for k in range(size)]


@given(FILES)
def test_the_parts_are_the_whole(sizes: list[int]) -> None:
    cases = cases_of(sizes)
    parts = parts_of(cases)
    runs = [{c for c in cases if is_selected(str(n), parts[c])} for n in range(NUM_PARTS)]
    assert Counter(case for run in runs for case in run) == Counter(cases)
    assert {case for case in cases if is_selected("all", parts[case])} == set(cases)
    assert not any(is_selected("none", parts[case]) for case in cases)
    # No part has more than one case more than another: not of all, and not of a file.
    for prefix in ("tests/", *(f"tests/test_{n}.py" for n in range(len(sizes)))):
        counts = [sum(case.startswith(prefix) for case in run) for run in runs]
        assert max(counts) - min(counts) <= 1


def test_what_is_listed_exists() -> None:
    for case in listed_long():
        path, _, name = case.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / path).read_text(), case


def test_a_listed_case_is_of_the_tail(project: Path) -> None:
    (project / "tests/support/long_cases.txt").write_text(
        "# some\ntests/test_some.py::test_short[1]\n"
    )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--tail", "none"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert "test_short[0]" in done.stdout and "test_short[1]" not in done.stdout, done.stdout


@pytest.mark.parametrize("given", ["some", "80", "-1", "", "٣"])
def test_what_is_no_part_of_the_tail(given: str) -> None:
    with pytest.raises(ValueError, match="expected all, none, commit or 0 to 79"):
        read_tail(given)


# In a repository of its own


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A suite of two cases that always run and a hundred and twenty long ones."""
    folder = tmp_path / "project"
    (folder / "tests/support").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
    support = ("__init__.py", "kept_kernels.py", "long_cases.txt", "tail.py")
    for name in ("__init__.py", "conftest.py", *(f"support/{name}" for name in support)):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    (folder / "tests/test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_short(n): pass\n"
        "@pytest.mark.long\n"
        "@pytest.mark.parametrize('n', range(120))\n"
        "def test_long(n): pass\n"
    )
    git(folder, "init", "--quiet")
    return folder


def run_suite(folder: Path, *arguments: str) -> tuple[set[int], str]:
    """Return which of the long cases ran, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(re.findall(r"test_short\[(\d+)\]", done.stdout))) == 2
    return {int(n) for n in re.findall(r"test_long\[(\d+)\] PASSED", done.stdout)}, done.stdout


@pytest.mark.slow
def test_eighty_commits_run_all(project: Path) -> None:
    turns = []
    for _ in range(NUM_PARTS):
        git(project, "commit", "--quiet", "--allow-empty", "--message", "A commit")
        turns.append(turn_of(project))
    assert sorted(turns) == list(range(NUM_PARTS))
    ran, said = run_suite(project, "--tail=commit")
    assert 1 <= len(ran) <= 2
    assert f"{len(ran)} of 120 cases, part {turns[-1]} of 0 to 79" in said
    again, _ = run_suite(project, f"--tail={turns[-1]}")
    assert again == ran
    # What -k leaves out does not move the rest.
    (one, *_) = ran
    some, _ = run_suite(project, "--tail=commit", "-k", f"test_short or test_long[{one}]")
    assert some == {one}


@pytest.mark.slow
def test_all_and_none(project: Path) -> None:
    ran, said = run_suite(project)
    assert ran == set(range(120))
    assert "The long tail: all of 120 cases." in said
    ran, said = run_suite(project, "--tail=none")
    assert not ran
    assert "The long tail: none of 120 cases." in said


@pytest.mark.slow
def test_in_two_processes(project: Path) -> None:
    git(project, "commit", "--quiet", "--allow-empty", "--message", "A commit")
    parallel = ("--numprocesses=2", "--dist=worksteal")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *parallel]
    done = subprocess.run([*command, "--tail=commit"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ran, _ = run_suite(project, "--tail=commit")
    assert f"{2 + len(ran)} passed" in done.stdout
    assert f"{len(ran)} of 120 cases, part 1 of 0 to 79" in done.stdout
    assert f"all of {2 + len(ran)} cases" in done.stdout


def test_a_wrong_option_is_said(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--tail=most"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    assert "--tail=most: expected all, none, commit or 0 to 79" in done.stderr


def test_turns_without_history(project: Path, tmp_path: Path) -> None:
    assert turn_of(tmp_path) == 0
    assert turn_of(project) == 0  # no commit yet
    for _ in range(3):
        git(project, "commit", "--quiet", "--allow-empty", "--message", "A commit")
    assert turn_of(project) == 3
    url = project.as_uri()
    git(tmp_path, "clone", "--quiet", "--depth=1", url, "shallow")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True, text=True
    )
    assert turn_of(tmp_path / "shallow") == int(head.stdout, 16) % NUM_PARTS


def test_merges_count_once(project: Path) -> None:
    """What a branch brings is one step of main, however many commits it has."""
    git(project, "commit", "--quiet", "--allow-empty", "--message", "A commit")
    git(project, "branch", "--move", "main")
    git(project, "checkout", "--quiet", "-b", "work")
    for _ in range(4):
        git(project, "commit", "--quiet", "--allow-empty", "--message", "Work")
    git(project, "checkout", "--quiet", "main")
    git(project, "merge", "--quiet", "--no-ff", "--message", "Merge", "work")
    assert turn_of(project) == 2


# Costs


def test_costs_in_words() -> None:
    costs = {f"tests/test_a.py::test[{n}]": float(n) for n in range(15)}
    costs["tests/test_b.py::test"] = 3.5
    assert [seconds for _, seconds in slowest(costs, 3)] == [14.0, 13.0, 12.0]
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
