"""cuDNN's attention on NVIDIA GPUs, through torch's raw ops.

Limits: fp16 and bf16, head_dim up to 128 (256 on sm90 with cuDNN 9.10), two keys or more, causal from the top left, no
windows, softcap, ALiBi, dropout or packed documents, and no gradient of a bias. A boolean mask becomes an additive one
of 0 and -inf, exact in any dtype; a bias that the dtype of q would round is refused. Beside a mask or bias, causal from
the top left is the kernel's own, and another band becomes part of the bias. ``shared.rewrites`` adds other head dims,
sinks and the gradient of the log-sum-exp. The backward, and the log-sum-exp of a single query, add in any order, so
equal bits are not claimed.
Upstream: ``aten::_scaled_dot_product_cudnn_attention`` and its backward, torch 2.11 to 2.15, cuDNN 9. Corrections:
``zero_for_empty_rows`` finds out what the installed cuDNN computes for rows that see no key; if it is not what we
promise, these rows are shown every key and their results discarded. The backward gets out and dout in the layout in
which torch allocates out, because torch caches plans by the layout of q, k and v alone, and its own attention uses the
same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers, KeptPlans, Timing
from attn_core.backends.shared import aten_masks, rewrites
from attn_core.backends.shared.aten_masks import additive_of, explicit, limits, needed_band
from attn_core.backends.shared.autograd import copy_other_layouts, recording, without_gradient
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.readable import readable, readable_rows
from attn_core.backends.support import Build, Support
from attn_core.call.masks import Band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._ops import OpOverload

NAME = "cuDNN attention"

FORWARD = Support(
    kernel=NAME,
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    mask=True,
    bias=True,
    sinks=True,
    lse=True,
    partial=True,
    lse_gradient=True,
)
BACKWARD = replace(FORWARD)

CAUSAL = Band(None, 0, 0)
"""The one band that the kernel has."""

NO_WEIGHT = 1e30
"""A log-sum-exp with which every weight is 0 and arithmetic stays finite."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses what cuDNN, or an old version of it, lacks. Assumes the oldest if the version is unknown."""
    version = build.version if build is not None else ()
    spoken = f"cuDNN {'.'.join(map(str, version))}" if version else "an unknown cuDNN"
    reasons = [*rewrites.refusals(spec), *limits(spec, device, NAME)]
    edge, widest = needed_band(spec), max(spec.head_dim, spec.value_dim)
    # With a mask or bias, such a band becomes part of it, where any diagonal is possible.
    if spec.causal and edge.right is not None and edge.offset and not explicit(spec):
        reasons.append(
            f"causal, bottom_right, with q_len {spec.q_len} and kv_len {spec.kv_len}: {NAME} has top_left only"
        )
    if spec.kv_len == 1:
        reasons.append(f"kv_len=1: {NAME} needs 2 keys or more")
    if spec.rounds_bias:
        reasons.append(f"bias in {spec.bias_dtype} with {spec.dtype}: {NAME} would round it to {spec.dtype}")
    # The claim refuses widths above 256 on every device.
    if 128 < widest <= 256 and not (device == "sm90" and version >= (9, 10)):
        reasons.append(
            f"head_dim={widest} on {device} with {spoken}: {NAME} stops at 128, on sm90 from cuDNN 9.10 at 256"
        )
    return tuple(reasons)


def probe() -> str:
    """Checks that torch has the op and cuDNN, and returns both versions."""
    import torch

    _kernels()
    version = build().version
    return f"{torch.__version__} (cuDNN {'.'.join(map(str, version))})"


def build() -> Build:
    """Returns cuDNN's version, which decides what it computes correctly."""
    import torch

    number = torch.backends.cudnn.version()
    if number is None or number < 90000:
        raise ImportError(f"torch {torch.__version__} has no cuDNN 9: found {number}")
    version = (number // 10000, number // 100 % 100, number % 100)  # 91900 is 9.19.0
    return Build(f"cuDNN {'.'.join(map(str, version))}", version=version)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the op's arguments. A band that the kernel does not have becomes part of the mask or bias."""
    edge = needed_band(spec)
    # One query has kernels of its own, of which none was tried with both.
    is_causal = edge == CAUSAL and not (explicit(spec) and spec.q_len == 1)
    return {
        "is_causal": is_causal,
        "band_in_bias": edge.right is not None and not is_causal,
        "scale": spec.scale,
        # Without it cuDNN has faster kernels, above all for one query.
        "with_lse": spec.return_lse or spec.needs_backward or spec.partial,
    }


@cache
def _kernels() -> tuple[OpOverload, OpOverload]:
    import torch

    ops = torch.ops.aten
    return ops._scaled_dot_product_cudnn_attention.default, ops._scaled_dot_product_cudnn_attention_backward.default


@without_gradient
def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    return rewrites.forward(_kernel(spec), spec, inputs)


def shortcut(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """See ``Backend.shortcut_of``: torch itself attaches the backward op below to this forward op."""
    has_bias = explicit(spec)
    if not rewrites.is_native(_kernel(spec), spec) or spec.bias_gradient or (has_bias and not zero_for_empty_rows()):
        return None
    how, kernel = lower(spec), forward_binding()
    is_causal, scale, with_lse, lse_shape = how["is_causal"], how["scale"], how["with_lse"], spec.lse_shape
    prepared = None if how["band_in_bias"] else additive_of(spec, spec.dtype, aligned=False)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        heads_first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        added = None
        if has_bias:
            added = prepared(mask, bias) if prepared else additive(spec, q, mask, bias, with_band=True)
        q, k, v = readable_rows(q, k, v)
        if not heads_first:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse, *_ = kernel(q, k, v, added, with_lse, 0.0, is_causal, False, scale=scale)
        copy_other_layouts(out)
        out = out if heads_first else out.transpose(1, 2)
        return out, lse.reshape(lse_shape) if spec.return_lse else lse

    run.heads_first = partial(run, heads_first=True)  # type: ignore[attr-defined]
    return run


@without_gradient
def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``."""
    return rewrites.backward(_kernel(spec), spec, inputs, out, lse, dout, dlse)


def _forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Runs the op, which allocates its results; ``into`` is unused."""
    import torch

    how = lower(spec)
    # [batch, seq, heads, dim] -> [batch, heads, seq, dim], as views
    q, k, v = (readable(tensor).transpose(1, 2) for tensor in inputs[:3])
    bias, empty = kernel_bias(spec, how, inputs)
    out, lse, *_ = _kernels()[0](q, k, v, bias, how["with_lse"], 0.0, how["is_causal"], False, scale=how["scale"])
    # A log-sum-exp that nobody asked for has no meaning, but its shape.
    lse = lse.reshape(spec.lse_shape) if how["with_lse"] else q.new_empty(spec.lse_shape, dtype=torch.float32)
    if empty is not None:
        out, lse = out.masked_fill_(empty, 0.0), lse.masked_fill(empty[..., 0], float("-inf"))
    return out.transpose(1, 2), lse


def _backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, into: Gradients | None
) -> Gradients:
    """Returns the gradients by torch's op, whose axes are ``[batch, heads, seq, dim]``."""
    import torch

    how = lower(spec)
    q, k, v = (readable(tensor).transpose(1, 2) for tensor in inputs[:3])
    bias, empty = kernel_bias(spec, how, inputs)
    if empty is not None:
        lse = lse.masked_fill(lse == -torch.inf, NO_WEIGHT)  # exp(score - 1e30) is 0, without -inf minus -inf
    out, dout = (as_allocated_for(q, tensor.transpose(1, 2)) for tensor in (out, dout))
    random_state = q.new_empty((), dtype=torch.int64)  # required by the op, unused without dropout
    gradients = _kernels()[1](
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous()[..., None],
        random_state,
        random_state,
        bias,
        None,
        None,
        spec.q_len,
        spec.kv_len,
        0.0,
        how["is_causal"],
        scale=how["scale"],
    )
    return Gradients(*(gradient.transpose(1, 2) for gradient in gradients))


KERNEL = rewrites.Kernel(_forward, _backward, rewrites.whole_eights)
"""The kernel that ``shared.rewrites`` completes, with values as wide as the keys."""

APART = KERNEL._replace(same_width=False)
"""The same kernel, with values of their own width."""


@lru_cache(maxsize=4096)
def _kernel(spec: AttentionSpec) -> rewrites.Kernel:
    """Returns the kernel for the head dims of a call.

    Beyond 128, cuDNN runs unequal head dims only as 192 with values of 128, from 9.11 on (torch's
    ``check_cudnn_tensor_shapes``).
    """
    dims = spec.head_dim, spec.value_dim
    apart = max(dims) <= 128 or (dims == (192, 128) and build().version >= (9, 11))
    return APART if apart else KERNEL


def additive(spec: AttentionSpec, q: Tensor, mask: Tensor | None, bias: Tensor | None, *, with_band: bool) -> Tensor:
    """Returns mask and bias as one tensor ``[batch or 1, heads or 1, q_len or 1, kv_len]`` in q's dtype.

    with_band: the call's band hides pairs of it, too.
    """
    import torch

    if with_band:
        rows, columns = torch.arange(spec.q_len, device=q.device)[:, None], torch.arange(spec.kv_len, device=q.device)
        seen = needed_band(spec).contains(rows, columns)
        mask = seen if mask is None else mask & seen
    return aten_masks.additive(mask, bias, q.dtype, spec.kv_len, aligned=False)


def kernel_bias(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Returns the kernel's bias, and the rows that see no key if the kernel would not give 0 for them; else None."""
    import torch

    if not explicit(spec):
        return None, None
    zero = zero_for_empty_rows()
    # To find the rows that see no key, the tensor needs the band also if the kernel has it.
    with_band = how["band_in_bias"] or (how["is_causal"] and not zero)
    added = additive(spec, inputs.q, inputs.mask, aten_masks.detached(inputs.bias), with_band=with_band)
    if zero:
        return added, None
    empty = (added == -torch.inf).all(-1, keepdim=True)
    return added.masked_fill(empty, 0.0), empty


def as_allocated_for(q: Tensor, tensor: Tensor) -> Tensor:
    """Returns ``[batch, heads, q_len, dim]`` in the layout in which torch allocates the output for q, copied if needed.

    torch caches plans by the strides of q, k and v alone, but a plan fixes the strides of all tensors.
    """
    strides = _strides_of_results(q.shape, q.stride(), tensor.shape[3], q.device)
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


@lru_cache(maxsize=4096)
def _strides_of_results(
    shape: tuple[int, ...], strides: tuple[int, ...], width: int, device: torch.device
) -> tuple[int, ...]:
    import torch

    if width == shape[3]:
        # On the CPU, because a meta tensor has other strides along axes of size 1.
        like: tuple[int, ...] = torch.empty_like(torch.empty_strided(shape, strides, device="cpu")).stride()
        return like
    return _gapless((*shape[:3], width), _filled(_inner_first(strides), device))


@lru_cache(maxsize=64)
def _filled(order: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """Returns the axes of an output of another width than q's from the innermost one on; ``order`` are q's axes.

    torch's versions sort the axes in different ways (``alloc_with_matching_layout``), so a tiny call shows the order.
    """
    import torch

    shape = (2, 2, 2, 64)
    with torch.inference_mode(False), torch.no_grad():
        q = torch.zeros(shape, dtype=torch.bfloat16, device=device).as_strided(shape, _gapless(shape, order))
        v = q.new_zeros((2, 2, 2, 32))
        out = forward_binding()(q, q, v, None, True, 0.0, False, False, scale=1.0)[0]
    return _inner_first(out.stride())


def _inner_first(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda axis: strides[axis]))


def _gapless(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps, whose axes in memory are in this order, the innermost one first."""
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


# What the installed cuDNN computes for rows that see no key. cuDNN 9.19 gives them the output 0, the log-sum-exp -inf
# and no gradient, which is what we promise. Seen on an H200.

TRIALS = ((1, 64, False), (130, 128, False), (130, 128, True))
"""(queries, head_dim, causal) of the calls that are tried. One query and many queries run on different kernels."""


@cache
def forward_binding() -> Callable[..., tuple[Any, ...]]:
    """Returns torch's Python binding of the forward op. A call of it is shorter than a call of the op itself."""
    import torch

    return torch._scaled_dot_product_cudnn_attention


def zero_for_empty_rows() -> bool:
    """Returns whether the installed cuDNN gives rows that see no key the output 0, -inf and no gradient."""
    import torch

    # A trial reads its results on the host, which a capture forbids.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return _trials.cache_info().currsize > 0 and _trials()
    return _trials()


@cached_once
def _trials() -> bool:
    import torch

    # The first call may be inside an operator, where autograd is off, and must not use up random numbers.
    with torch.inference_mode(False), recording():
        return all(_gives_zero(*trial) for trial in TRIALS)


def _gives_zero(queries: int, head_dim: int, is_causal: bool, device: str = "cuda") -> bool:
    """Returns whether the last query, which sees no key, has empty results, and its dout no effect on dk and dv."""
    import torch

    wave = torch.linspace(-2.0, 2.0, 2 * 72 * head_dim, device=device)
    key = wave.sin().to(torch.bfloat16).view(1, 2, 72, head_dim).requires_grad_()
    value = wave.cos().to(torch.bfloat16).view(1, 2, 72, head_dim).requires_grad_()
    query = torch.ones((1, 2, queries, head_dim), dtype=torch.bfloat16, device=device, requires_grad=True)
    bias = torch.zeros((1, 1, queries, 72), dtype=torch.bfloat16, device=device)
    bias[:, :, -1] = -torch.inf
    out, lse, *_ = forward_binding()(query, key, value, bias, True, 0.0, is_causal, False, scale=0.1)
    empty = bool((out[:, :, -1] == 0).all() and (lse.reshape(1, 2, queries)[..., -1] == -torch.inf).all())
    if queries == 1:  # its gradient is NaN in every version (cudnn-frontend#1072), so ``known_bad.json`` refuses it
        return empty
    dout = torch.ones_like(out)
    gradients = torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)
    dout[:, :, -1] = 100.0
    others = torch.autograd.grad(out, (query, key, value), dout)
    zero = all(bool((dq[:, :, -1] == 0).all()) for dq in (gradients[0], others[0]))
    alike = all(torch.allclose(one, two, rtol=0.02, atol=0.02) for one, two in zip(gradients[1:], others[1:]))
    return empty and zero and alike


BACKEND = Backend(
    name="sdpa_cudnn",
    framework="torch",
    requires="torch>=2.11 with CUDA and cuDNN 9",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    build=build,
    shortcut=shortcut,
    # It is the first of the kernels that torch itself brings.
    preference={"cuda": 30},
    also_called={"sdpa": 30, "cudnn_attention": 10, "cudnn": 10, "native": 30, "torch": 30},
    # Without a mask there is one more key with every token, and cuDNN prepares a plan for every number of keys: 33 ms
    # for a forward on an H200 host with cuDNN 9.19, measured on 2026-11-24, which about 32 layers share.
    timing=Timing(new_length=1000.0, beside_table=0.5),
    # A plan takes 1.9 MB of the host's memory and 40 ms; with the gradient 3.0 MB and 104 ms (H100, torch 2.11, cuDNN
    # 9.19, measured on 2026-11-26).
    kept_plans=KeptPlans(most=64, by="cuDNN"),
    torch_flag="cudnn",
)
