"""Benchmarks that no other test file runs: that they run, and what they count."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from benchmarks.peers import bytes_of
from tests.support.install_matrix import PAGE, ROOT, SCRIPT, TESTS, format_table, row_of
from tests.support.pages import read_part
from tests.support.processes import run_python


@pytest.mark.parametrize(
    ("name", "shape", "splits", "expected"),
    [
        ("c10d::alltoall_base_", [12, 5], "[1, 8, 3]", 4 * 5 * (1 + 3)),
        ("c10d::alltoall_base_", [12, 5], "[]", 4 * 5 * 8),
        ("c10d::alltoall_base_", [0, 5], "[0, 0, 0]", 0),
        ("gloo:all_gather", [4, 5], "", 4 * 5 * 4 * 2),
        ("_c10d_functional::reduce_scatter_tensor", [12, 5], "", 4 * 5 * 8),
        ("c10d::_reduce_scatter_base_", [4, 5], "", 4 * 5 * 8),
        ("c10d::allreduce_", [12, 5], "", 0),
    ],
)
def test_peers_counts_what_others_send(
    name: str, shape: list[int], splits: str, expected: int
) -> None:
    """Rank 1 of 3, float32: its own part is not received."""
    given = {
        "Input Dims": [shape, shape],
        "Input type": ["float", "float"],
        "Concrete Inputs": ["", "", "", splits],
    }
    assert bytes_of({"name": name, "args": given}, 1, 3) == expected


@pytest.mark.long
def test_peers() -> None:
    systems = ["--systems", "heads", "gathered, eager", "--skip-warm"]
    sizes = shlex.split("--layers 1 --dim 32 --heads 4 --seq-len 64 --repetitions 1 --steps 1")
    printed = run_python("benchmarks/peers.py", "--ranks", "2", *systems, *sizes)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    rows = result["rows"]["2"]
    assert set(rows) == {"heads", "gathered, eager"}
    for row in rows.values():
        assert row["loss_error"] < 1e-6
        assert 0 < row["q_proj_error"] < 1e-4
        assert row["step_s"] > 0 and row["peak_bytes"] > 0
    # K and V of the other rank, and a sum of their gradients.
    assert rows["gathered, eager"]["u"] == 2
    # Half of Q, K, V and the output, and of their gradients, each half a unit.
    assert rows["heads"]["u"] == pytest.approx(2, abs=0.2)


def test_traffic_is_counted_from_plans() -> None:
    arguments = shlex.split("--ranks 2 3 --heads 8:8 --tokens 4096 --mask causal")
    rows = json.loads(run_python("benchmarks/traffic.py", *arguments).splitlines()[-1])["rows"]
    assert [row["ranks"] for row in rows] == [2, 3]
    assert all(row["bound_kept"] <= row["all_kept"] <= row["auto"] for row in rows)


# --- The script that installs the package on several Pythons and torches, short of installing.


def test_rows_take_the_place_of_older_ones_of_their_key() -> None:
    old = row_of("3.11.7", "2.13.0+cpu", ["Error: a | b"])
    assert old.startswith("| 3.11.7 | 2.13.0+cpu | Error: a / b | not tried |")
    others = [row_of("3.14.0", "2.9.1+cu130", ["yes"]), row_of("3.9.2", "2.13.0", ["yes"])]
    new = row_of("3.11.9", "2.13.0+cu130", ["yes"])
    assert format_table([old, *others, new])[2:] == [others[1], new, others[0]]


def test_the_page_holds_a_table_of_the_script() -> None:
    lines = read_part(PAGE, SCRIPT)
    assert len(lines) > 2 and lines == format_table(lines[2:])


def test_the_tests_of_the_sdist_exist() -> None:
    assert all((ROOT / name).exists() for name in TESTS.split())
