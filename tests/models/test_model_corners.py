"""What models of transformers can do beside a loss: logits of routers, depth that is drawn.

Each beside itself on one process. More than 90 s of CPU with its long cases: whole
models, compiled.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support import models
from tests.support.ranks import on_ranks, world_mesh

pytest.importorskip("transformers")

TOLERANCE = 2e-5  # float32, relative to the largest

FORMS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(None, id="eager"),
        pytest.param("cp_aot_eager", id="compiled", marks=pytest.mark.long),
    ],
)


def run_both(name: str, backend: str | None, sizes: dict[str, Any], **how: Any) -> tuple[Any, ...]:
    """Compute a model over a sharded sequence and on one process, and compare their gradients.

    Returns:
        Both models, what both returned, and the mesh.
    """
    reference = models.make(name, **sizes).train()
    model = models.make(name, **sizes).train()
    model.load_state_dict(reference.state_dict())
    mesh = world_mesh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that mixers are not sharded
        begin = [type(one) for one in model.modules() if type(one).__name__ in models.BEGINNINGS]
        cp_inductor.parallelize(model, mesh, whole=begin)
    inputs = models.inputs_of(reference)
    called: Any = model
    if backend is not None:
        called = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    torch.manual_seed(1)
    expected = reference(**inputs, **how)
    models.loss_of(lambda **_: expected, inputs).backward()
    torch.manual_seed(1)
    found = called(**inputs, **how)
    models.loss_of(lambda **_: found, inputs).backward()
    for (path, p), (_, q) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        if q.grad is not None:
            check_close(path, p.grad, q.grad)
    return model, reference, found, expected, mesh


def check_close(name: str, actual: Any, expected: Tensor) -> None:
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE * max(1e-3, expected.abs().max().item()), (name, difference)


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("name", ["JetMoe", "Mixtral"])
@on_ranks(2)
def test_experts_are_balanced_over_all_tokens(name: str, backend: str | None) -> None:
    _, _, found, expected, _ = run_both(
        name, backend, {}, output_router_logits=True, use_cache=False
    )
    assert expected.aux_loss > 0.01
    check_close("aux_loss", found.aux_loss, expected.aux_loss)
    check_close("loss", found.loss, expected.loss)


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Replicate()])


@pytest.mark.slow
@FORMS
@on_ranks(2)
def test_stochastic_depth_over_sharded_images(backend: str | None) -> None:
    """Whole residual blocks are dropped, per image: every rank draws the same."""
    sizes = {"drop_path_rate": 0.5}
    model, reference, found, expected, mesh = run_both("BeitModel", backend, sizes)
    check_close("hidden", found.last_hidden_state, expected.last_hidden_state)
    assert found.last_hidden_state.placements == (Shard(1),)
    drawn = []
    images = torch.ones(1, 3, 16, 16).expand(8, -1, -1, -1)
    for image in reference(images).last_hidden_state.detach():
        drawn += [image] * (not any(torch.equal(image, other) for other in drawn))
    assert len(drawn) > 1  # of equal images, some lost what others kept
    if backend is None:
        return
    called = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    torch.manual_seed(1 + dist.get_rank())
    inputs = {key: replicated(value, mesh) for key, value in models.inputs_of(reference).items()}
    with implicit_replication(), pytest.raises(cp_inductor.RanksDisagree, match=r"manual_seed"):
        called(**inputs)
