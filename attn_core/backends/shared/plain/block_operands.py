"""The tensors that attention in torch operations reads and writes, in the layouts of its blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attn_core.backends.shared.parts.row_blocks import RowBlock
from attn_core.call.arithmetic import may_be_large
from attn_core.call.functions import aux_of, has_functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

FEW_ROWS = 2**10
"""A call of so few query rows does not read its inputs to learn whether they are finite; see BlockOperands.bounded."""
NARROW = 512
"""The most keys of a row in a narrow window, beside its own."""
WINDOW_BLOCK = 64
"""The most query rows on a CPU with a narrow window: fewer keys of a block are hidden than with more rows."""
LOG2E = math.log2(math.e)
LARGEST = 1e30
"""Products of norms below this cannot overflow in float32."""


class ScoreMemory:
    """Memory that all blocks of a call use in turn. The first write to new memory takes as long as a matrix product."""

    def __init__(self, like: Any, size: int) -> None:
        self._like, self._size = like, size
        self._tensors: dict[str, Any] = {}

    def part(self, name: str, *shape: int) -> Any:
        """Returns an uninitialised tensor, which shares its memory with earlier ones of the name."""
        wanted = math.prod(shape)
        memory = self._tensors.get(name)
        if memory is None or memory.shape[0] < wanted:
            memory = self._tensors[name] = self._like.new_empty(max(wanted, self._size))
        return memory[:wanted].view(shape)


class BlockOperands(NamedTuple):
    """The call's tensors in the layouts that the blocks read.

    q: the caller's, ``[batch, q_len, heads, head_dim]``. k, v: ``[batch, kv_heads, kv_len, dim]``, accumulation dtype;
        contiguous but with a narrow window.
    mask, bias: ``[batch, kv_heads, group, q_len, kv_len]``; any axis may be 1. slopes, sinks: the last two axes are 1.
    key_ranges: int32 ``[batch or 1, kv_heads or 1, 1, kv_len, ranges, 2]``, the starts of a range contiguous.
    aux: the arrays of the call's functions.
    bounded: whether no hidden score, weight or gradient can be NaN, so that hidden scores may be set by an addition.
    scratch: where the blocks write their scores; None for new tensors.
    unit: what scores are multiplied by: log2(e), because exp2 takes half the time of exp on a CPU, or 1 where a score
        may be so large that its multiple overflows.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    slopes: Any
    sinks: Any
    rng: Any
    bounded: bool
    key_ranges: Any = None
    aux: tuple[Any, ...] = ()
    scratch: ScoreMemory | None = None
    unit: float = LOG2E


class SavedTensors(NamedTuple):
    """The forward's results and the incoming gradients, with a batch axis."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any


class Sums(NamedTuple):
    """Running sums of the gradients, in the accumulation dtype and the layouts of BlockOperands.

    dq has q's dtype: each of its rows belongs to one block and is written once.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any
    daux: dict[int, Any] | None = None
    """By the numbers of the aux arrays whose gradient is needed."""


def operands_of(spec: AttentionSpec, inputs: Inputs, saved: SavedTensors | None = None) -> BlockOperands:
    """Brings the call's tensors into the layouts and dtypes of BlockOperands."""
    import torch

    wide = getattr(torch, spec.lse_dtype)
    grouped = (spec.num_kv_heads, spec.group_size)
    q, k, v = (tensor[None] if spec.packed else tensor for tensor in (inputs.q, inputs.k, inputs.v))

    def by_group(table: Any) -> Any:  # [batch, heads or 1, q, kv] -> [batch, kv_heads or 1, group or 1, q, kv]
        return None if table is None else table.unflatten(1, grouped if table.shape[1] > 1 else (1, 1))

    def per_head(values: Any) -> Any:  # [heads] or [batch, heads] -> [batch or 1, kv_heads, group, 1, 1]
        return None if values is None else values.to(wide).reshape(-1, *grouped, 1, 1)

    k, v = (tensor.transpose(1, 2).to(wide) for tensor in (k, v))
    if spec.batch > 1 or not has_narrow_window(spec) or not k.is_cpu or k.stride(3) != 1 or v.stride(3) != 1:
        k, v = k.contiguous(), v.contiguous()  # else too few rows read a key for a copy to be worth its time
    return BlockOperands(
        q=q,
        k=k,
        v=v,
        mask=by_group(inputs.mask),
        bias=by_group(inputs.bias),
        slopes=per_head(inputs.alibi_slopes),
        sinks=per_head(inputs.sinks),
        rng=inputs.rng,
        bounded=is_bounded(spec, inputs, saved),
        key_ranges=_keys_last(inputs.key_ranges),
        aux=aux_of(inputs),
        unit=LOG2E if k.is_cpu or not may_be_large(spec) else 1.0,
    )


def _keys_last(key_ranges: Any) -> Any:
    """Returns key ranges with the axis of the group. In memory the keys come last, because blocks compare rows."""
    if key_ranges is None:
        return None
    return key_ranges.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)[:, :, None]


def has_narrow_window(spec: AttentionSpec) -> bool:
    """Returns whether a row sees so few keys that the work beside the matrix products counts."""
    left, right = spec.window
    right = 0 if spec.causal else right
    return left is not None and right is not None and left + right <= NARROW


def is_bounded(spec: AttentionSpec, inputs: Inputs, saved: SavedTensors | None = None) -> bool:
    """Returns ``BlockOperands.bounded``: True if the norms of the tensors show it, which a large call on a CPU reads.

    Args:
        saved: in a backward, whose gradients count, too.
    """
    import torch

    tables = any((spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.key_ranges_shape, has_functions(spec)))
    if not inputs.q.is_cpu or spec.batch * spec.q_len * spec.num_heads <= FEW_ROWS or tables:
        return False
    norm = torch.linalg.vector_norm
    q, k, v = (float(norm(tensor)) for tensor in inputs[:3])
    factor = max(abs(spec.scale or 1.0), 1.0) / min(spec.softcap or 1.0, 1.0)
    bounded = q * k * factor < LARGEST and v < LARGEST  # False for NaN
    if saved is None or not bounded:
        return bounded
    gradients = [float(norm(tensor)) for tensor in (saved.dout, saved.out, saved.dlse) if tensor is not None]
    return v * max(gradients) < LARGEST and math.isfinite(sum(gradients)) and not bool(saved.lse.isnan().any())


def empty_sums(spec: AttentionSpec, operands: BlockOperands) -> Sums:
    """Returns sums of zeros for the gradients that the call needs."""
    import torch

    dbias = operands.k.new_zeros(operands.bias.shape) if spec.bias_gradient else None
    return Sums(
        dq=torch.zeros_like(operands.q, memory_format=torch.contiguous_format),
        dk=torch.zeros_like(operands.k),
        dv=torch.zeros_like(operands.v),
        dbias=dbias,
        dsinks=torch.zeros_like(operands.sinks) if spec.sinks else None,
        daux={number: operands.k.new_zeros(spec.aux[number].shape) for number in spec.aux_gradients} or None,
    )


def heads_first(spec: AttentionSpec, tensor: Any, block: RowBlock, dtype: Any) -> Any:
    """The block's rows of ``[batch, q_len, heads, dim]`` as ``[batch, kv_heads, group, rows, dim]`` in the dtype."""
    rows = tensor if block.rows == slice(0, tensor.shape[1]) else tensor[:, block.rows]
    shape = (*rows.shape[:2], spec.num_kv_heads, spec.group_size, rows.shape[3])
    return rows.reshape(shape).permute(0, 2, 3, 1, 4).to(dtype).contiguous()


def rows_first(tensor: Any) -> Any:
    """``[batch, kv_heads, group, rows, dim]`` -> ``[batch, rows, heads, dim]``."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)
