"""One tile: a single-device flash attention, forward and backward, behind one shape of call.

    call = TileCall(query, key, value, is_causal=False, scale=None)
    partial = kernel.forward(call)
    grads = kernel.backward(call, grad_out, partial)

The kernels of aten differ in how many KV heads they take, which head dims, how long their lse is,
which of them take a mask, what they return for a row that sees nothing (here: out 0, lse -inf,
gradients 0), which strides they read correctly, and which scales. All of that is settled here.
Inside a plan, `backward` gets the out and lse of whole rows, not of the tile: the softmax that it
recomputes is then the global one, and the gradients of all tiles add up.

A kernel is a class: its attributes say what it can do, its methods compute. A new one needs a file
with that class and a row in `cp_inductor.tiles.kernel_table.KERNELS`. Nothing else asks which
kernel it is: passes and executors ask what it can do.

Shapes: B batch, H query heads, G key-value heads (G divides H), S queries, T keys, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cp_inductor.mask.rule import Rule
from cp_inductor.tiles.known_wrong import chip_of
from cp_inductor.tiles.tile_masks import Indices, ScoreChange
from cp_inductor.torch_private.sizes import is_known

# The gradients of query, key and value, in their shapes and dtypes.
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TileCall:
    """What a tile attends to."""

    query: Tensor  # (B, H, S, D)
    # key and value: (B, G, T, D).
    key: Tensor
    value: Tensor
    is_causal: bool = False  # only keys with an index up to the query's; needs S == T
    scale: float | None = None  # of the scores; None is 1 / sqrt(D)
    # (B | 1, H | 1, S, T), added to the scaled scores; -inf where there is no pair.
    bias: Tensor | None = None
    # What takes the place of the scaled scores before; `Math` alone computes it.
    change: ScoreChange | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def factor(self) -> float:
        """The scale, also where it is the default: padding the head dim does not change it."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


class Partial(NamedTuple):
    """A tile's result: out (B, H, S, D), lse (B, H, S), natural log.

    Out is in the dtype of the inputs, or wider where what computed it is.
    """

    out: Tensor
    lse: Tensor


class Switch(NamedTuple):
    """What ``torch.nn.attention.sdpa_kernel`` turns on and off. The names are CUDA's.

    By its backend SDPA orders it among others.
    """

    name: str
    is_on: Callable[[], bool]
    backend: SDPBackend


class Kernel(ABC):
    """A single-device attention.

    Most compute positive scales alone: the sign of others goes into the query. The CPU's masks
    scores before it scales them: -inf times 0 is NaN, and times less is +inf. CUDA's flash takes
    the largest product for that of the largest score.

    Attributes:
        forward_op, backward_op: by which passes find its tiles in a graph.
        device: type of the devices that it runs on.
        takes_delta: its backward takes delta = <out, grad_out> (B, H, S) in the place of out; then
            another rank is sent delta, and no out is made to stand in for it.
        packed: what of a row its backward does not read out of a message: it is copied where it
            arrives.
        takes_all_scales: also negative ones, and 0.
    """

    forward_op: ClassVar[Any]
    backward_op: ClassVar[Any]
    device: ClassVar[str]
    takes_delta: bool = False
    packed: ClassVar[tuple[str, ...]] = ()
    takes_all_scales: ClassVar[bool] = False

    def forward(self, call: TileCall) -> Partial:
        """Attend."""
        _, call = self._split_scale(call)
        return self._serving(call)._attend(call)

    def backward(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """Differentiate `forward`.

        Args:
            call: of the forward.
            grad_out: (B, H, S, D).
            whole: out and lse, of the tile or of whole rows.
        """
        sign, call = self._split_scale(call)
        kernel = self._serving(call, is_backward=True)
        dq, dk, dv = kernel._differentiate(call, grad_out, whole)
        return dq if sign == 1 else dq * sign, dk, dv

    def _split_scale(self, call: TileCall) -> tuple[int, TileCall]:
        """Return a sign, and a call whose query has it, which is exact."""
        if self.takes_all_scales or call.scale is None or call.scale > 0:
            return 1, call
        sign, scale = (-1, -call.scale) if call.scale < 0 else (0, 1.0)
        return sign, replace(call, query=call.query * sign, scale=scale)

    def _serving(self, call: TileCall, *, is_backward: bool = False) -> Kernel:
        """Return what computes a tile: this kernel, or another where it does not."""
        return self

    @abstractmethod
    def _attend(self, call: TileCall) -> Partial:
        """Compute the forward of a tile that it serves."""

    @abstractmethod
    def _differentiate(self, call: TileCall, grad_out: Tensor, whole: Partial) -> Gradients:
        """Compute the backward of a tile that it serves."""


class PlainKernel(Kernel):
    """A kernel of tiles that are FULL or CAUSAL, or whose mask is made as a bias.

    Attributes:
        dtypes: that it computes in.
        switch: that turns it on.
        max_head_dim: the largest that it takes; None is any.
        head_dim_multiple: of which SDPA gives it multiples alone.
        min_capability: of CUDA devices.
        for_bias: computes calls with a bias in its place; None if it does so itself.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]]
    switch: ClassVar[Switch]
    max_head_dim: ClassVar[int | None] = None
    head_dim_multiple: ClassVar[int] = 1
    min_capability: ClassVar[tuple[int, int]] = (0, 0)
    for_bias: ClassVar[type[PlainKernel] | None] = None

    @classmethod
    def obstacle(cls, dtype: torch.dtype, head_dim: Any, *, has_bias: bool) -> str | None:
        """Say why it does not compute such an attention on its device; None if it does."""
        for kernel in (cls, cls.for_bias if has_bias else None):
            if kernel is not None and not kernel.switch.is_on():
                return f"{kernel.switch.name} attention is disabled"
        if dtype not in cls.dtypes:
            return f"{cls.switch.name} does not compute in {str(dtype).removeprefix('torch.')}"
        is_long = cls.max_head_dim is not None and head_dim > cls.max_head_dim
        if is_long or head_dim % cls.head_dim_multiple:
            return f"{cls.switch.name} takes head dims{cls._describe_head_dims()}"
        return None

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Whether a device has it. One that is not here is taken for one that has."""
        chip = chip_of(device)
        # Without it, the graph is being cross-compiled, for chips that have the kernel.
        return chip is None or chip >= cls.min_capability

    def _serving(self, call: TileCall, *, is_backward: bool = False) -> Kernel:
        return self if call.bias is None or self.for_bias is None else self.for_bias()

    @classmethod
    def describe(cls) -> str:
        """Say what it serves."""
        *names, last = (str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
        limits = cls._describe_head_dims()
        limit = f" with head dims{limits}" if limits else ""
        dtypes = f"{', '.join(names)} or {last}{limit}"
        return f"{dtypes} on {cls.device} with the {cls.switch.name} kernel enabled"

    @classmethod
    def _describe_head_dims(cls) -> str:
        multiple, limit = cls.head_dim_multiple, cls.max_head_dim
        multiples = f" that are multiples of {multiple}" if multiple > 1 else ""
        return multiples if limit is None else f" up to {limit}{multiples}"


class RuleKernel(Kernel):
    """A kernel of tiles under one rule. It reads the rule itself, and skips blocks without a pair.

    Its calls have no bias: it is the rule's.

    Attributes:
        name: for people.
        needs_graph: only compiled code uses it.
    """

    name: ClassVar[str]
    needs_graph: ClassVar[bool] = False

    @abstractmethod
    def __init__(
        self, rule: Rule, indices: Indices, options: str = "", is_computed: Tensor | None = None
    ) -> None:
        """Make the kernel of a tile under the rule of its attention.

        Args:
            rule, indices: of the attention; of the tile.
            options: of templates, as the text of a dict; "" for their defaults.
            is_computed: (rows, columns) of blocks: those that the tile computes; None is all.
        """

    @classmethod
    @abstractmethod
    def obstacle(cls, rule: Rule, head_dim: Any) -> str | None:
        """Say what about an attention it cannot compute; None if it can."""


def hide_blind_rows(lse: Tensor) -> Tensor:
    """Return the lse, +inf of rows that see nothing: their probabilities are exp(-inf) = 0."""
    return lse.masked_fill(lse == -float("inf"), float("inf"))


def with_whole_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy those tensors (B, H, S, D) whose rows are not D adjacent numbers, apart from each other.

    Strides that are not known while a graph is traced count as odd ones.
    """
    return tuple(tensor if _has_whole_rows(tensor) else tensor.contiguous() for tensor in tensors)


def _has_whole_rows(tensor: Tensor) -> bool:
    length, head_dim = tensor.shape[-2:]
    is_adjacent = is_known(tensor.stride(-1) == 1) or is_known(head_dim <= 1)
    return is_adjacent and (is_known(tensor.stride(-2) >= head_dim) or is_known(length <= 1))


def empty_like_rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty (B, H, S, ...) in which the heads of a token are next to each other."""
    b, h, s, *rest = like.shape
    return like.new_empty((b, s, h, *rest), dtype=dtype or like.dtype).transpose(1, 2)


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """(B, G, T, D) -> (B, H, T, D), each KV head repeated for its group of query heads."""
    num_groups = num_heads // tensor.shape[1]
    return tensor if num_groups == 1 else tensor.repeat_interleave(num_groups, dim=1)


def sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, T, D) -> (B, G, T, D), the inverse of `repeat_heads` for gradients."""
    if grad.shape[1] == num_kv_heads:
        return grad
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(1, (num_kv_heads, -1)).sum(2, dtype=dtype).to(grad.dtype)
