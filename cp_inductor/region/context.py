"""How a program enters a region: a drop-in for torch's `context_parallel`, and a module's style.

    ids (1, 4096), on 4 ranks
    with cp_inductor.context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1]):
        loss = loss_of(model(ids), labels)                 ids (1, 1024), this rank's
        loss.backward()
    ids (1, 4096), as it was

torch's context patches scaled_dot_product_attention; this one enters a `SequenceRegion`. Shards are
contiguous: the plan balances the work, not a permutation of the batch. Inside, torch's flag for
permuted batches says so, as torch's own context sets it, so that torch's unshard function works.

    parallelize_module(model, cp_mesh, {"layers.*.attention": cp_inductor.ContextParallel()})

Such a module is given this rank's shards, or DTensors that are sharded along the sequence. It keeps
its weights, hooks and signature. Its class is replaced by a subclass, as `fully_shard` does, whose
forward runs in a `SequenceRegion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.fx.traceback import annotate

from cp_inductor.dtensor import limits
from cp_inductor.dtensor.wrap import whole_tensor, wrap_shard
from cp_inductor.errors import InvalidArgument, UnsupportedBuffer, UnsupportedPlacement
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.region.marks import IN_REGION
from cp_inductor.region.regions import SequenceRegion
from cp_inductor.sequence.follow import version_of
from cp_inductor.torch_private.dtensor import torchs_load_balance
from cp_inductor.torch_private.modes import function_modes, run_uncompiled
from cp_inductor.trust.agreement import note_batch

SITE = "context_parallel"


# Named as torch's.
class context_parallel(ContextDecorator):  # noqa: N801
    """Run the code inside with its sequences sharded over the ranks of a mesh.

    Signature and meaning are those of torch's `context_parallel` in
    `torch.distributed.tensor.experimental`. Each attention inside sees the whole sequence: in eager
    code, in code compiled with ``backend="cp_inductor"`` or ``"cp_aot_eager"``, and in eager code
    between compiled pieces. A backward may run inside, or afterwards if it needs no buffer that has
    been restored; otherwise autograd raises. The context may be nested, entered again, and used as
    a decorator. Buffers that an enclosing context has sharded on the same mesh stay as they are.

    Args:
        mesh: 1-D, the ranks that share a sequence.
        buffers: tensors with a sequence dim, the same on all ranks: inputs, labels, position ids,
            RoPE tables. Inside, each one is this rank's shard, as torch.chunk cuts it.
        buffer_seq_dims: the sequence dim of each buffer.
        no_restore_buffers: buffers that stay shards afterwards; the memory of the rest is freed.

    Raises:
        UnsupportedBuffer: a buffer is a parameter or a DTensor, or does not have its dim. On exit:
            something wrote to a buffer (not noticed for tensors made in inference mode).
        InvalidArgument: there is no mesh.
        UnsupportedPlacement: the mesh is not 1-D; or, on entry, torch's context_parallel is active.
        UnevenSequence: shards of two sequence lengths cannot be told apart.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> None:
        limits.check_mesh(mesh, site=SITE)
        _check(buffers, buffer_seq_dims, no_restore_buffers)
        self.mesh = mesh
        self.buffers = tuple(buffers or ())
        self.dims = tuple(buffer_seq_dims or ())
        self.kept = {id(buffer) for buffer in no_restore_buffers or ()}
        self.entered: list[tuple[SequenceRegion, ExitStack]] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            # The regions over the mesh that this thread is in, and what they have cut.
            modes = [mode for mode in function_modes() if isinstance(mode, SequenceRegion)]
            outer = [mode for mode in modes if mode.mesh == self.mesh]
            cut = {id(buffer[0]): buffer for mode in outer for buffer in mode.buffers}
            lengths = [length for mode in outer for length in mode.lengths]
            places = []
            for place, (buffer, dim) in enumerate(zip(self.buffers, self.dims, strict=True)):
                if id(buffer) not in cut:
                    places.append(place)
                    lengths.append(buffer.shape[dim])
                    cut[id(buffer)] = (buffer, dim, buffer.data)
            if cut:
                limits.refuse_two_contexts(SITE)
            region = SequenceRegion(self.mesh, lengths, buffers=[*cut.values()])
            stack.enter_context(torchs_load_balance(not cut and limits.may_be_permuted()))
            stack.enter_context(self._sharded(places))
            stack.enter_context(region)
            self.entered.append((region, stack.pop_all()))

    def __exit__(self, *error: Any) -> None:
        region, stack = self.entered.pop()
        stack.__exit__(*error)
        if error[0] is None and not torch.compiler.is_compiling():
            region.judge()

    @contextmanager
    def _sharded(self, places: Sequence[int]) -> Iterator[None]:
        """Put shards into the buffers at some places, then their wholes; refuse writes between."""
        rank, wholes = self.mesh.get_local_rank(), dict[int, Tensor]()
        try:
            for place in places:
                buffer, dim = self.buffers[place], self.dims[place]
                lengths = shard_lengths(buffer.shape[dim], self.mesh.size())
                note_batch(str(self.mesh.get_group().group_name), buffer)
                # Whichever mode this is entered in, a tensor stays one of inference, or stays none.
                with torch.inference_mode(buffer.is_inference()):
                    if id(buffer) not in self.kept:
                        wholes[place] = buffer.data
                    # A copy: the whole is free to go, and views of it do not change.
                    shard = buffer.data.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()
                    _put(buffer, shard)
            # Views of one tensor have one version, so all are cut before it is read.
            versions = {place: version_of(self.buffers[place]) for place in wholes}
            yield
            for place, version in versions.items():
                if version_of(self.buffers[place]) != version:
                    _refuse(
                        "a tensor that nothing writes to inside the context",
                        "one that was written to",
                        "write to a copy, because writes to a buffer are lost on exit;"
                        " build DistributedDataParallel with broadcast_buffers=False, or it"
                        " overwrites all shards with rank 0's",
                        place,
                    )
        finally:
            for place, whole in wholes.items():
                with torch.inference_mode(whole.is_inference()):
                    _put(self.buffers[place], whole)


run_uncompiled(context_parallel.__enter__)
run_uncompiled(context_parallel.__exit__)


def _put(buffer: Tensor, data: Tensor) -> None:
    """Replace what a tensor holds, and let autograd refuse backwards that saved it."""
    buffer.data = data
    torch.autograd.graph.increment_version(buffer)


def _refuse(expected: str, got: str, remedy: str, place: int | None = None) -> NoReturn:
    """Refuse buffers, or the one at a place among them."""
    site = SITE if place is None else f"buffer {place} of {SITE}"
    raise UnsupportedBuffer(site=site, expected=expected, got=got, remedy=remedy)


def _check(
    buffers: Sequence[Tensor] | None, dims: Sequence[int] | None, kept: set[Tensor] | None
) -> None:
    for name, named in (("buffers", buffers), ("no_restore_buffers", kept)):
        if isinstance(named, Tensor):
            _refuse(f"{name} to be a list of tensors", "a tensor", f"pass {name}=[tensor]")
    if isinstance(dims, int):
        _refuse("a list of a dim for each buffer", f"{dims}", f"pass buffer_seq_dims=[{dims}]")
    buffers, dims, kept = buffers or (), dims or (), kept or set()
    if len(buffers) != len(dims):
        got = f"{len(dims)} dims for {len(buffers)} buffers"
        _refuse("as many buffer_seq_dims as buffers", got, "pass the sequence dim of each buffer")
    for place, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        kind = f"a {type(buffer).__name__}"
        if not isinstance(buffer, Tensor):
            remedy = (
                "pass tensors only; instead of flex_attention and a BlockMask, use"
                " scaled_dot_product_attention with is_causal=True or a mask over the"
                " whole sequence"
            )
            _refuse("a tensor", kind, remedy, place)
        if isinstance(buffer, (DTensor, nn.Parameter)) or buffer.requires_grad:
            _refuse(
                "a plain tensor without a gradient, the same on every rank",
                f"{kind}, requires_grad={buffer.requires_grad}",
                "leave it out: DTensors know how they are sharded, and weights stay whole",
                place,
            )
        if type(dim) is not int or not -buffer.ndim <= dim < buffer.ndim:
            expected = f"a dim of a tensor of shape {tuple(buffer.shape)}"
            _refuse(expected, str(dim), "pass its sequence dim in buffer_seq_dims", place)
    if not all(any(buffer is one_kept for buffer in buffers) for one_kept in kept):
        _refuse("no_restore_buffers to be among buffers", "another tensor", "add it to buffers")


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: object = None,
) -> list[Tensor]:
    """Gather sequences, such as logits, whole on every rank.

    The counterpart of `context_parallel`, with the signature of torch's function.

    Args:
        mesh: 1-D, the ranks that share a sequence.
        buffers: this rank's shards. Shards of different ranks may differ in length.
        seq_dims: the sequence dim of each buffer.
        load_balancer: None, because shards are in order here.

    Returns:
        One tensor per buffer, with tokens in order and without a gradient.

    Raises:
        UnsupportedPlacement: torch may have permuted the tokens.
        InvalidArgument: there is no mesh of one axis; or not a dim for each buffer.
    """
    site = "context_parallel_unshard"
    limits.check_mesh(mesh, site=site)
    if len(buffers) != len(seq_dims):
        raise InvalidArgument(
            site=site,
            expected="as many seq_dims as buffers",
            got=f"{len(seq_dims)} dims for {len(buffers)} buffers",
            remedy="pass the sequence dim of each buffer",
        )
    dims = [limits.dim_of(*pair, site=site) for pair in zip(buffers, seq_dims, strict=True)]
    if load_balancer is not None:
        raise UnsupportedPlacement(
            site=site,
            expected="load_balancer=None: shards of this library are in order",
            got=f"a {type(load_balancer).__name__}",
            remedy="gather what torch has permuted by torch's own context_parallel_unshard",
        )
    limits.refuse_permuted(
        site,
        remedy="gather them by torch's own context_parallel_unshard, or call this inside"
        " context_parallel; if they are in order, pass load_balancer=None to torch's"
        " _context_parallel_shard",
    )
    wholes = []
    for buffer, dim in zip(buffers, dims, strict=True):
        length = torch.tensor(buffer.shape[dim], device=buffer.device)
        dist.all_reduce(length, group=mesh.get_group())
        shape = (*buffer.shape[:dim], int(length), *buffer.shape[dim + 1 :])
        wholes.append(whole_tensor(wrap_shard(buffer, mesh, [Shard(dim)], shape)))
    return wholes


class ContextParallel(ParallelStyle):
    """Let every scaled_dot_product_attention of a module see the whole sequence.

    Works for your own attention modules and for nn.MultiheadAttention with need_weights=False,
    which is how nn.TransformerEncoderLayer calls its self_attn. Weights stay plain tensors, and
    each rank's gradients cover only its tokens: reduce them as for data parallelism, over both
    axes.

    Args:
        seq_len: number of tokens of the whole sequence; needed if it does not divide by the number
            of ranks.

    Raises:
        UnsupportedPlacement: when applied, if the mesh is not 1-D.
    """

    def __init__(self, *, seq_len: int | None = None) -> None:
        super().__init__()
        self.seq_len = seq_len

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        lengths = () if self.seq_len is None else (self.seq_len,)
        cls, region = type(module), SequenceRegion(device_mesh, lengths)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with region, annotate({IN_REGION: region.group_name}):
                out = cls.forward(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                region.judge()
            return out

        names = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
        module.__class__ = type(f"ContextParallel{cls.__name__}", (cls,), names)
        # A layer around it asks for hooks before it takes nn.TransformerEncoderLayer's fast path,
        # which would read the weights and go past the forward.
        module.register_forward_pre_hook(_nothing)
        return module


def _nothing(module: nn.Module, args: Any) -> None:
    """Be a hook."""
