"""A drop-in for torch's own `context_parallel`: shard buffers in place, attend over all shards.

    ids (1, 4096), on 4 ranks
    with cp_inductor.context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1]):
        loss = loss_of(model(ids), labels)                 ids (1, 1024), this rank's
        loss.backward()
    ids (1, 4096), as it was

Where torch's patches scaled_dot_product_attention, this enters a `SequenceRegion`. Shards are
contiguous: attention is balanced by who computes what, not by permuting the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.errors import UnsupportedBuffer
from cp_inductor.regions import SequenceRegion
from cp_inductor.sharding import global_stride, shard_lengths
from cp_inductor.torch_private import function_modes, run_uncompiled

__all__ = ["context_parallel", "context_parallel_unshard"]

SITE = "context_parallel"


# Named as torch's.
class context_parallel(ContextDecorator):  # noqa: N801
    """Run what is inside with its sequences sharded over the ranks of a mesh.

    The signature and the meaning are those of `torch.distributed.tensor.experimental`. Each
    attention inside is over the whole sequence: in eager, in what is compiled with
    ``backend="cp_inductor"`` or ``"cp_aot_eager"``, and between the two. A backward may run inside
    or after, if it does not need a buffer that has been restored (then autograd says so).
    May be nested, entered again, and used as a decorator; buffers that an enclosing context has
    sharded on the same mesh stay as they are.

    Args:
        mesh: 1-D, the ranks that share a sequence.
        buffers: tensors with a sequence, the same on all ranks: inputs, labels, position ids, RoPE
            tables. Inside, each is this rank's shard: as many tokens as torch.chunk gives it.
        buffer_seq_dims: which dim of each is the sequence.
        no_restore_buffers: those of them that stay shards afterwards, and give their memory back.

    Raises:
        UnsupportedBuffer: a buffer is a parameter or a DTensor, or does not fit its dim; on exit,
            if one was written to, which tensors made in inference mode cannot tell.
        UnsupportedPlacement: the mesh is not 1-D.
        UnevenSequence: shards of two lengths cannot be told apart.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> None:
        self.mesh = mesh
        self.buffers = tuple(buffers or ())
        self.dims = tuple(buffer_seq_dims or ())
        self.kept = tuple(no_restore_buffers or ())
        self.entered: list[ExitStack] = []
        _check(self.buffers, self.dims, self.kept)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            outer = [mode for mode in function_modes() if isinstance(mode, _BufferRegion)]
            outer = [mode for mode in outer if mode.mesh == self.mesh]
            places = self._places_of_new([buffer for mode in outer for buffer in mode.buffers])
            known = [length for mode in outer for length in mode.lengths]
            lengths = [self.buffers[place].shape[self.dims[place]] for place in places]
            region = _BufferRegion(self.mesh, (*known, *lengths), self.buffers)
            for place in places:
                stack.enter_context(self._sharded(place))
            stack.enter_context(region)
            self.entered.append(stack.pop_all())

    def _places_of_new(self, sharded: Sequence[Tensor]) -> list[int]:
        """Return which buffers are still whole, each once."""
        places = []
        for place, buffer in enumerate(self.buffers):
            if not any(buffer is other for other in (*sharded, *self.buffers[:place])):
                places.append(place)
        return places

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)

    @contextmanager
    def _sharded(self, place: int) -> Iterator[None]:
        buffer, dim = self.buffers[place], self.dims[place]
        is_kept = any(buffer is other for other in self.kept)
        lengths = shard_lengths(buffer.shape[dim], self.mesh.size())
        rank = self.mesh.get_local_rank()
        # Whichever mode this is entered in, a tensor stays one of inference, or stays none.
        with torch.inference_mode(buffer.is_inference()):
            whole = None if is_kept else buffer.data
            # A copy: the whole is free to go, and views of it do not change.
            shard = buffer.data.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()
            _put(buffer, shard)
        version = _version_of(buffer)
        try:
            yield
            if not is_kept and _version_of(buffer) != version:
                raise UnsupportedBuffer(
                    site=f"buffer {place} of {SITE}",
                    expected="a tensor that nothing writes to while it is a shard",
                    got="one that was written to",
                    remedy="use DistributedDataParallel(..., broadcast_buffers=False), which else"
                    " has rank 0's shard on all ranks; what is written would be lost",
                )
        finally:
            if whole is not None:
                with torch.inference_mode(buffer.is_inference()):
                    _put(buffer, whole)


run_uncompiled(context_parallel.__enter__)
run_uncompiled(context_parallel.__exit__)


class _BufferRegion(SequenceRegion):
    """A region that knows which buffers are sharded in it."""

    def __init__(self, mesh: DeviceMesh, lengths: Sequence[int], buffers: Sequence[Tensor]) -> None:
        super().__init__(mesh, lengths)
        self.buffers = tuple(buffers)


def _put(buffer: Tensor, data: Tensor) -> None:
    """Exchange what a tensor holds. What saved it for a backward is told, and will say so."""
    buffer.data = data
    torch.autograd.graph.increment_version(buffer)


def _version_of(buffer: Tensor) -> int | None:
    """Return how often a tensor was written to; tensors of inference mode do not count it."""
    return None if buffer.is_inference() else buffer._version


def _check(buffers: Sequence[Tensor], dims: Sequence[int], kept: Sequence[Tensor]) -> None:
    if len(buffers) != len(dims):
        raise UnsupportedBuffer(
            site=SITE,
            expected="as many buffer_seq_dims as buffers",
            got=f"{len(dims)} for {len(buffers)}",
            remedy="name the dim of the sequence of each buffer",
        )
    for place, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if isinstance(buffer, (DTensor, torch.nn.Parameter)) or buffer.requires_grad:
            raise UnsupportedBuffer(
                site=f"buffer {place} of {SITE}",
                expected="a plain tensor without a gradient, the same on every rank",
                got=f"a {type(buffer).__name__}, requires_grad={buffer.requires_grad}",
                remedy="leave it out: DTensors say themselves how they are sharded, and weights"
                " stay whole",
            )
        if not -buffer.ndim <= dim < buffer.ndim:
            raise UnsupportedBuffer(
                site=f"buffer {place} of {SITE}",
                expected=f"a dim of a tensor of shape {tuple(buffer.shape)}",
                got=str(dim),
                remedy="name the dim of its sequence in buffer_seq_dims",
            )
    if not all(any(one is buffer for buffer in buffers) for one in kept):
        raise UnsupportedBuffer(
            site=SITE,
            expected="no_restore_buffers to be among buffers",
            got="another tensor",
            remedy="name it in buffers, too",
        )


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """Return whole sequences of which every rank has a shard, such as logits, on every rank.

    The counterpart of `context_parallel`, with the signature of torch's.

    Args:
        mesh: 1-D, the ranks that share a sequence.
        buffers: this rank's shards, in rank order; the ranks' may differ in length.
        seq_dims: which dim of each is the sequence.

    Returns:
        One tensor per buffer, without a gradient.
    """
    wholes = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        dim %= buffer.ndim
        length = torch.tensor(buffer.shape[dim], device=buffer.device)
        dist.all_reduce(length, group=mesh.get_group())
        shape = (*buffer.shape[:dim], int(length), *buffer.shape[dim + 1 :])
        sharded = DTensor.from_local(
            buffer,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=global_stride(buffer, shape),
        )
        wholes.append(sharded.redistribute(mesh, [Replicate()]).to_local())
    return wholes
