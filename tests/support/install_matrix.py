"""Install the package as users do, on several Pythons and releases of torch, and see what works.

    python -m tests.support.install_matrix --pythons python3.11 python3.13 --torches 2.13.0 2.15.0

Builds the sdist, and from it the wheel. For each Python and torch it makes a fresh virtual
environment, installs the wheel by plain pip, and there, from an empty folder, does what the table
below names. Then it runs the sdist's own tests. A cell says "yes", or the first line that tells
what went wrong; what was printed is in a log for each row, in `--folder`.

Torch comes from where pip is told: for its CPU builds, `--pip "--index-url
https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple"`. CUDA builds run
here as well, and take 5 GB of disk while their row is made. `--write` puts rows into the table of
docs/support.md, in place of those of the same Python and torch.

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
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.pages import read_part, write_part

ROOT = Path(__file__).parents[2]
PAGE, SCRIPT = "support.md", "tests/support/install_matrix.py"

# The rooms whose tests need no library beside torch: half an hour on 2 cores.
TESTS = (
    "tests/repository/test_layout.py tests/backend tests/dtensor tests/mask tests/passes tests/plan"
    " tests/region tests/run tests/tiles tests/trust"
)
NEEDED_BY_TESTS = "pytest pytest-xdist expecttest hypothesis import-linter tabulate"

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
LIMIT_S = 7200
TOLERANCE = 1e-5  # of a loss in float32, relative


class Environment:
    """A virtual environment of one Python, in a folder of its own, and what was run in it."""

    def __init__(self, python: str, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.empty = folder, folder / "empty"
        self.empty.mkdir(parents=True)
        self.log = folder.with_name(f"{folder.name}.txt")
        self.log.write_text("")
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)

    def run(self, *command: str | Path, cwd: Path | None = None) -> tuple[str, str]:
        """Run this environment's Python; return "yes" or what went wrong, and what was printed."""
        words = [str(self.folder / "venv/bin/python"), *map(str, command)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{self.folder}/venv/bin:{os.environ['PATH']}"
        how = {"cwd": cwd or self.empty, "env": environment, "timeout": LIMIT_S, "text": True}
        try:
            done = subprocess.run(
                words, **how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            text, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired:
            text, code = f"TimeoutError: more than {LIMIT_S} s", 124
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(words)}\n{text}\n[exit code {code}]\n\n")
        return ("yes" if code == 0 else what_went_wrong(text)), text


def what_went_wrong(text: str) -> str:
    """Return the first line of an output that names an error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    patterns = (
        r"(FAILED|ERROR) tests/",  # pytest's summary
        r"(\w+: )?([\w.]*(Error|Exception|ERROR)|(\w+\.)+[A-Z]\w+|[A-Z][a-z]+[A-Z]\w+): ",
    )
    found = (line for pattern in patterns for line in lines if re.match(pattern, line))
    return next(found, lines[-1] if lines else "it printed nothing")


def describe_problems(text: str) -> str:
    """Return what the doctor found wrong."""
    try:
        # What torch says on stderr stands before it.
        checks = json.loads(text[text.find('[{"') :])
    except json.JSONDecodeError:
        return what_went_wrong(text)
    problems = (check for check in checks if check["state"] == "problem")
    return "; ".join(f"{check['name']}: {check['found']}" for check in problems) or "yes"


def build(python: str, folder: Path) -> tuple[Path, Path]:
    """Return a wheel, and the folder of the unpacked sdist from which it was built."""
    environment = Environment(python, folder)
    for command in (
        ["-m", "pip", "install", "--quiet", "build"],
        ["-m", "build", "--outdir", folder / "dist", ROOT],
    ):
        state, text = environment.run(*command)
        if state != "yes":
            raise SystemExit(text)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "sdist")
    return wheel, folder / "sdist" / sdist.name[: -len(".tar.gz")]


def make_row(
    python: str, torch: str, wheel: Path, sdist: Path, folder: Path, args: argparse.Namespace
) -> str:
    """Install a wheel beside a torch, and try it."""
    environment = Environment(python, folder)
    pip = ["-m", "pip", "--no-cache-dir", "install", "--quiet", *args.pip.split()]
    _, text = environment.run("-c", "import platform; print(platform.python_version())")
    installed, _ = environment.run(*pip, wheel, f"torch=={torch}")
    if installed != "yes":
        return row_of(text.strip(), torch, [installed])
    _, version = environment.run("-c", "import importlib.metadata as m; print(m.version('torch'))")

    backends, _ = environment.run("-c", REGISTRATION)
    _, doctor = environment.run("-W", "ignore", "-m", "cp_inductor", "doctor", "--json")
    results = [installed, backends, describe_problems(doctor)]
    results += [compare_ranks(environment, backend) for backend in ("cp_aot_eager", "cp_inductor")]

    tests, _ = environment.run(*pip, *NEEDED_BY_TESTS.split(), f"torch=={torch}")
    if tests == "yes":
        own = shutil.copytree(sdist, folder / "sdist")
        pytest = ("-m", "pytest", "-q", "-n", "2", "-m", "not long", *args.tests.split())
        tests, said = environment.run(*pytest, cwd=own)
        if tests == "yes":
            (tests,) = re.findall(r"\d+ passed(?:, \d+ skipped)?", said)
    return row_of(text.strip(), version.strip(), [*results, tests])


def compare_ranks(environment: Environment, backend: str) -> str:
    """Run an example in which 2 ranks train beside one process; return "yes" or what is wrong."""
    example = shutil.copy(ROOT / "examples" / "flex_attention.py", environment.empty)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    state, text = environment.run(*torchrun, example, "--backend", backend)
    differences = [float(found) for found in re.findall(r"relative difference (\S+)", text)]
    is_wrong = state == "yes" and not (differences and max(differences) <= TOLERANCE)
    return f"differences of {differences}" if is_wrong else state


def row_of(python: str, torch: str, results: Sequence[str]) -> str:
    """Return a row in Markdown; what comes after a failed install was not tried."""
    results = [*results, *["not tried"] * (len(STEPS) - len(results))]
    cells = [python, torch, *results, datetime.date.today().isoformat()]
    return f"| {' | '.join(cell.replace('|', '/')[:120] for cell in cells)} |"


def key_of(row: str) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of Python's minor release and of torch's release."""
    python, torch = (tuple(map(int, re.findall(r"\d+", cell)[:3])) for cell in row.split("|")[1:3])
    return python[:2], torch


def format_table(rows: Iterable[str]) -> list[str]:
    """Return the lines of a table, sorted by Python and torch, of which the last row counts."""
    by_key = {key_of(row): row for row in rows}
    head = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    return [*head, *(by_key[key] for key in sorted(by_key))]


def main() -> int:
    """Make all rows; return 1 if a cell says what went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--torches", nargs="+", required=True, help="releases, such as 2.13.0")
    parser.add_argument("--pip", default="", help="options of pip install, in one word")
    parser.add_argument("--tests", default=TESTS, help="arguments of pytest, in the sdist")
    folder = ROOT / "build" / "install-matrix"
    parser.add_argument("--folder", type=Path, default=folder, help="for environments and logs")
    parser.add_argument("--keep", action="store_true", help="leave environments there")
    parser.add_argument("--write", action="store_true", help="put rows into the page")
    args = parser.parse_args()
    rows: list[str] = []
    wheel, sdist = build(sys.executable, args.folder / "build")
    for python in args.pythons:
        for torch in args.torches:
            folder = args.folder / f"{Path(python).name}-torch-{torch}"
            rows.append(make_row(python, torch, wheel, sdist, folder, args))
            print(rows[-1], flush=True)
            if args.write:
                write_part(PAGE, SCRIPT, format_table([*read_part(PAGE, SCRIPT)[2:], rows[-1]]))
            if not args.keep:
                shutil.rmtree(folder)
    fine = re.compile(r"yes|\d+ passed(, \d+ skipped)?")
    return 0 if all(fine.fullmatch(cell) for row in rows for cell in row.split(" | ")[2:-1]) else 1


if __name__ == "__main__":
    sys.exit(main())
