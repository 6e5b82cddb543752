"""What models of transformers can do beside a loss: logits of routers, depth that is drawn.

Each beside itself on one process. More than 90 s of CPU with its long cases: whole
models, compiled.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support import models
from tests.support.combinations import AOT, EAGER, assert_beside, compiled
from tests.support.ranks import on_ranks, world_mesh

pytest.importorskip("transformers")

FORMS = pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
assert_beside = partial(assert_beside, tolerance=2e-5, least=1e-3)  # float32


def run_both(name: str, form: str, sizes: dict[str, Any], **how: Any) -> tuple[Any, ...]:
    """Compute a model over shards, and on one process; return both, and their results."""
    model, reference = (models.make(name, **sizes).train() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that mixers are not sharded
        begin = [type(one) for one in model.modules() if type(one).__name__ in models.BEGINNINGS]
        cp_inductor.parallelize(model, world_mesh(), whole=begin)
    inputs, results = models.inputs_of(reference), []
    for call in (compiled(model, form, fullgraph=True, dynamic=False), reference):
        torch.manual_seed(1)
        result = call(**inputs, **how)
        with implicit_replication():  # a result with tokens beside one without, in eager code
            models.loss_of(lambda result=result, **_: result, inputs).backward()
        results.append(result)
    return model, reference, *results


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("name", ["JetMoe", "Mixtral"])
@on_ranks(2)
def test_experts_are_balanced_over_all_tokens(name: str, form: str) -> None:
    how = {"output_router_logits": True, "use_cache": False}
    model, reference, found, expected = run_both(name, form, {}, **how)
    assert expected.aux_loss > 0.01
    losses = [(getattr(found, kind), getattr(expected, kind)) for kind in ("aux_loss", "loss")]
    assert_beside(model, reference, *losses)


@pytest.mark.slow
@FORMS
@on_ranks(2)
def test_stochastic_depth_over_sharded_images(form: str) -> None:
    """Whole residual blocks are dropped, per image: every rank draws the same."""
    model, reference, found, expected = run_both("BeitModel", form, {"drop_path_rate": 0.5})
    assert_beside(model, reference, (found.last_hidden_state, expected.last_hidden_state))
    assert found.last_hidden_state.placements == (Shard(1),)
    images = torch.ones(1, 3, 16, 16).expand(8, -1, -1, -1)
    first, *others = reference(images).last_hidden_state.detach()
    assert not all(torch.equal(first, image) for image in others)  # some lost what others kept
    if form == EAGER:
        return
    called = compiled(model, form, fullgraph=True, dynamic=False)
    torch.manual_seed(1 + dist.get_rank())
    inputs = models.inputs_of(reference)
    mesh = world_mesh()
    inputs = {key: distribute_tensor(t, mesh, [Replicate()]) for key, t in inputs.items()}
    with implicit_replication(), pytest.raises(cp_inductor.RanksDisagree, match=r"manual_seed"):
        called(**inputs)
