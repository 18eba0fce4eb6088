"""Attention as a torch module, with the same options under the same names as the Flax layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import LayerKeywords
from attn_core.call.kinds import check_kind
from attn_core.call.layers import (
    IN_PAGES,
    ON_ROWS,
    OVER_RANKS,
    HeadSizes,
    check_features,
    check_layer_inputs,
    check_layer_options,
    check_rotary,
    check_split_heads,
    head_sizes,
    options_of,
    refuse_over_ranks,
    rotary_positions,
)
from attn_core.call.options import Door, names_at
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import DeviceError, SpecError
from attn_core.paged.step import Pages, Step, check_paged_layer
from torch_frontend.attention import attention as public_attention
from torch_frontend.context_parallel.layers import ActiveMesh, active_for
from torch_frontend.dispatch.plan import check_tensor
from torch_frontend.dispatch.tensor_kinds import check_data, to_device_of
from torch_frontend.paged.append import append_kv
from torch_frontend.paged.attention import paged_attention
from torch_frontend.recomputed import attention_of_layer as attention

Rotary = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_shared = SharedOptions(public_attention, names_at(Door.LAYER_CALL))


class Attention(nn.Module):
    """Multi-head attention, optionally with grouped key/value heads, on ``torch_frontend.attention``.

    Parameters: ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, each an ``nn.Linear``; and ``sink_logits [heads]``
    when sinks is True.

    Tensor parallelism: ``parallelize_module`` may split the heads over ranks (``ColwiseParallel`` for q_proj, k_proj
    and v_proj, ``RowwiseParallel`` for o_proj). The number of ranks must divide num_heads and num_kv_heads. sink_logits
    must then be a DTensor with ``Shard(0)``.

    Args:
        num_heads, num_kv_heads: query heads, and key/value heads (default: num_heads).
        in_features, in_kv_features: features of x, and of context (default: in_features).
        head_dim, value_dim: channels of q and k (default: ``in_features // num_heads``), and of v (default: head_dim).
        out_features: features of the output (default: in_features).
        use_bias: whether the four projections have biases.
        causal, alignment, window, softcap, scale, backend, invariant: as in ``torch_frontend.attention``.
        sinks: learns one extra logit per head in every row's softmax; it has no value and starts at zero.
        rotary: ``(q, k, positions) -> (q, k)``, applied after the projections; q and k
            ``[batch, seq, heads, head_dim]``, positions int ``[batch, seq]``, counted within each document when packed.
            Its results are cast back to the dtype of the projections. Self-attention only.
        dropout_rate: probability of dropping a softmax weight, while training.
        bitwise_deterministic: the same bits on every run, gradients included: ``deterministic=`` of
            ``torch_frontend.attention``, under the name of the Flax layers.
        device, dtype: the device and dtype of the parameters.
    """

    sink_logits: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = True,
        causal: bool = False,
        alignment: str = "bottom_right",
        window: int | tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        rotary: Rotary | None = None,
        dropout_rate: float = 0.0,
        bitwise_deterministic: bool = False,
        backend: str | tuple[str, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        invariant: str | None = None,
    ) -> None:
        super().__init__()
        sizes = head_sizes(in_features, num_heads, num_kv_heads, head_dim, value_dim)
        self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim = sizes
        self.causal, self.alignment, self.window = causal, alignment, window
        self.softcap, self.scale = softcap, scale
        self.sinks, self.rotary = sinks, rotary
        self.dropout_rate = dropout_rate
        self.bitwise_deterministic, self.backend, self.invariant = bitwise_deterministic, backend, invariant

        check_layer_options(use_bias, sinks, in_kv_features=in_kv_features, out_features=out_features)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_features = in_features
        self.in_kv_features = source = in_features if in_kv_features is None else in_kv_features
        target = in_features if out_features is None else out_features
        self.q_proj = nn.Linear(in_features, sizes.num_heads * sizes.head_dim, bias=use_bias, **factory)
        self.k_proj = nn.Linear(source, sizes.num_kv_heads * sizes.head_dim, bias=use_bias, **factory)
        self.v_proj = nn.Linear(source, sizes.num_kv_heads * sizes.value_dim, bias=use_bias, **factory)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.value_dim, target, bias=use_bias, **factory)
        self.register_parameter("sink_logits", nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None)

    @_shared
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        pages: Pages | None = None,
        **options: Unpack[LayerKeywords[Tensor]],
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Applies the layer.

        Args:
            x: ``[batch, seq, features]``; with seq_info ``[tokens, features]`` or ``[1, tokens, features]``.
            context: the source of keys and values, with x's layout; None for self-attention.
            mask, key_ranges, mask_mod, score_mod, aux, bias, alibi_slopes, seq_info: as in ``attention``.
            q_segment_ids, kv_segment_ids, q_positions, kv_positions: as in ``attention``. Those of keys may be left out
                in self-attention.
            positions: ``[seq]`` or ``[batch, seq]`` for rotary; if omitted, q_positions, or else counted from each
                row's or document's start.
            pages: for decoding, the layer's pool and the step's tables. x then has the new tokens of all sequences,
                ``[tokens, features]``; the layer writes their keys and values into the pool.

        Returns:
            ``[batch, seq, out_features]``, with x's rank; with pages ``(out, (k, v))``, where k and v are the pool,
            followed by its scales if it is quantised.

        Raises:
            SpecError, ShapeError, NoBackendError: the message names the argument, its value and the remedy.
        """
        given, context_parallel = _shared.given(Attention.forward, {**options}), active_for(self)
        if context_parallel is not None:
            inputs = x, context, positions, pages
            context_parallel = context_parallel.tell(self._check_over_ranks, context_parallel, inputs, given)
            seq_info = context_parallel.seq_info
        else:
            check_inputs(x, context, positions, pages)
            if pages is not None:
                return attend_in_pages(self, x, {"context": context, **given}, positions, pages)
            seq_info = SeqInfo.coerce(given.get("seq_info"))
        positions = rotary_positions(positions, given, rotary=self.rotary is not None)
        queries, keys = self._rows(x, context, seq_info, positions)
        q, k, v = self.project(queries, keys)  # [batch, seq, heads, head_dim]
        if self.rotary is not None:
            if positions is None and context_parallel is not None:
                positions = context_parallel.position_ids(q.shape[1], q.device)
            q, k = self.rotary(q, k, token_positions(positions, seq_info, q))
            # Rotary functions with float32 tables return float32, but attention needs one dtype for q, k and v.
            q, k = q.to(v.dtype), k.to(v.dtype)
        dropout = self.dropout_rate if self.training else 0.0
        how = {**given, "sinks": self.sinks_here(), "dropout": dropout, "seq_info": seq_info}
        if context_parallel is not None:
            del how["seq_info"]  # the block has it
            out = context_parallel.attend(q, k, v, **options_of(self, OVER_RANKS), **how)
        else:
            out = attention(q, k, v, trains=self.training, **options_of(self, ON_ROWS), **how)
        out = self.o_proj(out.flatten(-2))  # [batch, seq, heads, value_dim] -> [batch, seq, out_features]
        return out[0] if x.ndim == 2 else out

    def project(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, ``[..., heads, head_dim]``; of this rank's heads if they are split over ranks."""
        q, k, v = self.q_proj(queries), self.k_proj(keys), self.v_proj(keys)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        widths = q.shape[-1], k.shape[-1], v.shape[-1]
        if widths != (heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.value_dim):
            check_split_heads(widths, HeadSizes(heads, kv_heads, self.head_dim, self.value_dim))
            heads, kv_heads = widths[0] // self.head_dim, widths[1] // self.head_dim
        return (
            q.unflatten(-1, (heads, self.head_dim)),
            k.unflatten(-1, (kv_heads, self.head_dim)),
            v.unflatten(-1, (kv_heads, self.value_dim)),
        )

    def sinks_here(self) -> Tensor | None:
        """Returns the sinks; of this rank's heads if they are a DTensor that is split over ranks."""
        to_local = getattr(self.sink_logits, "to_local", None)
        return self.sink_logits if to_local is None else to_local()

    def _check_over_ranks(
        self,
        block: ActiveMesh,
        inputs: tuple[Tensor, Tensor | None, Tensor | None, Pages | None],
        given: dict[str, Any],
    ) -> ActiveMesh:
        """Returns a ``use_context_parallel`` block with the documents of a call; raises for what ranks cannot share."""
        check_inputs(*inputs)
        x, context, positions, pages = inputs
        if pages is not None:
            raise SpecError("pages: expected None in context parallelism, which exchanges keys and values as shards")
        refuse_over_ranks(given, self.invariant)
        block = block.with_documents(SeqInfo.coerce(given.get("seq_info")))
        self._rows(x, context, block.seq_info, positions)
        return block

    def _rows(
        self, x: Tensor, context: Tensor | None, seq_info: SeqInfo | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Checks x and context and returns them as ``[batch, seq, features]``."""
        shape, kv_shape = tuple(x.shape), None if context is None else tuple(context.shape)
        check_layer_inputs(shape, kv_shape, packed=seq_info is not None)
        check_features(shape, kv_shape, self.in_features, self.in_kv_features)
        source = x if context is None else context
        queries, keys = (x[None], source[None]) if x.ndim == 2 else (x, source)
        check_rotary(self, positions, (queries.shape[0], queries.shape[1]), cross=context is not None)
        return queries, keys

    def extra_repr(self) -> str:
        """Returns the sizes and the options that are set."""
        optional = ("window", "softcap", "scale", "backend", "invariant")
        options = [f"{name}={getattr(self, name)}" for name in optional if getattr(self, name) is not None]
        flags = [name for name in ("causal", "sinks", "bitwise_deterministic") if getattr(self, name)]
        heads = f"heads={self.num_heads}/{self.num_kv_heads}, head_dim={self.head_dim}/{self.value_dim}"
        return ", ".join([heads, *flags, *options])


def check_inputs(x: Tensor, context: Tensor | None, positions: Tensor | None, pages: Pages | None) -> None:
    """Checks a layer's inputs before it reads their shapes; all but x may be None.

    Raises:
        TypeError, SpecError, DeviceError: naming the input.
    """
    for name, tensor in (("x", x), ("context", context), ("positions", positions)):
        if tensor is not None or name == "x":
            check_tensor(name, tensor)
    if pages is not None:
        check_kind("pages", pages, Pages, "Pages(k, v, step)")
    if context is not None and context.device != x.device:
        raise DeviceError(f"context: expected the device of x ({x.device}), got {context.device}; move it there")
    check_data(x, context=context, positions=positions)


def token_positions(positions: Tensor | None, seq_info: SeqInfo | None, q: Tensor) -> Tensor:
    """Returns int positions ``[batch, seq]`` for ``q [batch, seq, heads, head_dim]``.

    They are the caller's (``[seq]`` or ``[batch, seq]``), else counted from each row's or document's start.
    """
    if positions is None:
        positions = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        if seq_info is not None:
            starts = to_device_of(q, seq_info.cu_seqlens_q)
            # Search all offsets, not a view of them: a compiled searchsorted may ignore the view's start. The clamp
            # keeps tokens behind the last offset in the last document.
            document = (torch.searchsorted(starts, positions, right=True) - 1).clamp(max=len(starts) - 2)  # [tokens]
            positions = positions - starts[document]
    return positions.expand(q.shape[:2])


def attend_in_pages(
    layer: Attention, x: Tensor, others: dict[str, Any], positions: Tensor | None, pages: Pages
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Writes the keys and values of new tokens ``[tokens, features]`` into the pages, then attends to the pages.

    Args:
        others: the other arguments of the call by name, which must all be None.
    """
    check_paged_layer(tuple(x.shape), layer.alignment, layer.dropout_rate if layer.training else 0.0, others)
    check_features(tuple(x.shape), None, layer.in_features, layer.in_kv_features)
    check_rotary(layer, positions, (1, x.shape[0]))
    q, k, v = layer.project(x, x)  # [tokens, heads, head_dim]
    # The pool may have another dtype than the parameters, and append_kv does not cast. A quantised one takes float32.
    narrow = torch.float32 if v.dtype == torch.float64 else v.dtype
    dtype, pool_dtype, step = v.dtype, pages.k.dtype if pages.k_scales is None else narrow, pages.step
    if layer.rotary is not None:
        places = token_places(step, x) if positions is None else positions
        q, k = (rows[0].to(dtype) for rows in layer.rotary(q[None], k[None], places.reshape(1, -1)))
    append_kv(pages.k, pages.v, k.to(pool_dtype), v.to(pool_dtype), **step.tables, **pages.scales)
    out = paged_attention(
        q.to(pool_dtype),
        pages.k,
        pages.v,
        **step.tables,
        max_len_q=step.max_len_q,
        **options_of(layer, IN_PAGES),
        sinks=layer.sinks_here(),
        **pages.scales,
    )
    return layer.o_proj(out.to(dtype).flatten(-2)), (pages.k, pages.v, *pages.scales.values())


def token_places(step: Step, x: Tensor) -> Tensor:
    """Returns int ``[tokens]``: the position of each new token ``x [tokens, features]`` in its own sequence."""
    lengths = to_device_of(x, step.seq_lens)
    if step.cu_seqlens_q is None:
        return lengths - 1
    offsets = to_device_of(x, step.cu_seqlens_q)
    token = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
    # Tokens behind the last offset belong to no sequence. The clamp only keeps their index in range.
    sequence = (torch.searchsorted(offsets, token, right=True) - 1).clamp(max=len(offsets) - 2)
    return lengths[sequence] - (offsets[sequence + 1] - token)
