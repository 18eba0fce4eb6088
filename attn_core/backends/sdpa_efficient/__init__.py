"""torch's memory-efficient attention on NVIDIA GPUs, by its raw ops: the cutlass kernel that xformers began with.

Limits: sm50 and later, bfloat16 from sm80 on; causal windows only; no softcap, ALiBi or dropout; packed documents
without mask, bias or window. A bias must be representable in q's dtype, which the kernel requires: we do not round the
caller's numbers. A boolean mask becomes an additive one of 0 and -inf, exact in any dtype. float32 products are 3xTF32
from sm80 on. We ran it on sm90 alone; older GPUs have the same sources, compiled for other instructions.
Grouped k and v are expanded, because the kernel needs equal heads; the groups' dk and dv are summed in float32.
``shared.rewrites`` adds sinks and the gradient of the log-sum-exp.
Upstream: ``aten::_efficient_attention_forward`` and ``_backward``, torch 2.11 to 2.15. Corrections: the log-sum-exp of
rows that see no key (0 in the kernel) and its padding to 32 rows; query rows before (or after) all keys, which the
kernel leaves unwritten or, bottom-right, unmasked (pytorch#193632), are cut off or moved into documents of their own;
the kernel does not write the bias's gradient where causal hides whole tiles, so it is zeroed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers
from attn_core.backends.sdpa_efficient import operands as tensors
from attn_core.backends.shared import aten_masks, kernel_limits, rewrites
from attn_core.backends.shared.autograd import copy_unaligned, without_gradient
from attn_core.backends.shared.readable import readable_rows
from attn_core.backends.shared.rewrites import whole_eights
from attn_core.backends.support import Build, Support
from attn_core.call.masks import Band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

NAME = "the aten memory-efficient kernel"

FORWARD = Support(
    kernel=NAME,
    devices=("cuda",),
    dtypes=("float32", "bfloat16", "float16"),
    max_head_dim=512,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    mask=True,
    bias=True,
    bias_gradient=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
)
BACKWARD = replace(FORWARD)

NO_MASK, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
"""The kernel's custom_mask_type."""
MOST_PADDING = 16
"""The most elements of a packed, padded log-sum-exp, in multiples of the number of tokens."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses unsupported windows, biases it would round, masks of packed documents, and int32 overflows."""
    # In the launch grid, each half of a split document is a sequence of its own.
    documents = 2 * spec.documents if spec.documents and _splits(spec) else spec.documents
    reasons = [*rewrites.refusals(spec), *aten_masks.limits(spec, device, NAME, documents, oldest=50)]
    reasons += kernel_limits.bfloat16(spec, device, NAME)
    edge = aten_masks.needed_band(spec)
    if edge.left is not None or edge.right is not None:
        reasons += _band_refusals(spec, edge)
    extras = {f"mask of shape {list(spec.mask_shape or ())}": spec.mask_shape}
    extras |= {f"bias of shape {list(spec.bias_shape or ())}": spec.bias_shape}
    if spec.packed:
        reasons += [f"{what} with packed documents: {NAME} has none" for what, shape in extras.items() if shape]
    if spec.rounds_bias:
        reasons.append(f"bias in {spec.bias_dtype} with {spec.dtype}: {NAME} would round it to {spec.dtype}")
    return (*reasons, *_size_refusals(spec), *_packed_refusals(spec))


def _packed_refusals(spec: AttentionSpec) -> tuple[str, ...]:
    """Refuses documents so unequal that a log-sum-exp padded to the longest would dwarf the tokens."""
    if not spec.documents or spec.documents * (spec.max_len_q or 0) <= MOST_PADDING * max(spec.q_len, 4096):
        return ()
    sizes = f"{spec.documents} documents of up to {spec.max_len_q} queries in {spec.q_len} tokens"
    return (f"{sizes}: {NAME} pads the log-sum-exp of each to the longest",)


def _band_refusals(spec: AttentionSpec, edge: Band) -> list[str]:
    """Refuses bands that are no causal windows, and windows of packed documents."""
    if edge.right != 0:
        return [f"window={spec.window}: {NAME} has causal windows only"]
    if edge.left is not None and spec.packed:
        return [f"window={spec.window} with packed documents: {NAME} has none"]
    return []


def _size_refusals(spec: AttentionSpec) -> list[str]:
    """Refuses tensors beyond the kernel's int32 addresses."""
    widest = max(whole_eights(spec.head_dim), whole_eights(spec.value_dim))
    if max(spec.q_len, spec.kv_len) * spec.num_heads * widest < tensors.ADDRESSES:
        return []
    what = f"q_len {spec.q_len} and kv_len {spec.kv_len} with {spec.num_heads} heads of {widest}"
    return [f"{what}: {NAME} addresses fewer than 2**31 elements"]


def probe() -> str:
    """Checks that torch has the kernel and returns torch's version."""
    import torch

    _kernels()
    if torch.version.cuda is None:
        raise ImportError(f"torch {torch.__version__} was built without CUDA")
    return torch.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the ops' arguments, the query ``rows`` that the kernel computes, and whether documents are split.

    num_splits_key 1 makes the backward deterministic. Packed documents without causal need it as well: other numbers
    divide by the number of a document's queries, which may be 0.
    """
    edge = aten_masks.needed_band(spec)
    first, stop = 0, spec.q_len
    if edge.right is not None and not spec.packed:  # leave out queries that see no key at either end of the rows
        first = max(0, -edge.offset)
        stop = stop if edge.left is None else min(stop, spec.kv_len - edge.offset + edge.left)
    mask_type = NO_MASK
    if edge.right is not None:
        square = spec.alignment == "top_left" if spec.packed else edge.offset + first == 0
        mask_type = TOP_LEFT if square else BOTTOM_RIGHT
    one_split = spec.deterministic or (spec.packed and mask_type == NO_MASK)
    return {
        "rows": slice(first, stop),
        # The caller's limit may exceed the tokens, and the padded log-sum-exp grows with it.
        "max_q": max(1, min(spec.max_len_q or 0, spec.q_len)) if spec.packed else None,
        "max_k": max(1, min(spec.max_len_k or 0, spec.kv_len)) if spec.packed else None,
        "custom_mask_type": mask_type,
        "scale": spec.scale,
        "window_size": None if edge.left is None else edge.left + 1,  # it counts the query's own key
        "num_splits_key": 1 if one_split else None,
        "split_documents": _splits(spec),
    }


def _splits(spec: AttentionSpec) -> bool:
    """Returns whether each packed document becomes two for the kernel; see ``operands.split_at_first_key``."""
    return spec.packed and spec.alignment == "bottom_right" and aten_masks.needed_band(spec).right is not None


@cache
def _kernels() -> tuple[OpOverload, OpOverload]:
    import torch

    return torch.ops.aten._efficient_attention_forward.default, torch.ops.aten._efficient_attention_backward.default


def shortcut(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """See ``Backend.shortcut_of``: torch itself attaches the backward op below to this forward op."""
    how = lower(spec)
    whole = how["rows"] == slice(0, spec.q_len)
    # torch's derivative passes on neither a window nor a number of splits, and leaves parts of the bias's gradient
    # unwritten under causal. The kernel's log-sum-exp of rows that see no key is not ours.
    unlike = spec.needs_backward and (how["window_size"] is not None or spec.deterministic)
    unlike = unlike or (spec.bias_gradient and how["custom_mask_type"] != NO_MASK)
    has_bias = aten_masks.explicit(spec)
    if not rewrites.is_native(KERNEL, spec) or spec.packed or unlike or not whole or (has_bias and spec.return_lse):
        return None
    kernel, mask_type, scale, window = _kernels()[0], how["custom_mask_type"], spec.scale, how["window_size"]
    group, rows = spec.group_size, spec.q_len
    prepared = tensors.added_of(spec) if has_bias else None

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = readable_rows(q, k, v, tensors.is_addressable)
        if group > 1:
            k, v = tensors.for_each_head(k, group), tensors.for_each_head(v, group)
        added = prepared(mask, bias) if prepared else None
        out, lse, *_ = kernel(
            q, k, v, added, None, None, None, None, 0.0, mask_type, True, scale=scale, window_size=window
        )
        copy_unaligned(out)
        return out, lse[..., :rows]

    return run


def _forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Runs the op, which allocates its results; ``into`` is unused."""
    how = lower(spec)
    operands = tensors.operands(spec, how, inputs)
    out, raw, *_ = _kernels()[0](
        operands.q,
        operands.k,
        operands.v,
        operands.bias,
        operands.cu_seqlens_q,
        operands.cu_seqlens_k,
        how["max_q"],
        how["max_k"],
        0.0,
        how["custom_mask_type"],
        True,
        scale=how["scale"],
        window_size=how["window_size"],
    )
    return tensors.results(spec, how, operands, out, raw)


def _backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, into: Gradients | None
) -> Gradients:
    """Returns the gradients by torch's op. The order of its arguments is torch's."""
    import torch

    how = lower(spec)
    operands = tensors.operands(spec, how, inputs)
    saved = tensors.backward_operands(spec, how, operands, out, lse, dout)
    random_state = inputs.q.new_empty((), dtype=torch.int64)  # required by the op, unused without dropout
    gradients = _kernels()[1](
        saved.dout,
        operands.q,
        operands.k,
        operands.v,
        operands.bias,
        saved.out,
        operands.cu_seqlens_q,
        operands.cu_seqlens_k,
        # The forward takes None for a dense call; the backward takes lengths always.
        how["max_q"] or operands.q.shape[1],
        how["max_k"] or operands.k.shape[1],
        saved.lse,
        0.0,
        random_state,
        random_state,
        how["custom_mask_type"],
        spec.bias_gradient,
        scale=how["scale"],
        num_splits_key=how["num_splits_key"],
        window_size=how["window_size"],
    )
    return tensors.gradients(spec, how, operands, inputs, gradients)


KERNEL = rewrites.Kernel(_forward, _backward, rewrites.whole_eights, same_width=False)
"""The kernel that ``shared.rewrites`` completes."""
forward = without_gradient(partial(rewrites.forward, KERNEL))
backward = without_gradient(partial(rewrites.backward, KERNEL))


BACKEND = Backend(
    name="sdpa_efficient",
    framework="torch",
    requires="torch>=2.11 with CUDA",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    shortcut=shortcut,
    # It runs float32, masks and biases for which faster kernels are missing.
    preference={"cuda": 70},
    also_called={
        "sdpa": 20,
        "efficient_attention": 10,
        "mem_efficient": 10,
        "efficient": 10,
        "cutlass": 10,
        "native": 20,
        "torch": 20,
    },
    torch_flag="mem_efficient",
)
