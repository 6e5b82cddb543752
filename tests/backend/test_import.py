"""What importing the package changes in a process: nothing that a program without it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_python

LIGHT = """
import os
import sys
import torch
os.environ.pop("CP_INDUCTOR_MACHINE", None)  # what the environment sets is checked at once
before = set(sys.modules)
import cp_inductor
new = set(sys.modules) - before
assert len(new) < 30, new
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "scipy", "numpy")
assert not [name for name in new if name.startswith(heavy)], new
assert set(cp_inductor.__all__) <= set(dir(cp_inductor))
try:
    cp_inductor.atention
except AttributeError as error:
    assert "atention" in str(error)
else:
    raise AssertionError("there is no such name")
"""

# The package comes first, and nothing of it is used.
EAGER = """
import os
import sys
import torch
import cp_inductor
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.attention.flex_attention as flex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

handlers = DTensor._op_dispatcher._custom_op_handlers
op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
assert handlers[op].__module__ == "cp_inductor.torch_private.first_dtensor"
assert "cp_inductor.run.attention" not in sys.modules
child = os.fork()
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", rank=0 if child else 1, world_size=2, store=dist.FileStore(sys.argv[1], 2)
)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = [torch.randn(1, 4, 64, 16) for _ in range(3)]
parts = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in whole]
POOLS = (
    lambda x: F.normalize(x.mean(2), dim=-1),
    lambda x: x.norm(dim=2).sum(),
    lambda x: torch.cat([x.amax(2), x.mean(2)]),
)
assert all(pool(parts[0]).placements[0].is_partial() for pool in (torch.mean, torch.amax))
got = F.scaled_dot_product_attention(*parts, is_causal=True).full_tensor()
expected = F.scaled_dot_product_attention(*whole, is_causal=True)
torch.testing.assert_close(got, expected)
assert handlers[op].__module__ == "cp_inductor.dtensor.rules.attention"
# The other rules hold from here on, where sequences lie; DTensor forgets what it chose before.
for pool in POOLS:
    torch.testing.assert_close(pool(parts[0]).full_tensor(), pool(whole[0]))
assert parts[0].abs().amax().item() == whole[0].abs().amax().item()
try:
    flex.flex_attention(*parts)
except cp_inductor.UnsupportedAttention as error:
    assert "compile the whole model" in str(error)
else:
    raise AssertionError("flex_attention over shards has no rule in eager code")
dist.destroy_process_group()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_importing_is_light() -> None:
    """All but flags and errors is imported when it is first asked for."""
    run_python("-c", LIGHT)


@pytest.mark.slow
def test_eager_attention_over_dtensors_needs_only_the_import(tmp_path: Path) -> None:
    """Before DTensor has been imported, and with no other name of the package."""
    run_python("-W", "ignore", "-c", EAGER, tmp_path / "store")


@pytest.mark.slow
def test_importing_changes_no_number_and_no_table_of_torch() -> None:
    """`tests/support/import_battery.py` in a process where nothing has imported the package."""
    run_python("-m", "tests.support.import_battery")
