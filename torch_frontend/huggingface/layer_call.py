"""LayerCall: what a mask and the other arguments of a transformers layer mean for the attention call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch

from attn_core.backends.shared import aten_masks
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import mask_or_bias
from attn_core.errors import ShapeError, SpecError
from torch_frontend.dispatch.plan import check_tensor, smaller
from torch_frontend.huggingface.described_mask import NEED_FLOATS, DescribedMask, Mask, VisibleKeys, needs_floats

Tensor = torch.Tensor


class LayerCall(NamedTuple):
    """Options and tables of a layer's attention call. The layers of a model that have one mask share them.

    Attributes:
        causal, window, alignment: as in ``torch_frontend.attention``.
        seen: the number of keys that the call reads, the first ones; None for all.
        mask, bias: broadcast to ``[batch, heads, q_len, kv_len]``, or None.
        seq_info: the documents of all rows laid end to end, or None.
        positions: returns the position ids that ``seq_info`` depends on, a weak reference; or None if it depends on
            none.
        key_ranges: of the rows, in numpy, or None.
    """

    causal: bool
    window: tuple[int | None, int | None] | None
    alignment: str = "bottom_right"
    seen: Any = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    seq_info: SeqInfo | None = None
    positions: Callable[[], Tensor | None] | None = None
    key_ranges: np.ndarray | None = None


def prepare(
    module: torch.nn.Module,
    attention_mask: Mask,
    lengths: tuple[int, int, int],
    *,
    is_causal: bool | None,
    sliding_window: int | None,
    bias: Tensor | None,
    info: SeqInfo | None,
    position_ids: Tensor | None,
    has_promise: bool = False,
) -> LayerCall:
    """Returns the call that a layer's arguments describe.

    Args:
        lengths: (batch, q_len, kv_len).
        bias: the layer's position bias; info: the documents that its offsets describe.
        has_promise: whether the call has ``invariant``.
    """
    batch, queries, keys = lengths
    visible, mask, added = split_mask(attention_mask, module, is_causal, sliding_window, (queries, keys))
    if added is not None:
        bias = added if bias is None else added + bias
    info, positions = info or visible.seq_info, None
    if info is None and position_ids is not None:
        info = documents_from_positions(position_ids, batch, visible, attention_mask)
        positions = ref(position_ids) if counts_positions(visible) else None
    if info is not None:
        call = join_rows(visible, mask, bias, info, batch)
    else:
        call = cut_keys(visible, mask, bias, has_promise)
    return call if positions is None else call._replace(positions=positions)


def read_table(module: torch.nn.Module, table: Tensor, queries: int, keys: int) -> LayerCall | None:
    """Returns the call of a layer with a dense bool mask alone, or None if ``prepare`` must check the mask."""
    if table.layout is not torch.strided or table.is_nested or table.dim() != 4:
        return None
    if getattr(getattr(module, "config", None), "model_type", None) in NEED_FLOATS:  # no function: every layer asks
        return None
    # There is no band to align, but equal calls need equal arguments.
    return LayerCall(False, None, "bottom_right" if queries == keys else "top_left", mask=table)


def of_prompt(call: LayerCall) -> LayerCall:
    """Returns a call of one query, whose mask says what it sees, as the last of a causal prompt: it sees the same."""
    if call.causal or call.mask is None or call.key_ranges is not None:
        return call
    return call._replace(causal=True, alignment="bottom_right")


def share(
    call: LayerCall,
    described: DescribedMask,
    lengths: tuple[int, int, int],
    sliding_window: int | None,
    position_ids: Tensor | None,
) -> None:
    """Keeps a call for the layers with the same mask, unless it depends on position ids that were not readable."""
    if call.mask is not None:
        aten_masks.keep_additive(call.mask)  # one row of keys
    if call.positions is None and described.visible.seq_info is None and counts_positions(described.visible):
        call = call._replace(positions=_no_positions)
    elif call.positions is not None and (position_ids is None or not are_readable(position_ids, *lengths[:2])):
        return
    described.shared[(*lengths[1:], sliding_window)] = call


def _no_positions() -> None:
    """Stands for position ids in a call that had none."""


def cut_keys(visible: VisibleKeys, mask: Tensor | None, bias: Tensor | None, has_promise: bool = False) -> LayerCall:
    """Returns a call on the keys up to the last query of a causal call.

    Keys behind the last query are the unused rest of a static cache. Padding becomes a mask of keys.
    """
    if visible.key_ranges is not None:
        square = visible.lengths[0] == visible.lengths[1]
        return LayerCall(
            False, None, "bottom_right" if square else "top_left", bias=bias, key_ranges=visible.key_ranges
        )
    queries, kv_len = visible.lengths
    keys, alignment = visible.keys, "bottom_right"
    causal, left, compiling = visible.right == 0, visible.left, torch.compiler.is_compiling()
    seen: Any = visible.offset + queries
    first = compiling and causal and visible.offset == 0  # no comparison: lengths may be symbols
    if first:
        seen = smaller(seen, kv_len)
    cut = first or (causal and seen < kv_len)
    if cut:
        keys, bias = (None if table is None else table[..., :seen] for table in (keys, bias))
    if first or (seen != kv_len and not cut):
        alignment = "top_left"  # the offset is 0, or there is no band to align
    if keys is not None:
        mask = keys[:, None, None, :]  # [batch, 1, 1, kv_len]; a described mask has no other mask
    # With a promise a token stays in the call of its prompt, because a backend may have other bits without the band.
    plain = not compiling and not has_promise
    if plain and queries == 1 and causal and seen <= kv_len and (left is None or left >= seen - 1):
        causal, left = False, None  # a single query at the last key sees all keys, so there is no band to compute
    return LayerCall(causal, _window(left, visible.right), alignment, seen if cut else None, mask, bias)


def join_rows(visible: VisibleKeys, mask: Tensor | None, bias: Tensor | None, info: SeqInfo, batch: int) -> LayerCall:
    """Returns a call on the rows of the batch laid end to end, as one row of packed documents.

    Raises:
        SpecError: for several rows with a mask or a bias.
    """
    if visible.key_ranges is not None:
        raise SpecError("attention_mask: expected no blocks of tokens that see each other with packed rows")
    if batch > 1 and (mask is not None or bias is not None):
        raise SpecError("attention_mask, position_bias: expected none of 4 axes with packed rows, or a single row")
    if visible.keys is not None:
        mask = visible.keys.reshape(1, 1, 1, -1)  # [1, 1, 1, batch * kv_len]
    return LayerCall(visible.right == 0, _window(visible.left, visible.right), mask=mask, bias=bias, seq_info=info)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """Returns attention's window, where ``causal`` says what a right distance of 0 would."""
    right = None if right == 0 else right
    return None if left is None and right is None else (left, right)


def split_mask(
    attention_mask: Mask,
    module: torch.nn.Module,
    is_causal: bool | None,
    sliding_window: int | None,
    lengths: tuple[int, int],
) -> tuple[VisibleKeys, Tensor | None, Tensor | None]:
    """Returns ``attention_mask`` as (VisibleKeys, bool mask, additive bias).

    A mask alone decides what is visible, as in ``eager`` attention. Without a mask the other arguments decide.
    """
    if isinstance(attention_mask, DescribedMask):
        visible = attention_mask.visible
        if visible.lengths != lengths:
            raise ShapeError(f"attention_mask: built for (q, kv) lengths {visible.lengths}, got {lengths}")
        check_window(visible, sliding_window)
        return visible, None, None
    if attention_mask is None:
        return without_mask(module, is_causal, sliding_window, lengths), None, None
    if not isinstance(attention_mask, Tensor):
        raise SpecError(f"attention_mask: expected a tensor of 4 axes or None, got {type(attention_mask).__name__}")
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 4:
        raise ShapeError(f"attention_mask: expected [batch, heads, q, kv], got {list(attention_mask.shape)}")
    mask, bias = mask_or_bias("attention_mask", attention_mask)
    if mask is not None and needs_floats(getattr(module, "config", None)):
        raise SpecError(
            "attention_mask: expected floats, 0 for a visible key and -inf for a hidden one, got a bool mask of 4 "
            f"axes: {type(module).__name__} appends columns of 0 and -inf to it; or pass [batch, tokens]"
        )
    return VisibleKeys(None, None, 0, lengths), mask, bias


def without_mask(
    module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None, lengths: tuple[int, int]
) -> VisibleKeys:
    """Returns what the module's ``is_causal`` (or the argument) and ``sliding_window`` make visible.

    The alignment is that of transformers' SDPA attention: the first query at the first key, a single one at the last.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sliding_window is not None and not causal:
        raise SpecError(f"sliding_window={sliding_window}: expected a mask or causal attention")
    # The window counts the query's own key, left only the keys before it.
    left = None if sliding_window is None else sliding_window - 1
    return VisibleKeys(left, 0 if causal else None, lengths[1] - 1 if lengths[0] == 1 else 0, lengths)


def check_window(visible: VisibleKeys, sliding_window: int | None) -> None:
    """Raises SpecError if a causal mask and the layer's ``sliding_window`` contradict each other."""
    whole = visible.context is None  # a window wider than a shard may still hide keys of the row
    # A window that is at least as long as the row hides nothing, so the mask need not have it.
    if sliding_window is None or visible.right != 0 or (whole and sliding_window >= visible.lengths[1]):
        return
    if visible.left != sliding_window - 1:
        shown = "no window" if visible.left is None else f"a window of {visible.left + 1} keys"
        raise SpecError(f"sliding_window={sliding_window}: the model's mask has {shown}; they must agree")


def documents_from_numbers(numbers: Tensor) -> SeqInfo:
    """Returns the documents of all rows laid end to end, from each token's document number ``[batch, tokens]``."""
    table = numbers.cpu().numpy()
    return _documents_from_starts(table[:, 1:] != table[:, :-1])


def documents_from_offsets(cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> SeqInfo | None:
    """Returns the documents of ``cu_seq_lens_q/k`` and ``max_length_q/k``, or None if both offsets are None."""
    arguments = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_length_q": max_q, "max_length_k": max_k}
    if cu_q is None and cu_k is None:
        return None
    missing = [name for name, value in arguments.items() if value is None]
    if missing:
        raise SpecError(f"{', '.join(missing)}: expected all of {', '.join(arguments)}, or none")
    offsets_q = cu_q.to(torch.int32)
    offsets_k = offsets_q if cu_k is cu_q else cu_k.to(torch.int32)
    longest_q, longest_k = (int(length) if isinstance(length, Tensor) else length for length in (max_q, max_k))
    return SeqInfo(offsets_q, offsets_k, longest_q, longest_k)


def documents_from_positions(position_ids: Tensor, batch: int, visible: VisibleKeys, mask: Mask) -> SeqInfo | None:
    """Returns the documents of causal rows whose ``position_ids [batch or 1, tokens]`` restart, or None.

    Positions count only for causal self-attention of whole rows without padding. Layers that share a mask read the
    values once, because a read waits for the GPU. Nothing is read while compiling.
    """
    if not counts_positions(visible) or not are_readable(position_ids, batch, visible.lengths[0]):
        return None
    if not isinstance(mask, DescribedMask):
        return _read_documents(position_ids, batch)
    # Weak, so that the mask keeps no position ids alive. By identity, so that other position ids are read again.
    if mask.position_documents is None or mask.position_documents[0]() is not position_ids:
        mask.position_documents = ref(position_ids), _read_documents(position_ids, batch)
    return mask.position_documents[1]


def counts_positions(visible: VisibleKeys) -> bool:
    """Returns whether position ids may describe documents: in causal self-attention of whole rows without padding."""
    queries, keys = visible.lengths
    return visible.right == 0 and visible.keys is None and queries == keys and queries != 1


def are_readable(position_ids: Tensor, batch: int, tokens: int) -> bool:
    """Returns whether there is one position per token (M-RoPE has three) and its value can be read now."""
    if torch.compiler.is_compiling() or tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        return False
    if type(position_ids) is not Tensor or position_ids.is_meta:
        return False
    return not (position_ids.is_cuda and torch.cuda.is_current_stream_capturing())


def _read_documents(position_ids: Tensor, batch: int) -> SeqInfo | None:
    """Returns the documents of rows whose positions rise by 1 or restart at the row's first position, else None.

    Positions that jump, or repeat on padding, do not describe documents.
    """
    table = position_ids.to("cpu", torch.float64).numpy()  # numpy has no bfloat16
    restarts = table[:, 1:] == table[:, :1]
    if not restarts.any() or not (restarts | (np.diff(table, axis=1) == 1)).all():
        return None
    return _documents_from_starts(np.broadcast_to(restarts, (batch, restarts.shape[1])))


def _documents_from_starts(restarts: np.ndarray) -> SeqInfo:
    """Returns the documents of all rows laid end to end; ``restarts [batch, tokens - 1]`` marks starts inside a row."""
    starts = np.concatenate([np.ones((len(restarts), 1), bool), restarts], axis=1).reshape(-1)
    bounds = np.append(np.flatnonzero(starts), starts.size)
    return SeqInfo.from_lengths(np.diff(bounds).tolist())
