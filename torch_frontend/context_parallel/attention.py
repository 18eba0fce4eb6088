"""Public functions for attention over a sequence that is split over ranks. See docs/how_to/long_context.md."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from attn_core.call.options import Options, checked, flag, normalise_window, number, requested_names
from attn_core.context_parallel.cost.choose import Explanation, check_asked
from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError
from attn_core.selection import override
from torch_frontend.context_parallel import ops
from torch_frontend.context_parallel.agreement import tell_refusal
from torch_frontend.context_parallel.dtensor import local, wrapped
from torch_frontend.context_parallel.exchange import axis
from torch_frontend.context_parallel.prepare import Question, Ranks, explanation
from torch_frontend.context_parallel.shards import documents_of, group_names, shard_sequence, unshard_sequence
from torch_frontend.dispatch import autocast, plan

__all__ = ["context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"]

Tensor = torch.Tensor
Window = int | tuple[int | None, int | None] | None


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    strategy: str | None = None,
    layout: str = "zigzag",
    length: int | tuple[int, int] | None = None,
    head_groups: int | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: Any = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Any:
    """``attention`` over rows whose positions are spread over the ranks of a mesh. Every rank calls it alike.

    Args:
        q: this rank's shard, ``[batch, shard, heads, head_dim]``, as ``shard_sequence`` cuts it; packed
            ``[shard, heads, head_dim]`` or ``[1, shard, ...]``. Places past those that hold a position may hold
            anything. A DTensor that is sharded on the sequence over ``mesh`` is taken as its local part, and the output
            is one alike.
        k, v: ``[batch, shard, kv_heads, head_dim]`` and ``[..., value_dim]``.
        mesh: one axis of ranks; or two, (outer, inner), of which the inner one exchanges heads (Ulysses).
        strategy: how keys and values reach the queries: ``"all_gather"``, ``"ring"`` or ``"ulysses"``; on two axes that
            of the outer one. None chooses by a cost model (``explain_context_parallel`` tells why).
        layout: which positions a shard holds: ``"zigzag"``, ``"contiguous"`` or ``"striped"``.
        length: positions of the whole row, or a pair (of q, of k); the shards' sum when None.
        head_groups: in how many groups of heads the call runs, each exchanged while the one before it is computed.
        causal, alignment, window, softcap, scale, sinks, deterministic, backend, return_lse: as in ``attention``, of
            the whole row.
        seq_info: the whole row's packed documents, as in ``attention``, with offsets on the host.
        mask, bias, alibi_slopes, dropout: refused by name.

    Returns:
        The output of this rank's positions, or ``(output, lse)``; 0 and -inf where a place holds none. Gradients of
        q, k and v are those of the loss summed over ranks; that of ``sinks`` is this rank's share of it.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for arguments that describe no call, and on every rank where
            ranks make different calls.
        NoBackendError: when no backend, or not the one asked for, can run a part of the call.
    """
    shards: Any = (q, k, v)
    rows: tuple[Tensor, ...] = shards
    try:
        q, k, v = rows = autocast.in_autocast(*local(shards, mesh))
        _check(q, k, v, sinks, {"mask": mask, "bias": bias, "alibi_slopes": alibi_slopes}, dropout)
        options = _options(causal, alignment, window, softcap, scale, deterministic, return_lse)
        documents = documents_of(seq_info)
        rank = 4 if documents is None else q.dim()
        rows = tuple(tensor[None] if tensor.dim() == 3 and documents is not None else tensor for tensor in (q, k, v))
        asked = question(rows, sinks, mesh, strategy, layout, length, head_groups, options, documents, backend)
    except Exception as error:
        if not torch.compiler.is_compiling():
            _tell_others(error, rows, seq_info is not None, mesh)
        raise
    if torch.compiler.is_compiling():
        found: tuple[Tensor, ...] = ops.traced(asked, *rows, sinks)  # type: ignore[call-arg]
    else:
        found = ops.run(asked, *rows, sinks)  # type: ignore[call-arg]
    out = found[0] if rank == 4 else found[0][0]
    out = wrapped(out, shards[0], mesh)
    if not return_lse:
        return out
    return out, found[1] if documents is None else found[1][0]


def explain_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    strategy: str | None = None,
    layout: str = "zigzag",
    length: int | tuple[int, int] | None = None,
    head_groups: int | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    seq_info: Any = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Explanation:
    """How ``context_parallel_attention`` runs a call with the same arguments, and why. Runs nothing, sends nothing."""
    q, k, v = local((q, k, v), mesh)
    _check(q, k, v, sinks, {}, 0.0)
    options = _options(causal, alignment, window, softcap, scale, deterministic, return_lse)
    documents = documents_of(seq_info)
    rows = tuple(tensor[None] if tensor.dim() == 3 and documents is not None else tensor for tensor in (q, k, v))
    asked = question(rows, sinks, mesh, strategy, layout, length, head_groups, options, documents, backend)
    return explanation(asked)


def question(
    rows: tuple[Tensor, ...],
    sinks: Tensor | None,
    mesh: DeviceMesh,
    strategy: str | None,
    layout: str,
    length: int | tuple[int, int] | None,
    head_groups: int | None,
    options: Options,
    documents: tuple[int, ...] | None,
    backend: Any,
) -> Question:
    """All that a call is, but for the values of its tensors and for what is chosen."""
    q, k, v = rows
    if q.dim() != 4:
        raise ShapeError(f"q: expected [batch, shard, heads, dim], or seq_info beside {list(q.shape)}")
    check_asked(strategy, head_groups)
    needs_backward = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*rows, sinks)
    )
    names = group_names(mesh)
    q_len, kv_len = _lengths(length, rows, mesh.size(), documents)
    if documents is not None:
        longest = ops.longest(documents)
        options = options._replace(max_len_q=longest, max_len_k=longest)
    return Question(
        (q.shape, k.shape, v.shape),
        None if sinks is None else (sinks.shape, sinks.dtype),
        q.dtype,
        q.device,
        Ranks(*names, strategy or "", layout, q_len, kv_len, int(head_groups or 1)),
        options,
        documents,
        needs_backward,
        requested_names(backend) or (None if torch.compiler.is_compiling() else override.requested()),
    )


def _tell_others(error: Exception, rows: tuple[Any, ...], packed: bool, mesh: Any) -> None:
    """Raises SpecError on every rank where this one alone refuses a call; does nothing without a mesh of ranks."""
    try:
        names = group_names(mesh)
    except (TypeError, ShapeError):
        return
    device = getattr(rows[0], "device", None)
    where = device if getattr(device, "type", None) == mesh.device_type else mesh.device_type  # ranks talk there alone
    tell_refusal(error, rows, packed, str(where), *map(axis, names))


def _lengths(length: Any, rows: tuple[Tensor, ...], world: int, documents: tuple[int, ...] | None) -> tuple[int, int]:
    if documents is not None and length is None:
        return documents[-1], documents[-1]
    if length is None:
        return rows[0].shape[1] * world, rows[1].shape[1] * world
    pair = length if isinstance(length, tuple) else (length, length)
    if len(pair) != 2 or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in pair):
        raise SpecError(f"length={length!r}: expected the positions of the whole row, or a pair (of q, of k)")
    if documents is not None and pair != (documents[-1],) * 2:
        raise SpecError(f"length={length}: expected the {documents[-1]} positions of seq_info's documents")
    return pair


def _check(q: Any, k: Any, v: Any, sinks: Any, refused: dict[str, Any], dropout: Any) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if tensor is not None or name != "sinks":
            plan.check_tensor(name, tensor)
    for name, value in refused.items():
        if value is not None:
            raise SpecError(
                f"{name}: expected None in context parallelism, where it would have to be cut for every rank; use "
                "causal, window and seq_info"
            )
    if number("dropout", dropout):
        raise SpecError(
            f"dropout={dropout}: expected 0 in context parallelism; which weights drop would depend on the rank"
        )
    for name, tensor in (("k", k), ("v", v), ("sinks", sinks)):
        if tensor is not None and tensor.device != q.device:
            raise DeviceError(f"{name}: expected the device of q ({q.device}), got {tensor.device}; move it there")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise DTypeError(f"{name}: expected the dtype of q ({q.dtype}), got {tensor.dtype}; cast it")
        if tensor.dim() != q.dim() or tensor.dim() not in (3, 4):
            raise ShapeError(
                f"{name}: expected [batch, shard, heads, dim], as q; got {list(tensor.shape)} beside {list(q.shape)}"
            )


def _options(
    causal: Any, alignment: Any, window: Any, softcap: Any, scale: Any, deterministic: Any, return_lse: Any
) -> Options:
    options = Options(causal, alignment, window, softcap, scale, None, None, 0.0, deterministic, return_lse)
    if not torch.compiler.is_compiling():
        return checked(options)
    for name in ("causal", "deterministic", "return_lse"):
        flag(name, getattr(options, name))
    return options._replace(window=normalise_window(window, causal))
