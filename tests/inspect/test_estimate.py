"""Estimates: layers that are alike, prices of graphs that can be counted by hand, extrapolation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import cp_inductor
import cp_inductor.inspect.estimate as estimate_module
from cp_inductor.__main__ import main
from cp_inductor.inspect.compile_for import Target
from cp_inductor.inspect.layers import Layers, find_layers
from cp_inductor.inspect.price_graph import Pricing, price_graph
from cp_inductor.plan.machine import DEVICES
from cp_inductor.torch_private.tracing import fakes_of_shapes, trace_fake
from tests.support.graphs import Layer
from tests.support.models import make

MB = 10**6
MACHINE = cp_inductor.Machine(
    (cp_inductor.Level(0, 1e9, 0.0, "tcp"),),
    cp_inductor.Device(flops_per_s=5e10, bytes_per_s=1e10, matmul_flops_per_s=1e11, name="cpu"),
)
DIM, VOCABULARY, TOKENS = 64, 256, 512
PRICES: dict[Any, Any] = {}


class Model(nn.Module):
    def __init__(self, windows: list[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(
            Layer(DIM, 4, 4, DIM // 4, 4 * DIM, bias=False) for _ in windows
        )
        for place, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            vars(layer).update(place=place, window=window)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids(mesh: DeviceMesh) -> tuple[Tensor]:
    return (distribute_tensor(torch.zeros(1, TOKENS, dtype=torch.int64), mesh, [Shard(1)]),)


def estimated(num_layers: int, **how: Any) -> cp_inductor.Estimate:
    with torch.device("meta"):
        model = Model([0] * num_layers)
    how = {"target": "cpu", "options": {"machine": MACHINE}, "mesh_shape": (4,)} | how
    return cp_inductor.estimate(model, ids, **how)


@pytest.mark.parametrize(
    ("windows", "found", "fewest"),
    [
        ([0] * 6, Layers("layers", 6, 1), (1, 2)),
        ([0, 0, 7] * 3, Layers("layers", 9, 3), (3, 6)),
        ([0, 7] * 3 + [0], Layers("layers", 7, 2), (1, 3)),
        ([0, 1, 2, 3, 4], None, None),  # their windows are their places
        ([0, 1, 0, 2, 0, 3], None, None),
        ([0, 0], None, None),
    ],
)
def test_layers_that_are_alike(windows: list[int], found: Layers | None, fewest: Any) -> None:
    with torch.device("meta"):
        model = Model(windows)
    if windows == [0, 1, 2, 3, 4]:
        model.layers[2].up = nn.Linear(DIM, 4 * DIM, device="meta")  # a bias more
    layers = find_layers(model)
    assert (layers, layers and layers.fewest) == (found, fewest)
    if layers is not None:
        layers.keep(model, 2)
        assert [layer.place for layer in model.layers] == [0, 1]


def priced(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    machine: cp_inductor.Machine | None = None,
) -> Any:
    fakes = fakes_of_shapes([(shape, torch.float32) for shape in shapes])
    gm = trace_fake(function, fakes, {})
    assert isinstance(gm, fx.GraphModule)
    return price_graph(gm, "forward", Pricing(machine or MACHINE, 4))


def test_a_graph_counted_by_hand() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).exp()  # 4 MB, 2e9 operations
        z = y + y.sin() + y.cos()  # the same kernel, which writes over x @ w
        return (z @ w).relu()

    price = priced(run, (1000, 1000), (1000, 1000))
    assert price.seconds["matmuls"] == pytest.approx(2 * 2e9 / 1e11)
    assert price.seconds["elementwise"] == pytest.approx(2 * 8 * MB / 1e10)
    assert price.model_flops == 3 * 4e9
    assert price.peak_bytes == 8 * MB  # z and z @ w, over which its relu is written
    assert price.saved_bytes == 4 * MB


def test_a_causal_tile_computes_whole_blocks() -> None:
    def run(*heads: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*heads, is_causal=True)

    half = 4 * 4 * 64 * 1024**2 / 2
    price = priced(run, *[(1, 4, 1024, 64)] * 3)
    assert price.seconds["attention"] == pytest.approx(half / 5e10)
    assert price.model_flops == 3 * half
    in_blocks = replace(MACHINE, device=replace(MACHINE.device, causal_keys=512))
    price = priced(run, *[(1, 4, 1024, 64)] * 3, machine=in_blocks)
    assert price.seconds["attention"] == pytest.approx(1.5 * half / 5e10)
    assert price.model_flops == 3 * half


@pytest.mark.parametrize("hidden", [1.0, 0.25, 0.0])
def test_what_cores_move_is_hidden_in_part(hidden: float) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        moving = torch.ops._c10d_functional.all_gather_into_tensor(x, 4, "cp")
        y = w @ w  # 20 ms
        return torch.ops._c10d_functional.wait_tensor(moving) + y[0, 0]

    machine = replace(MACHINE, device=replace(MACHINE.device, hidden=hidden))
    price = priced(run, (1000, 1000), (1000, 1000), machine=machine)
    # 16 MB at 1 GB/s are 16 ms, fewer than the 20 that hide them.
    exposed = price.seconds["exposed exchanges"]
    assert exposed == pytest.approx((1 - hidden) * 0.016, abs=1e-9)


@pytest.mark.parametrize(
    ("machine", "world_size", "name", "of_device"),
    [
        ("", 8, "nvlink4", 1.0),
        ("", 9, "ib400", 1.0),
        ("h100:nvlink4", 16, "nvlink4", 1.0),
        ("4xgpu[at_once=1]:nvlink4 x eth100", 2, "nvlink4", 0.5),
        ("4xgpu[at_once=1]:nvlink4 x eth100", 8, "eth100", 0.25),
    ],
)
def test_machines(machine: str, world_size: int, name: str, of_device: float) -> None:
    found = estimate_module.machine_for(Target.parse("cuda:h100"), machine, world_size)
    known = DEVICES[found.device.name]
    assert found.levels[-1].name == name
    assert found.device.bytes_per_s == of_device * known.bytes_per_s
    assert found.device.flops_per_s == of_device * known.flops_per_s


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Price each program once: neither how weights are held nor the memory there is changes it."""
    price = estimate_module._price

    def remembered(example: Any, *how: Any, **flags: Any) -> Any:
        layers = example.model.layers
        key = (len(layers), "forward" in vars(layers[0]), torch.is_grad_enabled())
        if key not in PRICES:
            PRICES[key] = price(example, *how, **flags)
        return PRICES[key]

    monkeypatch.setattr(estimate_module, "_price", remembered)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_further_layers_are_what_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimated(3)
    assert found.compiled_layers == (1, 2) and found.num_layers == 3
    # What is small has a unit in which it is not zero.
    assert f"weights {found.memory['weights'] / 2**20:.3g} MiB" in str(found)
    assert "GiB" not in str(found)
    monkeypatch.setattr(Layers, "fewest", property(lambda self: (2, 3)))
    whole = estimated(3)
    assert whole.compiled_layers == (2, 3)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert found.model_flops == pytest.approx(whole.model_flops, rel=1e-6)
    weights = 3 * 12 * DIM * DIM + 2 * VOCABULARY * DIM
    assert found.memory["weights"] == 4 * weights
    assert found.memory["optimizer states"] == 8 * weights
    # Multiplications of a rank's tokens by weights, and a quarter of the causal pairs.
    flops = 6 * TOKENS / 4 * (weights - VOCABULARY * DIM) + 3 * 12 * TOKENS**2 / 2 * DIM / 4
    assert found.model_flops == pytest.approx(flops, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_checkpoints_hold_the_inputs_of_layers() -> None:
    plain, again, away = (estimated(20, checkpoint=way) for way in ("none", "layers", "offload"))
    with torch.no_grad():
        alone = estimated(20, checkpoint="offload")
    assert "optimizer" not in alone.parts_s and alone.model_flops * 3 == plain.model_flops
    inputs = TOKENS // 4 * DIM * 4
    saved = [one.memory["saved activations"] for one in (plain, again, away)]
    assert saved[0] > 2 * saved[1] > saved[1] >= 20 * inputs
    assert saved[1] - saved[2] >= 18 * inputs
    # The forward of all layers is a third of the multiplications.
    assert 1.1 * plain.seconds < again.seconds < 1.5 * plain.seconds
    assert again.model_flops == pytest.approx(plain.model_flops)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_shards_of_weights_and_the_fewest_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "_capacity", lambda target: 10**9)
    whole, shards = estimated(5), estimated(5, sharding="fsdp", held_dtype=torch.bfloat16)
    assert shards.memory["weights"] == -(-whole.memory["weights"] // 8)
    assert shards.memory["gathered weights"] == 4 * (2 * 12 * DIM * DIM + 2 * VOCABULARY * DIM)
    assert whole.is_fine and whole.smallest_world == 1
    monkeypatch.setattr(estimate_module, "_capacity", lambda target: whole.peak_bytes)
    found = estimated(5)
    assert not found.is_fine and found.smallest_world == 8  # with 4 ranks nothing is left over


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"options": None}, "estimate(target='cpu'): expected a GPU, or a machine"),
        ({"target": "h100"}, "expected a machine of gpu or h100, got 'cpu["),
        ({"sharding": "zero"}, "sharding to be one of none, fsdp, got 'zero'"),
        ({"checkpoint": "all"}, "checkpoint to be one of none, layers, offload, got 'all'"),
    ],
)
def test_wrong_calls(how: dict[str, Any], said: str) -> None:
    with pytest.raises(cp_inductor.CPError, match="estimate") as raised:
        estimated(3, **how)
    assert said in str(raised.value).replace("; got", ", got")


@pytest.mark.long
@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "from tests.inspect.test_estimate import Model, ids\n"
        "def build(mesh):\n"
        "    with torch.device('meta'):\n"
        "        return Model([0] * 3).bfloat16(), ids(mesh)\n"
    )
    call = ["estimate", f"{file}:build", "--world-size", "4", "--target", "h100", "--json"]
    assert main([*call, "--sharding", "fsdp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world_size"] == 4 and found["rank"] == 2 and found["target"] == "cuda:h100"
    assert found["is_fine"] and found["parts_s"]["attention"] > 0
    assert found["num_tokens"] == TOKENS


def test_mixers_pass_states_and_do_not_gather() -> None:
    """A model that nobody distributed is estimated as `parallelize` would have it compute."""
    pytest.importorskip("transformers")
    model = make("Mamba2", num_hidden_layers=1)
    tokens = torch.ones(1, 64, dtype=torch.long)
    found = cp_inductor.estimate(
        model, (tokens,), mesh_shape=(2,), target="h100", placements=[Shard(1)]
    )
    # Most at once: of each rank a state of 8 heads of 8 x 8, and 8 decays, in float32.
    assert found.exchange_bytes == 2 * (8 * 8 * 8 + 8) * 4
    assert found.parts_s["exposed exchanges"] > 0
