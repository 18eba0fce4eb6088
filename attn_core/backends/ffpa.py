"""FFPA: CuTe DSL kernels for heads of 257 to 512 channels on Hopper, from ffpa-attn. The first call of a kind compiles.

Limits: sm90, float16 and bfloat16, bottom-right alignment only; no mask, bias, ALiBi, softcap, dropout or pages, and no
gradient of a window. The kernels run heads of 320, 384, 448 and 512 channels; narrower ones are padded with zeros, so
for heads of up to 256 other kernels are faster.

Conventions: natural log-sum-exp in float32, ``[batch, heads, q_len]`` or ``[heads, tokens]``; rows that see no key have
0 and -inf, and gradients 0. A window is (left, right) with None for an open side. dq, and dk with dv, come from two
kernels without atomics, so all results have equal bits on every run. Packed offsets must end at the last token, which
the package asserts on the device: ``_offsets`` adds two documents for tokens behind the last one. A tile of keys may
reach into the next packed document: those keys have weight 0, but 0 * NaN is NaN.

Automatic choice takes it for heads wider than 256 alone. On 2026-11-30 CUDA refused a launch (cudaErrorInvalidValue) in
two of its tests on an H200, and in one of them every later launch. We do not know why, and did not see it again: on
2026-12-01 all 85 tests passed there.

No function here synchronises or records a graph: the kernels get detached tensors.
Upstream: ffpa-attn 0.2.4 (https://github.com/xlite-dev/ffpa-attn), ``ffpa_attn.cute``. It pins older versions of
nvidia-cutlass-dsl and quack-kernels than flash-attn-4 needs; it also runs on 4.8.1 and 0.6.5, flash-attn-4's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attn_core.backends.contract import Backend, Buffers, Timing
from attn_core.backends.shared import first_calls, kernel_limits, rewrites
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.readable import copied, readable, writable
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")

FORWARD = Support(
    kernel="the FFPA kernel",
    devices=("sm90",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=512,
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
BACKWARD = replace(FORWARD, window=False)

NARROW = 256
"""Heads up to this width have faster kernels."""

FEW_QUERIES, FEW_TILES = 16, 16
"""Up to so many queries a row, and below so many of the forward's tiles, most processors wait."""

WIDTHS = (320, 384, 448, 512)
"""The widths that we run the kernels at. Between them they pad in shared memory, which we have not tried."""


class EntryPoints(NamedTuple):
    """The functions of ``ffpa_attn.cute`` for one architecture, which choose, compile and launch the kernels."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@cached_once
def entry_points() -> EntryPoints:
    """Imports the entry points. The import takes some seconds, because it loads the CuTe DSL."""
    from ffpa_attn.cute import _ffpa_bwd_sm90, _ffpa_fwd_sm90  # type: ignore[import-not-found]

    return EntryPoints(_ffpa_fwd_sm90._ffpa_attn_forward_sm90, _ffpa_bwd_sm90._ffpa_attn_backward_sm90)


def probe() -> str:
    """Imports the kernels and returns the version of ffpa-attn."""
    entry_points()
    return metadata.version("ffpa-attn")


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses sizes that the launch grid cannot hold."""
    return kernel_limits.grid(spec, FORWARD.kernel)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the keywords that both entry points take, apart from offsets."""
    edge, lengths = band(spec), {}
    if spec.packed:  # the package checks them, and uses them for nothing else; a tail may be the longest document
        lengths = {"max_seqlen_q": spec.q_len, "max_seqlen_k": spec.kv_len}
    causal = edge.left is None and edge.right == 0
    return {
        **lengths,
        "softmax_scale": spec.scale,
        "causal": causal,
        "window_size_left": edge.left,
        "window_size_right": None if causal else edge.right,
    }


def _forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    import torch

    q, k, v = _operands(*inputs[:3])
    out, lse = (None, None) if into is None else map(writable, into)
    if lse is None:
        lse = torch.empty(spec.lse_shape, dtype=torch.float32, device=q.device)
    keywords = {**_offsets(spec, inputs), **lower(spec), "pack_gqa": _fits_in_tiles(spec)}
    return entry_points().forward(q, k, v, **keywords, out=out, lse=lse)


def _fits_in_tiles(spec: AttentionSpec) -> bool:
    """Returns whether the heads of a group share a forward's tiles of 64 queries, which whole groups must fill."""
    return spec.group_size > 1 and 64 % spec.group_size == 0


def _backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    into: Gradients | None,
    dlse: Tensor | None = None,
) -> Gradients:
    tensors = (*_operands(*inputs[:3]), readable(out), readable(dout), lse.contiguous())
    dq, dk, dv = (None, None, None) if into is None else map(writable, into[:3])
    keywords = {**_offsets(spec, inputs), **lower(spec), "dlse": dlse}
    return Gradients(*entry_points().backward(*tensors, **keywords, dq=dq, dk=dk, dv=dv))


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v without their graphs, as the kernels read them: v in memory of its own."""
    q, k, v = readable(q.detach()), readable(k.detach()), readable(v.detach())
    return q, k, copied(v) if v.data_ptr() == k.data_ptr() else v


def _offsets(spec: AttentionSpec, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the offsets of packed documents, with two more documents for the tokens behind the last one.

    The first has the queries and no key, so they are rows that see no key; the second has the keys and no query.
    """
    if not spec.packed:
        return {}
    import torch

    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    last_query, last_key = cu_q.new_full((2,), spec.q_len), cu_k.new_full((1,), spec.kv_len)
    return {"cu_seqlens_q": torch.cat([cu_q, last_query]), "cu_seqlens_k": torch.cat([cu_k, cu_k[-1:], last_key])}


def has_rank(spec: AttentionSpec) -> bool:
    """Returns whether automatic choice compares the kernels' time: not for heads that others run, nor for a query whose
    few rows and kv heads, a tile each, would leave most processors idle."""
    tiles = (spec.documents or spec.batch) * spec.num_kv_heads
    few = (spec.max_len_q or spec.q_len) <= FEW_QUERIES and tiles < FEW_TILES
    return max(spec.head_dim, spec.value_dim) > NARROW and not few


def _width(dim: int) -> int:
    return next(width for width in WIDTHS if width >= dim)


KERNEL = rewrites.Kernel(_forward, _backward, _width, lse_gradient=True)


def forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None = None) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``. Raises RuntimeError if a CUDA graph would capture the compilation."""
    return _compiled(spec, inputs, "forward", partial(rewrites.forward, KERNEL, spec, inputs, into))


def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    into: Gradients | None = None,
) -> Gradients:
    """See ``Backend.backward``, and ``forward`` for the error."""
    half = "backward" if dlse is None else "backward with the gradient of the log-sum-exp"
    run = partial(rewrites.backward, KERNEL, spec, inputs, out, lse, dout, dlse, into)
    return _compiled(spec, inputs, half, run)


def _compiled(spec: AttentionSpec, inputs: Inputs, half: str, run: Callable[[], Result]) -> Result:
    """Runs a call; if it is the first of its kind, alone in the process."""
    how, width = lower(spec), _width(max(spec.head_dim, spec.value_dim))
    sides = how["causal"], how["window_size_left"] is None, how["window_size_right"] is None
    key = (half, spec.dtype, width, spec.group_size, *sides, spec.packed, inputs.q.device)
    return first_calls.run("ffpa", key, run, lambda: f"the ffpa {half} of ({spec})")


BACKEND = Backend(
    name="ffpa",
    framework="torch",
    requires="ffpa-attn>=0.2.4",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    writes_into=("forward", "backward"),
    modelled=has_rank,
    preference={"cuda": 75},
    # Beside flash4's models, extended to its widths: 19 calls on H200s on 2026-11-30 and 2026-12-01. JAX calls Python.
    timing=Timing(
        compiles_for_seconds=True,
        model_of=("flash4", "flash4"),
        of_model=(3.3, 1.75),
        in_callback=(500.0, 1300.0),
        behind_without_time="sdpa_efficient",
    ),
    reaches_next_document=True,
)
