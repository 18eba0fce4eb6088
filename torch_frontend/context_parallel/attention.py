"""Public functions for attention over a sequence that is split over ranks. See docs/how_to/long_context.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never, Required, Unpack, overload

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attn_core.call.arguments import check_one_place
from attn_core.call.hints import SharedOptions, hide_unknown, refuse_keywords
from attn_core.call.keywords import ContextParallelKeywords, No, SpreadKeywords, Yes
from attn_core.call.kinds import check_kind
from attn_core.call.options import Options, Window, check_flag, check_options, check_traced_options, requested_names
from attn_core.call.seq_info import SeqInfoLike
from attn_core.context_parallel.call import check_cut_layout, check_supported
from attn_core.context_parallel.choose import Explanation
from attn_core.context_parallel.request import Request, build_request
from attn_core.errors import DTypeError, SpecError
from attn_core.selection import override
from torch_frontend.context_parallel import differentiable, repeated_calls
from torch_frontend.context_parallel.agreement import announce_error
from torch_frontend.context_parallel.mesh import group_names
from torch_frontend.context_parallel.prepare import explain_request
from torch_frontend.context_parallel.shards import document_offsets, shard_sequence, unshard_sequence
from torch_frontend.dispatch import autocast, plan, tensor_kinds
from torch_frontend.dispatch.prepared import Requested

__all__ = ["context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"]

Tensor = torch.Tensor


class Keywords(ContextParallelKeywords[Tensor], total=False):
    """The keywords of ``context_parallel_attention``, without return_lse."""

    mesh: Required[DeviceMesh]


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = False, **options: Unpack[Keywords]
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hide_unknown
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    strategy: str | None = None,
    layout: str = "zigzag",
    length: int | Sequence[int] | None = None,
    head_groups: int | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_ranges: Tensor | np.ndarray | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: SeqInfoLike = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over rows whose positions are spread over the ranks of a mesh. Every rank calls it alike.

    Args:
        q: this rank's shard, ``[batch, shard, heads, head_dim]``, as ``shard_sequence`` cuts it; packed
            ``[shard, heads, head_dim]`` or ``[1, shard, ...]``. Values at places without a position do not matter. For
            a DTensor that is sharded on the sequence over ``mesh``, the output is a DTensor with the same placements.
        k, v: ``[batch, shard, kv_heads, head_dim]`` and ``[..., value_dim]``.
        mesh: one axis of ranks; or two, (outer, inner), of which the inner one exchanges heads (Ulysses).
        strategy: how keys and values reach the queries: ``"all_gather"``, ``"ring"`` or ``"ulysses"``; on two axes, the
            strategy of the outer one. None chooses the fastest (``explain_context_parallel`` says why).
        layout: which positions a shard holds: ``"zigzag"``, ``"contiguous"``, ``"striped"``, ``"documents"``, or
            ``"window:W"`` for a causal window of W keys (even work on two ranks).
        length: the number of positions of the whole row, or a pair (of q, of k); None for the places of all shards.
        head_groups: the number of groups of heads; each group's exchange overlaps the computation of the group before.
        causal, alignment, window, softcap, scale, sinks, deterministic, backend, return_lse: as in ``attention``; they
            refer to the whole row.
        seq_info: the whole row's packed documents, as in ``attention``, with offsets on the host.
        key_ranges: of the whole row, int32 numpy ``[1, 1, kv_len, 1 or 2, 2]``, the same on every rank; without
            seq_info, and not under torch.compile.
        mask, bias, alibi_slopes, dropout: not supported; an error names the argument.

    Returns:
        The output of this rank's positions, or ``(output, lse)``; 0 and -inf at places without a position. The
        gradients of q, k and v are gradients of the loss summed over ranks. The gradient of ``sinks`` is this rank's
        share; sum it over ranks.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments, and on every rank if ranks make different
            calls or one refuses its call; in all later calls on the mesh, too, if a rank had returned from this one.
        NoBackendError: if no backend, or not the requested one, can run a part of the call.
    """
    shards: Any = (q, k, v)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    how: dict[str, Any] = {"strategy": strategy, "layout": layout, "length": length, "head_groups": head_groups}
    how["key_ranges"] = key_ranges
    tracing, repeated = torch.compiler.is_compiling(), None
    if not (tracing or unknown):
        tensors = (*shards, sinks, mask, bias, alibi_slopes)
        repeated = repeated_calls.find(tensors, mesh, seq_info, backend, options, how)
    if repeated is not None and repeated.known is not None:
        rows, request = _with_batch_axis(q, k, v), repeated.known.request
    else:
        try:
            if unknown:
                refuse_keywords(context_parallel_attention, unknown)
            local = to_local(shards, mesh)
            for name, tensor in zip("qkv", local):
                plan.check_tensor(name, tensor)
            q, k, v = autocast.in_autocast(*local)
            check_supported(mask, bias, alibi_slopes, dropout)
            check_cut_layout(layout)
            rows, request = _build_request(q, k, v, sinks, mesh, options, seq_info, backend, **how)
        except Exception as error:
            if not tracing:  # A trace cannot send. Ranks compare when the op runs.
                announce_error(error, mesh)
            raise
    results: tuple[Tensor, ...]
    if tracing:
        results = differentiable.run_traced(request, *rows, sinks)  # type: ignore[call-arg]
    else:
        results = differentiable.run(request, *rows, sinks, repeated)  # type: ignore[call-arg, arg-type]
    out = results[0][0] if q.dim() == 3 else results[0]
    out = to_dtensor(out, shards[0], mesh)
    if not return_lse:
        return out
    return out, results[1][0] if request.packed else results[1]


_shared = SharedOptions(context_parallel_attention, SpreadKeywords.__optional_keys__)


@_shared
def explain_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: str | None = "zigzag",
    return_lse: bool = False,
    needs_backward: bool | None = None,
    **options: Unpack[SpreadKeywords[Tensor]],
) -> Explanation:
    """Returns how ``context_parallel_attention`` runs a call with the same arguments, and why. Runs and sends nothing.

    With ``layout=None``, q, k and v are whole rows, whose values do not matter, and we choose a layout:
    ``explanation.choice.layout``, to be passed to ``shard_sequence`` and to the call.
    ``needs_backward`` overrides what the tensors' ``requires_grad`` says about training.
    """
    said = _shared.complete(explain_context_parallel, {**options})
    q, k, v = to_local((q, k, v), mesh)
    check_supported(*(said[name] for name in ("mask", "bias", "alibi_slopes", "dropout")))
    plain = Options.of(said | {"return_lse": return_lse})
    check_kind("layout", layout, (str, type(None)), "the name of a layout, or None")
    how = {name: said[name] for name in ("strategy", "length", "head_groups", "key_ranges")}
    where = said["sinks"], mesh, plain, said["seq_info"], said["backend"]
    _, request = _build_request(q, k, v, *where, layout=layout, **how)
    if needs_backward is not None:
        check_flag("needs_backward", needs_backward)
    return explain_request(request if needs_backward is None else request._replace(needs_backward=needs_backward))


def _build_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mesh: DeviceMesh,
    options: Options,
    seq_info: SeqInfoLike,
    backend: Requested,
    **how: Any,
) -> tuple[tuple[Tensor, ...], Request]:
    """Checks a call's tensors and options; returns (q, k and v with a batch axis, the request)."""
    _check_tensors(q, k, v, sinks)
    if how["key_ranges"] is not None and torch.compiler.is_compiling():
        raise SpecError("key_ranges: expected None under torch.compile in context parallelism, which needs the values")
    compiling, names, documents = torch.compiler.is_compiling(), group_names(mesh), document_offsets(seq_info)
    # Only packed documents may lack the batch axis, as in attention. Else build_request names the wrong shape.
    rows = _with_batch_axis(q, k, v) if documents is not None else (q, k, v)
    *arrays, sink = differentiable.tensor_metadata(*rows, sinks)  # type: ignore[call-arg, arg-type]
    differentiated = (tensor for tensor in (*rows, sinks) if tensor is not None)
    request = build_request(
        arrays,  # type: ignore[arg-type]
        sink,
        **how,
        documents=documents,
        options=check_traced_options(options) if compiling else check_options(options),
        axes=names,
        sizes=tuple([mesh.size(at) for at in range(len(names))]),  # type: ignore[arg-type]
        device=q.device,
        needs_backward=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiated),
        # Dynamo cannot trace the contextvar of use_backend. The op reads it when it runs.
        requested=requested_names(backend) or (None if compiling else override.requested()),
    )
    return rows, request


def _with_batch_axis(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple([tensor[None] if tensor.dim() == 3 else tensor for tensor in tensors])


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if tensor is not None or name != "sinks":
            plan.check_tensor(name, tensor)
    tensor_kinds.check_data(q, k=k, v=v, sinks=sinks)
    check_one_place({"q": q, "k": k, "v": v, "sinks": sinks}, "q")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise DTypeError(f"{name}: expected the dtype of q ({q.dtype}), got {tensor.dtype}; cast it")


def to_local(tensors: Sequence[Tensor], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """Returns the local parts of q, k and v if they are DTensors; plain tensors are returned as they are.

    Raises:
        SpecError: for a DTensor that is not sharded on its positions over all axes of ``mesh``, or whose positions are
            split over other axes.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return tuple(tensors)
    return tuple(_checked_local(name, tensor, mesh) for name, tensor in zip("qkv", tensors, strict=True))


def _checked_local(name: str, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part of a DTensor whose positions are split over the row's axes, and over no others."""
    if not isinstance(tensor, DTensor):
        raise SpecError(f"{name}: expected a DTensor, as the others of q, k and v are")
    axes, row_axes = _axes(name, tensor, mesh)
    positions = tensor.dim() - 3
    for axis, placement in zip(axes, tensor.placements, strict=True):
        on_row = isinstance(placement, Shard) and placement.dim == positions
        if on_row != (axis in row_axes):
            expected = f"Shard({positions}), the positions" if axis in row_axes else "positions that are not split"
            raise SpecError(f"{name}: expected {expected}, over mesh axis {axis!r}, got {placement}")
        if not isinstance(placement, (Shard, Replicate)):
            raise SpecError(f"{name}: expected whole numbers over mesh axis {axis!r}, got {placement}")
    return tensor.to_local()


def _axes(name: str, tensor: DTensor, mesh: DeviceMesh) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns (axes of a DTensor's mesh, axes that share a row): by number if the meshes are equal, else by name."""
    if tensor.device_mesh == mesh:
        return range(mesh.ndim), range(mesh.ndim)
    axes, row_axes = tensor.device_mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not row_axes or not set(row_axes) <= set(axes):
        raise SpecError(f"{name}: expected a DTensor over the axes {row_axes} of mesh, got one over {axes}")
    return axes, row_axes


def to_dtensor(out: torch.Tensor, q: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the output as a DTensor with the placements of q, if q is a DTensor."""
    if not isinstance(q, DTensor):
        return out
    # Stated, because from_local would otherwise assume that every axis is split evenly.
    shape = (*q.shape[:-1], out.shape[-1])
    return DTensor.from_local(out, q.device_mesh, q.placements, shape=torch.Size(shape), stride=_strides(shape))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
