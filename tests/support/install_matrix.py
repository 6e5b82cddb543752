"""Install the package as users do, on several Pythons and releases of torch, and see what works.

    python -m tests.support.install_matrix --pythons python3.11 python3.13 --torches 2.13.0 2.15.0
    python -m tests.support.install_matrix ... --write docs/support.md

Builds the sdist, and from it the wheel. For each Python and torch it makes a fresh virtual
environment, installs the wheel by plain pip, and there, from an empty folder, does what the table
below names. Then it runs the sdist's own tests. A cell says "yes", or the first line that tells
what went wrong; what was printed is in a log for each row, in `--folder`.

Torch comes from where pip is told: for its CPU builds, `--index-url
https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple`. CUDA builds run
here as well, and take 5 GB of disk while their row is made. `--write` puts rows into the table of a
page, in place of those of the same Python and torch.

Needs nothing but the standard library, so that any Python can run it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What is tested is that the package computes; neither takes long.
TESTS = (
    "tests/repository/test_layout.py tests/backend/test_torch_private.py tests/run/test_ops.py"
    " tests/tiles/test_combine.py"
)
NEEDED_BY_TESTS = ("pytest", "expecttest", "hypothesis", "import-linter", "accelerate")

REGISTRATION = """
import torch
missing = {"cp_inductor", "cp_aot_eager"} - set(torch.compiler.list_backends())
if missing:
    raise LookupError(f"torch.compile does not find {' and '.join(sorted(missing))}")
run = torch.compile(torch.sin, backend="cp_aot_eager", fullgraph=True)
assert torch.equal(run(torch.ones(3)), torch.ones(3).sin())
import cp_inductor
"""

STEPS = ("pip install", "backends", "doctor", "`cp_aot_eager`", "`cp_inductor`", "sdist's tests")
COLUMNS = ("Python", "torch", *STEPS, "date")
LIMIT_S = 1800
TOLERANCE = 1e-5  # of a loss in float32, relative
BEGIN, END = "<!-- tests/support/install_matrix.py writes this -->", "<!-- until here -->"


@dataclass(frozen=True)
class Row:
    """What came of one Python and one torch: cells in the order of `COLUMNS`."""

    cells: tuple[str, ...]

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of Python's minor release and of torch's release."""
        python, torch = (tuple(map(int, re.findall(r"\d+", cell)[:3])) for cell in self.cells[:2])
        return python[:2], torch

    def __str__(self) -> str:
        """Return the row in Markdown."""
        return f"| {' | '.join(self.cells)} |"


class Environment:
    """A virtual environment of one Python, in a folder of its own, and what was run in it."""

    def __init__(self, python: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.empty = folder, folder / "empty"
        self.empty.mkdir(parents=True)
        self.log = folder.with_name(f"{folder.name}.txt")
        self.log.write_text("")
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.python = str(folder / "venv" / "bin" / "python")

    def run(self, command: Sequence[str | Path], *, cwd: Path | None = None) -> tuple[str, str]:
        """Run this environment's Python; return "yes" or what went wrong, and what was printed."""
        started = time.monotonic()
        words = [self.python, *map(str, command)]
        where = self.folder / "temporary"
        where.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "TMPDIR": str(where),
            "PATH": f"{self.folder}/venv/bin:{os.environ['PATH']}",
        }
        try:
            done = subprocess.run(
                words,
                cwd=cwd or self.empty,
                env=environment,
                timeout=LIMIT_S,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            text, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired:
            text, code = f"TimeoutError: more than {LIMIT_S} s", 124
        shutil.rmtree(where, ignore_errors=True)
        with self.log.open("a") as log:
            took = time.monotonic() - started
            log.write(f"$ {' '.join(words)}\n{text}\n[exit code {code}, {took:.0f} s]\n\n")
        return ("yes" if code == 0 else what_went_wrong(text)), text


def what_went_wrong(text: str) -> str:
    """Return the first line of an output that names an error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    patterns = (
        r"(FAILED|ERROR) tests/",  # pytest's summary
        r"(\w+: )?([\w.]*(Error|Exception|ERROR)|(\w+\.)+[A-Z]\w+|[A-Z][a-z]+[A-Z]\w+): ",
    )
    for pattern in patterns:
        for line in lines:
            if re.match(pattern, line):
                return line
    return lines[-1] if lines else "it printed nothing"


def describe_problems(text: str) -> str:
    """Return what the doctor found wrong."""
    try:
        checks = json.loads(text)
    except json.JSONDecodeError:
        return what_went_wrong(text)
    found = [
        f"{check['name']}: {check['found']}" for check in checks if check["state"] == "problem"
    ]
    return "; ".join(found) or "yes"


def build(python: str, folder: Path) -> tuple[Path, Path]:
    """Return a wheel, and the folder of the unpacked sdist from which it was built."""
    environment = Environment(python, folder)
    for command in (
        ["-m", "pip", "install", "--quiet", "build"],
        ["-m", "build", "--outdir", folder / "dist", ROOT],
    ):
        state, text = environment.run(command)
        if state != "yes":
            raise SystemExit(text)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "sdist")
    return wheel, folder / "sdist" / sdist.name[: -len(".tar.gz")]


def make_row(
    python: str, torch: str, wheel: Path, sdist: Path, folder: Path, args: argparse.Namespace
) -> Row:
    """Install a wheel beside a torch, and try it."""
    environment = Environment(python, folder)
    pip = ["-m", "pip", "--no-cache-dir", "install", "--quiet", *options_of_pip(args)]
    _, text = environment.run(["-c", "import platform; print(platform.python_version())"])
    installed, _ = environment.run([*pip, wheel, f"torch=={torch}"])
    versions = [text.strip(), torch]
    if installed != "yes":
        return row_of(*versions, [installed])
    _, text = environment.run(["-c", "import importlib.metadata as m; print(m.version('torch'))"])
    versions[1] = text.strip()

    backends, _ = environment.run(["-c", REGISTRATION])
    _, text = environment.run(["-W", "ignore", "-m", "cp_inductor", "doctor", "--json"])
    results = [installed, backends, describe_problems(text)]
    results += [compare_ranks(environment, backend) for backend in ("cp_aot_eager", "cp_inductor")]

    tests, _ = environment.run([*pip, *NEEDED_BY_TESTS, f"torch=={torch}"])
    if tests == "yes":
        own = shutil.copytree(sdist, folder / "sdist")
        tests, text = environment.run(
            ["-m", "pytest", "-q", "-m", "not long", *args.tests.split()], cwd=own
        )
        if tests == "yes":
            (tests,) = re.findall(r"\d+ passed", text)
    return row_of(*versions, [*results, tests])


def compare_ranks(environment: Environment, backend: str) -> str:
    """Run an example in which 2 ranks train beside one process; return "yes" or what is wrong."""
    example = shutil.copy(ROOT / "examples" / "flex_attention.py", environment.empty)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    state, text = environment.run([*torchrun, example, "--backend", backend])
    differences = [float(found) for found in re.findall(r"relative difference (\S+)", text)]
    is_wrong = state == "yes" and not (differences and max(differences) <= TOLERANCE)
    return f"differences of {differences}" if is_wrong else state


def options_of_pip(args: argparse.Namespace) -> list[str]:
    """Return where pip looks, in its own words."""
    named = ("index-url", "extra-index-url", "find-links")
    given = ((name, getattr(args, name.replace("-", "_"))) for name in named)
    return [word for name, value in given if value for word in (f"--{name}", value)]


def row_of(python: str, torch: str, results: Sequence[str]) -> Row:
    """Return a row; what comes after a failed install was not tried."""
    results = [*results, *["not tried"] * (len(STEPS) - len(results))]
    cells = [python, torch, *results, datetime.date.today().isoformat()]
    return Row(tuple(cell.replace("|", "\\|")[:120] for cell in cells))


def format_table(rows: Iterable[Row]) -> str:
    """Return rows as a table in Markdown, sorted by Python and torch."""
    head = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    return "\n".join([*head, *map(str, sorted(rows, key=lambda row: row.key))])


def merge(page: str, rows: Iterable[Row]) -> str:
    """Return a page with rows put into its table, in place of those of the same key."""
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no {BEGIN} and {END}")
    merged = {row.key: row for row in (*read_table(table), *rows)}
    return f"{before}{BEGIN}\n\n{format_table(merged.values())}\n\n{END}{after}"


def read_table(text: str) -> list[Row]:
    """Return the rows of a table that `format_table` wrote."""
    lines = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    return [Row(tuple(re.split(r" (?<!\\)\| ", line[2:-2]))) for line in lines]


def main() -> int:
    """Make all rows; return 1 if a cell says what went wrong."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--torches", nargs="+", required=True, help="releases, such as 2.13.0")
    parser.add_argument("--index-url", help="handed to pip, as are the next two")
    parser.add_argument("--extra-index-url")
    parser.add_argument("--find-links")
    parser.add_argument("--tests", default=TESTS, help="arguments of pytest, in the sdist")
    folder = ROOT / "build" / "install-matrix"
    parser.add_argument("--folder", type=Path, default=folder, help="for environments and logs")
    parser.add_argument("--keep", action="store_true", help="leave environments there")
    parser.add_argument("--write", type=Path, help="page to put rows into")
    args = parser.parse_args()
    rows: list[Row] = []
    wheel, sdist = build(sys.executable, args.folder / "build")
    for python in args.pythons:
        for torch in args.torches:
            folder = args.folder / f"{Path(python).name}-torch-{torch}"
            rows.append(make_row(python, torch, wheel, sdist, folder, args))
            print(rows[-1], flush=True)
            if args.write:
                args.write.write_text(merge(args.write.read_text(), rows[-1:]))
            if not args.keep:
                shutil.rmtree(folder)
    print(format_table(rows))
    fine = re.compile(r"yes|\d+ passed")
    return 0 if all(fine.fullmatch(cell) for row in rows for cell in row.cells[2:-1]) else 1


if __name__ == "__main__":
    sys.exit(main())
