"""The description of one attention over a sharded sequence: all about it but its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cp_inductor.mask.rule import Rule
from cp_inductor.plan import Recipe
from cp_inductor.tiles.tile_masks import Extras


@dataclass(frozen=True, slots=True)
class Attention:
    """Everything about one sequence-sharded attention but its tensors.

    Attributes:
        recipe: of its plan, resolved.
        rank: whose part of the plan: this process's position among the plan's ranks.
        scale: of the scores; None is 1 / sqrt(D).
        kernel: a name in `cp_inductor.tiles.kernel_table.KERNELS`.
        group_name: c10d name of the process group behind the sequence axis.
        dropout_p: probability with which a probability is dropped.
        has_bias: the last table of the rule is a bias (B | 1, H | 1, S, T) with a gradient.
        kernel_options: for the templates of tiles under a mask on CUDA; see `FlexCUDA`.
    """

    recipe: Recipe
    rank: int
    scale: float | None
    kernel: str
    group_name: str
    dropout_p: float = 0.0
    has_bias: bool = False
    kernel_options: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.recipe.world_size, "the plan is for another number of ranks"

    @staticmethod
    def of(
        recipe: str,
        rank: int,
        scale: float | None,
        kernel: str,
        group_name: str,
        dropout_p: float = 0.0,
        has_bias: bool = False,
        kernel_options: str = "",
    ) -> Attention:
        """Return what the arguments of the op pair say."""
        how = (scale, kernel, group_name, dropout_p, has_bias, kernel_options)
        return Attention(Recipe.parse(recipe), rank, *how)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op pair that say this."""
        how = (self.scale, self.kernel, self.group_name, self.dropout_p, self.has_bias)
        options = (self.kernel_options,) if self.kernel_options else ()
        return self.recipe.format(), self.rank, *how, *options

    @property
    def rule(self) -> Rule:
        """Which pairs exist."""
        return Rule.parse(self.recipe.rule)

    @property
    def num_extras(self) -> int:
        """How many tensors are read beside query, key and value: see `Extras`, in its order."""
        return len(self.rule.tables) + (self.dropout_p > 0)

    def extras(self, tensors: Sequence[Tensor]) -> Extras:
        """Name them."""
        left = list(tensors)
        seed = left.pop() if self.dropout_p else None
        return Extras(tuple(left), seed)
