"""Tensors of other layouts: heads first, as torch's own attention has them, and NestedTensors as packed documents.

A NestedTensor of the layout torch.jagged, ``[batch, ragged seq, heads, head_dim]``, has its rows end to end in
``values()``, and their places in ``offsets()``. So nothing is copied but the offsets, which become int32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from attn_core.call.seq_info import SeqInfo
from attn_core.errors import ShapeError, SpecError
from torch_frontend.dispatch.plan import check_tensor

if TYPE_CHECKING:
    from torch.nested._internal.nested_tensor import NestedTensor


def all_exchanged(qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns ``exchanged`` of q, k and v. torch has no view of a tensor without its memory, which is named here."""
    try:
        return tuple(map(exchanged, qkv))
    except RuntimeError:
        for name, tensor in zip("qkv", qkv, strict=True):
            check_tensor(name, tensor)
        raise


def exchanged(tensor: Tensor) -> Tensor:
    """Returns a view with the axes of the sequence and the heads exchanged; any other value as it is."""
    return tensor.transpose(-3, -2) if isinstance(tensor, torch.Tensor) and tensor.dim() > 2 else tensor


def first_exchanged(results: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Returns the output, or a tuple that begins with it, with the output ``exchanged``."""
    return (exchanged(results[0]), *results[1:]) if isinstance(results, tuple) else exchanged(results)


Tensor = torch.Tensor

_REPEATED = {
    "seq_info": "nested tensors say themselves which tokens belong together; leave it out",
    "mask": "causal= and window= apply to each row; a mask of all tokens needs q.values() and seq_info=",
    "key_ranges": "their queries count in the whole row: pass q.values() and seq_info=",
    "mask_mod": "its tokens count in the whole row: pass q.values() and seq_info=",
    "score_mod": "its tokens count in the whole row: pass q.values() and seq_info=",
    "bias": "alibi_slopes= applies to each row; a bias of all tokens needs q.values() and seq_info=",
}
"""The arguments that a call on nested tensors cannot have, and why."""


def has_jagged(*tensors: object) -> bool:
    """Returns whether one of the values is a NestedTensor of the layout torch.jagged."""
    return any([getattr(tensor, "layout", None) is torch.jagged for tensor in tensors])


def attend_jagged(
    attention: Callable[..., Tensor | tuple[Tensor, ...]], qkv: tuple[Any, ...], options: dict[str, Any]
) -> Tensor | tuple[Tensor, ...]:
    """Runs ``attention`` on nested q, k and v; its output is a NestedTensor of q's structure.

    Args:
        qkv: ``[batch, ragged seq, heads, head_dim]`` each.
        options: all other arguments of ``attention``, by name.

    Returns:
        The output, or a tuple that begins with it, as of packed documents: lse is ``[heads, tokens]``.
    """
    values, info = jagged_as_documents(qkv, options)
    results = attention(*values, **(options | {"seq_info": info}))
    out, *others = results if isinstance(results, tuple) else (results,)
    q = qkv[0]
    lengths: dict[str, Any] = {"min_seqlen": q._maybe_min_seqlen, "max_seqlen": q._maybe_max_seqlen}
    # The same offsets, so that torch knows that the output has the structure of q.
    nested = torch.nested.nested_tensor_from_jagged(out, q.offsets(), **lengths)
    return (nested, *others) if others else nested


def jagged_as_documents(qkv: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Tensor, ...], SeqInfo]:
    """Returns the values of nested q, k and v, and their rows as documents.

    Raises:
        SpecError, ShapeError: naming the argument that is not nested, has another structure, or cannot be combined
            with nested tensors.
    """
    nested = [name for name, tensor in zip("qkv", qkv, strict=True) if has_jagged(tensor)]
    if len(nested) < 3:
        raise SpecError(
            f"{' and '.join(nested)}: expected a plain torch.Tensor, or q, k and v all NestedTensors of the layout "
            "torch.jagged; or pass values() and seq_info="
        )
    for name, why in _REPEATED.items():
        if options.get(name) is not None:
            raise SpecError(f"{name}: expected None with nested q, k and v; {why}")
    for name, tensor in zip("qkv", qkv, strict=True):
        _check_jagged(name, tensor)
    q, k, v = qkv
    if k.offsets() is not v.offsets() and (not k.offsets().is_cpu or not torch.equal(k.offsets(), v.offsets())):
        raise SpecError(
            "v: expected the offsets of k, because each key has one value; build it with "
            "torch.nested.nested_tensor_from_jagged(v.values(), k.offsets())"
        )
    queries = q.offsets().int()
    keys = queries if q.offsets() is k.offsets() else k.offsets().int()
    return (q.values(), k.values(), v.values()), SeqInfo(queries, keys, _longest("q", q), _longest("k", k))


def _check_jagged(name: str, tensor: NestedTensor) -> None:
    """Checks the structure of one NestedTensor."""
    if tensor.dim() != 4 or tensor._ragged_idx != 1:
        axes = f"{tensor.dim()} axes, axis {tensor._ragged_idx} of batch, seq, heads, head_dim ragged"
        raise ShapeError(
            f"{name}: expected four axes, the ragged one in the place of seq: [batch, ragged, heads, head_dim], "
            f"or with layout='bhsd' [batch, heads, ragged, head_dim]; got {axes}; layout= says where the heads are"
        )
    if tensor.lengths() is not None:
        raise SpecError(f"{name}: expected rows without holes between them; pass {name}.contiguous()")


def _longest(name: str, tensor: NestedTensor) -> int:
    """Returns the longest row, which torch keeps with the tensor; on the CPU it is computed if it is unknown.

    While compiling its value cannot be read, so all tokens are the limit, and the op reads the lengths when it runs.

    Raises:
        SpecError: on a GPU if it is unknown, because reading the offsets would wait for the device.
    """
    known = tensor._maybe_max_seqlen
    if known is None and tensor.offsets().is_cpu:
        known = tensor.values().shape[0] if torch.compiler.is_compiling() else tensor._get_max_seqlen()
    if known is None:
        raise SpecError(
            f"{name}: expected a NestedTensor that knows its longest row, because reading offsets on {tensor.device} "
            "waits for it on every call; pass min_seqlen= and max_seqlen= to torch.nested.nested_tensor_from_jagged, "
            "or build it by torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    return known
