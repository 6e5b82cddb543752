"""Find the layers of a model that are alike, and take all but the first of them away.

    find_layers(model)              =>  Layers("model.layers", count=36, period=1)
    layers.keep(model, 2)           =>  the model with its first two layers, in place

What a program costs is then known for any number of layers from the programs of a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

Stack = nn.ModuleList | nn.ModuleDict | nn.Sequential


@dataclass(frozen=True, slots=True)
class Layers:
    """The longest list of layers in a model."""

    name: str  # of the list, from the model
    count: int  # how many layers it has
    period: int  # every layer is like the one so many before it: 1 if all are alike

    @property
    def fewest(self) -> tuple[int, int]:
        """How many layers two programs have that differ by one period, and end as the model."""
        first = self.count % self.period or self.period
        return first, first + self.period

    def left_in(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers that are left."""
        return [*model.get_submodule(self.name).children()]

    def keep(self, model: nn.Module, count: int) -> None:
        """Take away all layers behind the first ones, in place."""
        stack: Any = model.get_submodule(self.name)
        for name in [*stack._modules][count:]:
            del stack._modules[name]

    def checkpoint(self, model: nn.Module) -> None:
        """Have every layer computed again in the backward, in place."""
        for layer in self.left_in(model):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def find_layers(model: nn.Module) -> Layers | None:
    """Return the longest list of layers that repeats at least thrice; None if there is none."""
    candidates = []
    for name, module in model.named_modules():
        if isinstance(module, Stack):
            layers, period = [*module.children()], 1
            while 3 * period <= len(layers) and not _repeats(layers, period):
                period += 1
            if 3 * period <= len(layers):
                candidates.append(Layers(name, len(layers), period))
    return max(candidates, key=lambda candidate: candidate.count, default=None)


def _repeats(layers: list[nn.Module], period: int) -> bool:
    """Whether layers that are a period apart differ in nothing but their places."""
    facts = [[*_facts(layer)] for layer in layers]
    return all(
        len(ones) == len(others)
        and all(
            a == b or (a[:2] == b[:2] and (a[2], b[2]) == (i, i + period))
            for a, b in zip(ones, others, strict=True)
        )
        for i, (ones, others) in enumerate(zip(facts, facts[period:], strict=False))
    )


def _facts(layer: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Yield what a layer computes by: classes, shapes, and values of attributes."""
    for name, module in layer.named_modules():
        yield name, "class", type(module)
        for key, value in sorted(vars(module).items()):
            if isinstance(value, (str, bool, int, float, tuple)) or value is None:
                yield name, key, value
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers()):
            yield name, key, (tensor.shape, tensor.dtype, tensor.requires_grad)
