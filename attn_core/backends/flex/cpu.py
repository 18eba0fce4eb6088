"""FlexAttention on the CPU: the spec as a score function and a mask function. Forward only.

Limits: no gradient and no dropout. The fused CPU kernel (``torch.compile`` of flex_attention) has no log-sum-exp
output and no float64, so we run the eager form: it writes out the whole score matrix, which MAX_SCORES bounds. Packed
documents run one after another, so that a NaN in one cannot reach another; inside a document, or a batch row, a NaN or
Inf in v reaches every query. bfloat16 and float16 round the softmax weights before the product with v.
Sinks are an epilogue: ``out * sigmoid(lse - sink)`` and ``logaddexp(lse, sink)``.
Upstream: ``torch.nn.attention.flex_attention``, torch 2.11 to 2.15; its log-sum-exp is natural, as ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.contract import Backend, Timing
from attn_core.backends.flex import functions
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.row_blocks import documents
from attn_core.backends.support import Build, Support
from attn_core.call.functions import aux_of
from attn_core.call.masks import Band, band
from attn_core.call.spec import DTYPES, AttentionSpec
from attn_core.call.tensors import Inputs, part_of
from attn_core.expressions.on_torch import TorchFunction, torch_function

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = Support(
    kernel="FlexAttention on CPU",
    devices=("cpu",),
    dtypes=DTYPES,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    mask=True,
    key_ranges=True,
    mask_mod=True,
    score_mod=True,
    bias=True,
    alibi=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
)

MAX_SCORES = 2**26
"""Elements of the score matrix ``[batch, heads, q_len, kv_len]`` that the eager form may write; 256 MiB in float32."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses a score matrix over MAX_SCORES."""
    q_len = spec.q_len if spec.max_len_q is None else spec.max_len_q
    kv_len = spec.kv_len if spec.max_len_k is None else spec.max_len_k
    scores = spec.batch * spec.num_heads * q_len * kv_len
    if scores <= MAX_SCORES:
        return ()
    where = f"q_len {q_len} and kv_len {kv_len} with batch {spec.batch} and {spec.num_heads} heads"
    return (f"{where}: FlexAttention on CPU writes out {scores} scores, more than MAX_SCORES ({MAX_SCORES})",)


def probe() -> str:
    """Imports FlexAttention's symbols and returns torch's version."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    _ = (AuxRequest, create_block_mask, flex_attention)
    return torch.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns flex_attention's scale and enable_gqa, and the parts of its score and mask functions, in order."""
    score = {"softcap": spec.softcap, "score_mod": spec.score_mod, "bias": spec.bias_shape, "alibi": spec.alibi_shape}
    mask = {
        "band": spec.causal or spec.window != (None, None),
        "mask": spec.mask_shape,
        "ranges": spec.key_ranges_shape,
        "mask_mod": spec.mask_mod,
    }
    return {
        "scale": spec.scale,
        "enable_gqa": spec.group_size > 1,
        "score": tuple(name for name, used in score.items() if used),
        "mask": tuple(name for name, used in mask.items() if used),
    }


@without_gradient
def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs."""
    import torch

    # flex_attention's tracer keeps its operands alive; a caller's buffers must not outlive the call.
    inputs = Inputs(*(None if tensor is None else tensor.clone() for tensor in inputs))
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", enabled=False))  # flex_attention would cast q, k, v to its dtype
        stack.enter_context(_vmap_allowed())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = inputs.q.new_zeros((spec.batch, spec.q_len, spec.num_heads, spec.value_dim))
        lse = out.new_full((spec.batch, spec.num_heads, spec.q_len), -torch.inf, dtype=getattr(torch, spec.lse_dtype))
        for piece in _pieces(spec, inputs):
            part, part_lse = _attend(spec, inputs, piece)
            out[:, piece.rows] = part.transpose(1, 2)  # [batch, heads, rows, dim] -> [batch, rows, heads, dim]
            lse[:, :, piece.rows] = part_lse
    return (out[0], lse[0]) if spec.packed else (out, lse)


def _vmap_allowed() -> AbstractContextManager[object]:
    """Lets ``vmap`` work inside the block, also under a dispatch mode (a flop counter, a tracer).

    flex_attention uses vmap, and torch excludes vmap's dispatch keys while such a mode runs an operation.
    """
    import torch

    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return nullcontext()
    for name in ("Batched", "VmapMode", "GradWrapper", "DynamicLayerFrontMode", "DynamicLayerBackMode"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, f"FuncTorch{name}"))
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(include, exclude)
    return guard


class _Piece(NamedTuple):
    """The whole call or one of its documents: query tokens, key tokens and band."""

    rows: slice
    keys: slice
    edge: Band


def _pieces(spec: AttentionSpec, inputs: Inputs) -> Iterator[_Piece]:
    """Yields the pieces that have both queries and keys. Rows outside them see no key."""
    if not spec.packed:
        yield _Piece(slice(0, spec.q_len), slice(0, spec.kv_len), band(spec))
        return
    for document in documents(spec, inputs.cu_seqlens_q.numpy(), inputs.cu_seqlens_k.numpy()):
        yield _Piece(*document, band(spec, *document.lengths))


def _attend(spec: AttentionSpec, inputs: Inputs, piece: _Piece) -> tuple[Tensor, Tensor]:
    """Calls flex_attention once. Returns out ``[batch, heads, rows, value_dim]`` and lse ``[batch, heads, rows]``."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    how = lower(spec)
    # [batch, length, heads, dim] -> [batch, heads, length, dim]; packed has no batch axis
    q, k, v = (tensor.detach() for tensor in (inputs.q, inputs.k, inputs.v))  # raises if one requires a gradient
    q, k, v = (tensor[None] if spec.packed else tensor for tensor in (q, k, v))
    q, k, v = (part.transpose(1, 2) for part in (q[:, piece.rows], k[:, piece.keys], v[:, piece.keys]))
    mask_function = _mask_function(spec, inputs, piece)
    block_mask = None
    if mask_function is not None:
        tables = spec.mask_shape, spec.key_ranges_shape, spec.mask_mod
        alike = all(table is None for table in tables)  # all rows and heads see the same keys
        batch, heads = (None, None) if alike else (spec.batch, spec.num_heads)
        block_mask = create_block_mask(mask_function, batch, heads, q.shape[2], k.shape[2], device="cpu")
    out, extra = flex_attention(
        q,
        k,
        v,
        score_mod=_score_function(spec, inputs, piece),
        block_mask=block_mask,
        scale=how["scale"],
        enable_gqa=how["enable_gqa"],
        return_aux=AuxRequest(lse=True),
    )
    lse: Any = extra.lse
    return (out, lse) if not spec.sinks else functions.with_sinks(out, lse, inputs.sinks)


def _mask_function(spec: AttentionSpec, inputs: Inputs, piece: _Piece) -> functions.Reader | None:
    """Returns ``(batch, head, row, column) -> visible``, each a scalar tensor."""
    edge, ranges = piece.edge, inputs.key_ranges
    ends = None if ranges is None else ranges[:, :, piece.keys].flatten(3)[:, :, None].unbind(4)
    in_ranges = functions.range_reader(ends, spec.group_size, piece.rows.start)
    mask = functions.reader(part_of(inputs.mask, piece.rows, piece.keys))
    distance = functions.distance_function(edge.offset)
    others = (
        in_ranges,
        None if spec.mask_mod is None else partial(_apply, torch_function(spec.mask_mod), inputs, piece, None),
    )
    return functions.mask_function(mask, edge.left, edge.right, distance, None, others)


def _apply(changes: TorchFunction, inputs: Inputs, piece: _Piece, score: Tensor | None, *place: Tensor) -> Tensor:
    """Returns the value of a function of the call at (batch, head, row, column) of the piece."""
    b, h, row, column = place
    return changes.function(score, b, h, row + piece.rows.start, column + piece.keys.start, aux_of(inputs))


def _score_function(spec: AttentionSpec, inputs: Inputs, piece: _Piece) -> Callable[..., Tensor] | None:
    """Returns ``(score, batch, head, row, column) -> score`` with softcap, then bias and ALiBi."""
    import torch

    wide = getattr(torch, spec.lse_dtype)
    bias = functions.reader(part_of(inputs.bias, piece.rows, piece.keys), wide)
    slope = functions.slope_reader(inputs.alibi_slopes, wide)
    distance = functions.distance_function(piece.edge.offset)
    score_mod = None if spec.score_mod is None else partial(_apply, torch_function(spec.score_mod), inputs, piece)
    return functions.score_function(spec.softcap, bias, slope, distance, score_mod)


BACKEND = Backend(
    name="flex",
    framework="torch",
    requires="torch>=2.11",
    forward_claims=FORWARD,
    backward_claims=None,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=None,
    # It writes out all scores, so plain operations come before it.
    preference={"cpu": 40},
    also_called={"flex_attention": 10},
    timing=Timing(caution=1.3, compiles_for_seconds=True),  # as on GPUs
)
