"""The scripts in examples/, as users run them: by torchrun, on local ranks."""

from __future__ import annotations

import re
import subprocess

from tests.support.processes import ROOT, run

EXAMPLES = ROOT / "examples"


def command_of(name: str, num_ranks: int, *arguments: str) -> list[str]:
    """Return Python's arguments that run a script on ranks; `arguments` are torchrun's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(num_ranks)]
    return [*torchrun, *ranks, *arguments, str(EXAMPLES / f"{name}.py")]


def run_example(name: str, num_ranks: int, arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script, which must succeed; its arguments are words with spaces between."""
    return run(*command_of(name, num_ranks), *arguments.split())


def number_in(said: str, label: str) -> float:
    """Return the number that a script prints behind a label."""
    found = re.search(rf"{label} +(\S+)", said)
    assert found is not None, said
    return float(found[1])


def check_against_unsharded(said: str, least: int = 1) -> None:
    """Check what the example says of its differences from the unsharded model."""
    differences = re.findall(r"model: loss (\S+), gradients (\S+)", said)
    assert len(differences) >= least
    assert max(float(of_loss) for of_loss, _ in differences) <= 1e-5
    assert max(float(of_gradients) for _, of_gradients in differences) <= 1e-4
