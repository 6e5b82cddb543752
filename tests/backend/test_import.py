"""What importing the package changes in a process: nothing that a program without it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cp_inductor import CPError, config
from cp_inductor.flags import _CHECKS
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


# --- Flags: what means nothing is refused by name when it is set, and all flags stay as they were.

WRONG: list[tuple[str, Any, str]] = [
    ("strategy", "x", "strategy='auto'"),
    ("strategy", "heads2", "heads2\\+blocks"),
    ("strategy", None, "to be a str"),
    ("plan", "later", "auto, static, runtime"),
    ("schedule", "all", "none, local, global"),
    ("stages", 9, "from 0 to 8"),
    ("keep_bytes", -1, "from 0 to"),
    ("memory_budget_bytes", -2, "from -1 to"),
    ("check_tables_every", 1.5, "from 0 to"),
    ("link_bytes_per_s", float("inf"), "finite number"),
    ("device_flops_per_s", "fast", "finite number"),
    ("machine", "8xh100", "a device and a link"),
    ("enabled", "no", "to be a bool"),
    ("check_sequence", 2, "to be a bool"),
    ("check_agreement", None, "to be a bool"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_a_value_that_means_nothing(name: str, value: Any, text: str) -> None:
    before = config.get_config_copy()
    with pytest.raises(CPError, match=rf"cp_inductor\.config\.{name} .*{text}"):
        setattr(config, name, value)
    with pytest.raises(CPError, match=text):
        config.patch(name, value)
    other = "stages" if name != "stages" else "keep_bytes"
    for changes in ({other: 1, name: value}, {name: value, other: 1}):
        with pytest.raises(CPError, match=text), config.patch(changes):
            pass
        with pytest.raises(CPError, match=text), config.patch(**changes):
            pass
    assert config.get_config_copy() == before


def test_every_flag_is_checked() -> None:
    assert (
        set(_CHECKS)
        == set(config.get_config_copy()) - {"TYPE_CHECKING"}
        == {name for name, _, _ in WRONG}
    )


ENVIRONMENTS = {
    "CP_INDUCTOR_STRATGY=ring": "use CP_INDUCTOR_STRATEGY, or unset CP_INDUCTOR_STRATGY",
    "CP_INDUCTOR_STAGES=two": "stages to be an integer from 0 to 8, got 'two'",
    "CP_INDUCTOR_ENABLED=maybe": "enabled to be a bool, got 'maybe'",
}
IMPORTED = """
import os, sys, torch
for variable in sys.argv[1:]:
    if not os.fork():
        os.environ.update([variable.split("=")])
        try:
            import cp_inductor
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_environment() -> None:
    """Of processes that have imported torch, and not the package."""
    said = run_python("-c", IMPORTED, *ENVIRONMENTS).splitlines()
    for line, text in zip(said, ENVIRONMENTS.values(), strict=True):
        assert line.startswith("InvalidArgument: ") and text in line
