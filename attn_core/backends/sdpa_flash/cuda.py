"""torch's own flash attention on NVIDIA GPUs, through its raw ops: a copy of FlashAttention 2 inside torch.

Limits: fp16 and bf16, head_dim up to 256, bottom-right alignment only; no softcap, mask, bias, ALiBi or dropout (the
backward op takes no ALiBi slopes, and dropout would follow the op's own random stream). ``shared.rewrites`` adds
value_dim, sinks and the gradient of the log-sum-exp. The backward adds dq in no fixed order; equal bits on every run
need torch's global switch, which belongs to the caller, so they are not claimed.
Upstream: ``aten::_flash_attention_forward`` and ``_backward``, torch 2.11 to 2.15. Corrections: the log-sum-exp of rows
that see no key (+inf in the op); packed calls with at most one query per document, because the op's fast path for
grouped heads needs exactly one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers, Timing
from attn_core.backends.shared import rewrites
from attn_core.backends.shared.aten_masks import limits, needed_band
from attn_core.backends.shared.autograd import copy_unaligned, without_gradient
from attn_core.backends.shared.readable import readable, readable_rows, writable
from attn_core.backends.support import Build, Support, compute_capability
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload

NAME = "the aten CUDA flash kernel"

FORWARD = Support(
    kernel=NAME,
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
)
BACKWARD = replace(FORWARD, deterministic=False)

SMALL_SHARED_MEMORY = (86, 87, 89, 120, 121)
"""Compute capabilities whose shared memory does not hold the backward's tiles above a head_dim of 192."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses gradients of wide heads on small GPUs, and too large grids."""
    reasons = [*rewrites.refusals(spec), *limits(spec, device, NAME)]
    widest = max(spec.head_dim, spec.value_dim)
    if spec.needs_backward and widest > 192 and compute_capability(device) in SMALL_SHARED_MEMORY:
        reasons.append(f"backward with head_dim={widest} on {device}: {NAME} stops at 192 there")
    return tuple(reasons)


def probe() -> str:
    """Checks that torch has the kernel and returns torch's version."""
    import torch

    _kernels()
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError(f"torch {torch.__version__} was built without flash attention")
    return torch.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the op's arguments, and whether some row may see no key.

    max_q of packed calls is never 1 (see the module's docstring). The kernel only needs an upper bound.
    """
    edge = needed_band(spec)
    plain_causal = edge.left is None and edge.right == 0
    return {
        "max_q": max(2, spec.max_len_q or 0) if spec.packed else spec.q_len,
        "max_k": max(1, spec.max_len_k or 0) if spec.packed else spec.kv_len,
        "is_causal": edge.right == 0,
        "scale": spec.scale,
        "window_size_left": edge.left,
        "window_size_right": None if plain_causal else edge.right,
        "empty_rows": spec.packed or edge.empties_a_row(spec.q_len, spec.kv_len),
    }


@cache
def _kernels() -> tuple[OpOverload, OpOverload]:
    import torch

    return torch.ops.aten._flash_attention_forward.default, torch.ops.aten._flash_attention_backward.default


@cache
def _heads_first_binding() -> Callable[..., Any]:
    """Returns torch's Python binding of the op for ``[batch, heads, seq, dim]``, whose call is shorter than an op's."""
    import torch

    return torch._scaled_dot_product_flash_attention


@cache
def _in_place() -> OpOverload | None:
    """Returns the forward op that stores into the caller's tensor, or None: not every torch has it."""
    import torch

    op = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
    return None if op is None else op.default


def shortcut(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """See ``Backend.shortcut_of``: torch itself attaches the backward op below to this forward op."""
    how = lower(spec)
    # The kernel's log-sum-exp of a row that sees no key is not ours, but its own backward expects it.
    if not rewrites.is_native(KERNEL, spec) or spec.packed or (how["empty_rows"] and spec.return_lse):
        return None
    kernel = _kernels()[0]
    # No offsets, both lengths, dropout, causal or not, and no mask of dropped weights.
    settings = None, None, how["max_q"], how["max_k"], 0.0, how["is_causal"], False
    window = {name: how[name] for name in ("scale", "window_size_left", "window_size_right")}

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = kernel(*readable_rows(q, k, v), *settings, **window)
        copy_unaligned(out)
        return out, lse

    # The other op exchanges the axes around the one above. It has no window, and says where the diagonal is only for
    # queries and keys of equal lengths.
    plain = how["window_size_left"] is None and how["window_size_right"] is None
    if plain and (spec.q_len == spec.kv_len or not how["is_causal"]):
        heads_first_kernel, is_causal, scale = _heads_first_binding(), how["is_causal"], how["scale"]

        def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, *_ = heads_first_kernel(*readable_rows(q, k, v), 0.0, is_causal, False, scale=scale)
            copy_unaligned(out)
            return out, lse

        run.heads_first = heads_first  # type: ignore[attr-defined]
    return run


def run_forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Runs the op, in place if possible. It reshapes one query of grouped heads and returns a view, so not in place."""
    how = lower(spec)
    one_query = spec.q_len == 1 and not spec.packed and spec.group_size > 1
    place = None if into is None or one_query or _in_place() is None else writable(into[0])
    op = _kernels()[0] if place is None else partial(_in_place(), place)  # type: ignore[misc, arg-type]
    q, k, v = (readable(tensor) for tensor in inputs[:3])
    results = op(
        q,
        k,
        v,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        how["max_q"],
        how["max_k"],
        0.0,
        how["is_causal"],
        False,
        scale=how["scale"],
        window_size_left=how["window_size_left"],
        window_size_right=how["window_size_right"],
    )
    out, lse = results[:2] if place is None else (place, results)
    # The op writes +inf for a row that sees no key.
    infinity = float("inf")
    return out, lse.masked_fill(lse == infinity, -infinity) if how["empty_rows"] else lse


def _generator_states(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns states of a random generator in the forward op's format; unused without dropout."""
    import torch

    return q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


def run_backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    into: Gradients | None,
    states_of: Callable[[Tensor], tuple[Tensor, Tensor]] = _generator_states,
) -> Gradients:
    """Runs the op, which allocates its results; ``into`` is unused."""
    import torch

    how = lower(spec)
    if how["empty_rows"]:
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # the forward op's own value for such a row
    q, k, v = (readable(tensor) for tensor in inputs[:3])
    gradients = _kernels()[1](
        readable(dout),
        q,
        k,
        v,
        readable(out),
        lse.contiguous(),
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        how["max_q"],
        how["max_k"],
        0.0,
        how["is_causal"],
        *states_of(inputs.q),
        scale=how["scale"],
        window_size_left=how["window_size_left"],
        window_size_right=how["window_size_right"],
    )
    return Gradients(*gradients)


KERNEL = rewrites.Kernel(run_forward, run_backward, rewrites.whole_eights)
"""The kernel that ``shared.rewrites`` completes."""
forward = without_gradient(partial(rewrites.forward, KERNEL))
backward = without_gradient(partial(rewrites.backward, KERNEL))


BACKEND = Backend(
    name="sdpa_flash",
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
    writes_into=("forward",),
    # It is torch's copy of the kernel before it.
    preference={"cuda": 50},
    timing=Timing(in_callback=(90.0, 420.0)),
    torch_flag="flash",
    for_cache_rows=True,
)
