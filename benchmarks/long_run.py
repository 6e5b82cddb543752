"""Train for many steps, and watch what the ranks hold: memory, threads, descriptors.

    python benchmarks/long_run.py --steps 10000

Runs examples/train_text.py with a tiny model under torchrun. Whenever the first rank says a step,
the processes of all ranks are looked at. Printed is the most of any rank, and by how much that
has grown since a fifth of the steps: till then allocators and caches fill.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """What the ranks held at a step: the most of any rank.

    Attributes:
        resident_mib: memory, without what is shared with files.
        descriptors: open ones.
        difference: of the loss from that of the unsharded model, relative.
    """

    step: int
    resident_mib: float
    threads: int
    descriptors: int
    difference: float


def train(num_ranks: int, steps: int, every: int, backend: str) -> Iterator[Sample]:
    """Run the example; yield a sample whenever a step is said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(ROOT / "examples" / "train_text.py")]
    command += ["--steps", str(steps + 1), "--check-every", str(every), "--backend", backend]
    command += ["--layers", "1", "--dim", "16", "--seq-len", "50", "--batch-size", "1"]
    # A process per rank, and no pools beside it.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile("w+") as errors:
        training = subprocess.Popen(
            [*command, "--out", out],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert training.stdout is not None
        try:
            for line in training.stdout:
                said = re.match(r"step\s+(\d+)\s+loss .* model: loss (\S+),", line)
                if said:
                    yield look(training.pid, num_ranks, int(said[1]), float(said[2]))
            if training.wait(60) != 0:
                errors.seek(0)
                sys.exit(errors.read()[-8000:])
        finally:
            training.terminate()  # which ends its ranks


def look(launcher: int, num_ranks: int, step: int, difference: float) -> Sample:
    ranks = [
        child
        for path in Path(f"/proc/{launcher}/task").glob("*/children")
        for child in map(int, path.read_text().split())
        if "train_text" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    assert len(ranks) == num_ranks, ranks
    status = [Path(f"/proc/{rank}/status").read_text() for rank in ranks]
    resident, threads = (
        max(int(found) for one in status for found in re.findall(rf"{name}:\s+(\d+)", one))
        for name in ("RssAnon", "Threads")
    )
    descriptors = max(len(os.listdir(f"/proc/{rank}/fd")) for rank in ranks)
    return Sample(step, round(resident * 1024 / MIB, 1), threads, descriptors, difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, help="steps between samples; default: a twentieth")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="cp_inductor")
    given = parser.parse_args()
    every = given.every or max(1, given.steps // 20)
    began, samples = time.monotonic(), []
    print(
        "| step | MiB | threads | descriptors | loss differs by |\n| --- | --- | --- | --- | --- |"
    )
    for sample in train(given.ranks, given.steps, every, given.backend):
        samples.append(sample)
        print(
            f"| {sample.step} | {sample.resident_mib} | {sample.threads} | {sample.descriptors}"
            f" | {sample.difference:.1e} |",
            flush=True,
        )
    early = next(sample for sample in samples if 5 * sample.step >= given.steps)
    late = samples[-1]
    grown = {
        "steps": late.step - early.step,
        "resident_mib": round(late.resident_mib - early.resident_mib, 1),
        "threads": late.threads - early.threads,
        "descriptors": late.descriptors - early.descriptors,
        "worst_difference": max(sample.difference for sample in samples),
    }
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores", end=", ")
    print(f"{given.ranks} ranks, {given.backend}, {time.monotonic() - began:.0f} s")
    print(json.dumps({"grown": grown, "last": asdict(late)}))


if __name__ == "__main__":
    main()
