"""What context parallelism is combined with: one small model, and the list of what is tested.

    @combination("FSDP2, CPU offload", *FORMS)
    def test_offload(form): ...                 a line of the list in docs/fsdp.md

`python -m tests.support.combinations` writes the list, and
`tests/repository/test_documentation.py` compares it with the tests.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support.pages import write_part
from tests.support.reference import assert_within

ROOT = Path(__file__).parents[2]

EAGER, AOT, COMPILED = FORMS = ("eager", "cp_aot_eager", "cp_inductor")

# Why a row has no eager form.
NOTHING = "It is about what is compiled."

VOCABULARY, DIM, HEADS = 24, 32, 4
BATCH, LENGTH = 4, 12
NUM_LAYERS = 2

# Relative to the largest gradient: float32, parts of it rounded and added on several ranks.
TOLERANCE = 2e-5


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.head_dim = dim // HEADS
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        # As many heads as the projections give: under tensor parallelism this rank's.
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Tokens and their positions in, logits out."""

    def __init__(
        self, num_layers: int = NUM_LAYERS, dim: int = DIM, *, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_model(**kwargs: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(**kwargs)


def checkpoint_layers(model: Decoder, **how: Any) -> None:
    """Put every block under a checkpoint; `how` is of `checkpoint_wrapper`, or of `checkpoint`."""
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, **how)


def make_batch(batch: int = BATCH, length: int = LENGTH, seed: int = 2) -> tuple[Tensor, ...]:
    """Return ids, positions and labels of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    positions = torch.arange(length).expand(batch, -1).contiguous()
    return ids[:, :-1].contiguous(), positions, ids[:, 1:].contiguous()


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_mesh(*sizes: int, names: tuple[str, ...] = ("dp", "cp")) -> DeviceMesh:
    torch._dynamo.reset()
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def layers_of(form: str) -> int:
    """Return how many blocks a model gets: of C++ a second one would be compiled for nothing."""
    return 1 if form == COMPILED else NUM_LAYERS


def compiled(function: Any, form: str, **kwargs: Any) -> Any:
    return function if form == EAGER else torch.compile(function, backend=form, **kwargs)


def assert_rewritten(form: str) -> None:
    """Check that attentions were found, if there is a compiler to find them."""
    num_sites = counters["cp_inductor"]["sites_rewritten"]
    assert num_sites == 0 if form == EAGER else num_sites > 0, (form, num_sites)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every gradient, whole."""
    return {plain_name(name): whole(parameter.grad) for name, parameter in model.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def assert_beside(
    model: nn.Module,
    reference: nn.Module,
    *results: tuple[Any, Tensor],
    tolerance: float,
    least: float = 0.0,
) -> None:
    """Compare results, and the gradients of all parameters, with those of one process.

    Args:
        results: pairs of what came out of the model and of the reference.
        tolerance: relative to the largest of a tensor, which counts as `least` if it is less.
    """
    named = zip(model.named_parameters(), reference.parameters(), strict=True)
    pairs = [(f"result {number}", *pair) for number, pair in enumerate(results)]
    pairs += [(name, parameter.grad, other.grad) for (name, parameter), other in named]
    for name, actual, expected in pairs:
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert_within(whole(actual), expected, tolerance, name, least=least)


def check_distributed(
    model: nn.Module,
    x: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    form: str = EAGER,
    *,
    tolerance: float = 1e-12,
    fullgraph: bool = True,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **how: Any,
) -> DTensor:
    """Hold a module over DTensors, its weights and its input beside itself on one process.

    Args:
        x, placements: of the input.
        prepare: is called with the module over DTensors alone.
        how: `parallelize` is told to compute.
    """
    reference = copy.deepcopy(model)
    prepare(model)
    leaf, other = (
        distribute_tensor(x, mesh, placements).requires_grad_(),
        x.clone().requires_grad_(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cp_inductor.parallelize(model, mesh, **how)
    # In this context a DTensor would be taken beside plain tensors.
    with implicit_replication():
        out = compiled(model, form, fullgraph=fullgraph, dynamic=False)(leaf)
        out.square().sum().backward()
    expected = reference(other)
    expected.square().sum().backward()
    results = (out, expected), (leaf.grad, other.grad)
    assert_beside(model, reference, *results, tolerance=tolerance)
    return out


def warnings_of(call: Callable[[], object]) -> list[str]:
    """Return what a call warns of that concerns the sequence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is cp_inductor.SequenceWarning]


def plain_name(name: str) -> str:
    """Return what a parameter is called in the model that nothing is wrapped around."""
    wrappers = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def unsharded(*batches: tuple[Tensor, ...], **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of the model on one process; batches accumulate."""
    model = make_model(**kwargs)
    losses = []
    for ids, positions, labels in batches or (make_batch(),):
        loss = mean_loss(model(ids, positions), labels)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean(), grads_of(model)


@contextmanager
def shards_of(batch: tuple[Tensor, ...], mesh: DeviceMesh) -> Iterator[tuple[Tensor, ...]]:
    """Run what is inside on this rank's part of a batch; a mesh has an axis cp, perhaps dp."""
    tensors = [tensor.clone() for tensor in batch]
    if "dp" in (mesh.mesh_dim_names or ()):
        dp = mesh["dp"]
        tensors = [tensor.chunk(dp.size())[dp.get_local_rank()].clone() for tensor in tensors]
    with cp_inductor.context_parallel(
        mesh["cp"], buffers=tensors, buffer_seq_dims=[1] * len(tensors)
    ):
        yield tuple(tensors)


def train_step(
    run: Callable[..., Tensor], mesh: DeviceMesh, batch: tuple[Tensor, ...] | None = None
) -> Tensor:
    """Run forward and backward of this rank's part; return the mean loss of all ranks.

    Args:
        run: ids and positions to logits.
        mesh: with an axis cp, perhaps dp.
    """
    with shards_of(batch or make_batch(), mesh) as (ids, positions, labels):
        loss = mean_loss(run(ids, positions), labels)
        loss.backward()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def averaged_grads(model: nn.Module, axis: DeviceMesh) -> dict[str, Tensor]:
    """Return every gradient, whole, averaged over an axis: what data parallelism would do."""
    grads = grads_of(model)
    for grad in grads.values():
        dist.all_reduce(grad, group=axis.get_group())
    return {name: grad / axis.size() for name, grad in grads.items()}


def assert_grads(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        assert_within(grad, expected[name], tolerance, name)


# The table.

# The rows whose graphs run in every run; those of others, and what goes through Inductor, are long:
# what differs is in eager code, or these show it as well.
AOT_ALWAYS = {
    "a compiled step of DTensors: forward, backward and optimizer",
    "FSDP2 over (dp, cp)",
    "torch's own style _ContextParallel, the backend exchanged",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: its forms, why others cannot be had, and what a test is to do."""

    forms: tuple[str, ...] = FORMS
    refused: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def combinations(rows: Mapping[str, Row]) -> Callable[[Any], Any]:
    """Mark a test with rows of the table; its arguments are `row` and `form`."""
    cases = [
        pytest.param(name, form, marks=_mark_of(name, form))
        for name, row in rows.items()
        for form in row.forms
    ]
    return _stand_for(rows, ("row", "form"), cases)


def combination(row: str, *forms: str, **refused: str) -> Callable[[Any], Any]:
    """Mark a test with the row of the table that it stands for; its argument is `form`."""
    cases = [pytest.param(form, marks=_mark_of(row, form)) for form in forms]
    return _stand_for({row: Row(forms, refused)}, "form", cases)


def _stand_for(rows: Mapping[str, Row], arguments: Any, cases: list[Any]) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.combinations = rows
        return pytest.mark.parametrize(arguments, cases)(function)

    return mark


def _mark_of(row: str, form: str) -> Any:
    if form == EAGER:
        return ()
    return pytest.mark.slow if form == AOT and row in AOT_ALWAYS else pytest.mark.long


PAGE, SCRIPT = "fsdp.md", "tests/support/combinations.py"


def combined() -> list[str]:
    """Return the list in docs/fsdp.md, by the tests there are: combinations by their forms."""
    rows: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for function in vars(module).values():
            if getattr(function, "__module__", "") != module.__name__:
                continue
            for name, row in getattr(function, "combinations", {}).items():
                reasons = "".join(f" {reason}" for reason in dict.fromkeys(row.refused.values()))
                tested = ", ".join(f"`{form}`" for form in FORMS if form in row.forms)
                rows.setdefault(f"{tested}.{reasons}", []).append(name)
    by_forms = sorted(rows, key=lambda forms: (-forms.count("`"), forms))
    return [f"* **{forms}** {'; '.join(sorted(rows[forms]))}." for forms in by_forms]


if __name__ == "__main__":
    write_part(PAGE, SCRIPT, combined())
