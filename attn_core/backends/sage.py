"""SageAttention: q and k as 8-bit integers, weights times v in half precision or fp8. For inference, and approximate.

``sage`` is the package's own choice (``sageattn``: Triton kernels in 1.x, by architecture in 2.x). ``sage_fp16_cuda``,
``sage_fp16_triton``, ``sage_fp8_cuda`` and ``sage_fp8_cuda_sm90`` are kernels of 2.x. None is chosen automatically.

Limits: no gradient, window, mask, bias, softcap or sinks; causal only if q_len == kv_len; head dims up to 128, padded
with zeros to 64 or 128. A value of v beyond float16's 65504 overflows. A value of q or k that is not finite spoils the
128 rows or 64 keys that share a scale with it. Documents are refused: the packed kernel waits for the device on every
call, smooths k by one mean over all documents, and the rules below would need lengths that are on the device.
The Triton kernels give the keys that pad kv_len weight, which ``known_bad.json`` refuses. Causal calls hide these keys
but read scales past their end, so rows are padded to a multiple of 128 and cut again.
Correction: 1.x subtracts k's mean from the caller's own k in place. We subtract it from a copy before the kernel, and
add its share of the log-sum-exp after the kernel in float32.
Upstream: sageattention 1.0.6, and 2.x (which has a log-sum-exp; 1.x has none).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.contract import Backend, Buffers
from attn_core.backends.shared import kernel_limits, rewrites
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.known_bad import numbers_of
from attn_core.backends.shared.readable import readable
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = Support(
    kernel="SageAttention",
    devices=("sm80", "sm86", "sm89", "sm90"),
    dtypes=("bfloat16", "float16"),
    max_head_dim=128,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    deterministic=True,
    lse=True,
    approximate=True,
)


class Function(NamedTuple):
    """A function of the package: its name, claims and fixed arguments, and the package's flag that it was compiled."""

    name: str
    support: Support
    options: dict[str, str]
    compiled: str = ""


def _claims_2x(kernel: str, *devices: str) -> Support:
    """Returns the claims of a kernel of 2.x. This project has only run 1.x on a GPU."""
    name = f"SageAttention's {kernel} kernel"
    return replace(FORWARD, kernel=name, devices=devices or FORWARD.devices, unproven=True)


_TWO_SUMS = {"pv_accum_dtype": "fp32+fp32"}
"""The fp8 tensor cores add with 22 bits of a float32; every few steps the sum is added to a full float32."""
FUNCTIONS = {
    "auto": Function("sageattn", FORWARD, {}),
    "fp16_triton": Function("sageattn_qk_int8_pv_fp16_triton", _claims_2x("fp16 Triton"), {}),
    "fp16_cuda": Function(
        "sageattn_qk_int8_pv_fp16_cuda", _claims_2x("fp16 CUDA"), {"pv_accum_dtype": "fp32"}, "SM80_ENABLED"
    ),
    "fp8_cuda": Function("sageattn_qk_int8_pv_fp8_cuda", _claims_2x("fp8 CUDA", "sm89"), _TWO_SUMS, "SM89_ENABLED"),
    "fp8_cuda_sm90": Function(
        "sageattn_qk_int8_pv_fp8_cuda_sm90", _claims_2x("fp8 Hopper", "sm90"), _TWO_SUMS, "SM90_ENABLED"
    ),
}
_ROWS = 128
"""Query rows of a Triton kernel's block."""


def refuses(spec: AttentionSpec, device: str, build: Build | None, word: str = "auto") -> tuple[str, ...]:
    """Refuses causal calls with q_len != kv_len, and 32-bit overflows. word: of FUNCTIONS."""
    kernel = FUNCTIONS[word].support.kernel
    reasons = [*kernel_limits.grid(spec, kernel)]
    if spec.causal and spec.q_len != spec.kv_len and not band(spec).hides_nothing(spec.q_len, spec.kv_len):
        reasons.append(
            f"causal with q_len {spec.q_len} and kv_len {spec.kv_len}: {kernel} needs as many keys as queries"
        )
    elements = spec.batch * max(spec.q_len, spec.kv_len) * spec.num_heads * _width(max(spec.head_dim, spec.value_dim))
    if elements >= 2**31:
        reasons.append(f"{elements} elements in q, k or v: {kernel} counts them in 32 bits")
    return tuple(reasons)


def probe(word: str = "auto") -> str:
    """Imports the package's function and returns the package's version."""
    from importlib.metadata import version

    import sageattention.core

    function, installed = FUNCTIONS[word], version("sageattention")
    if not hasattr(sageattention, function.name):
        raise ImportError(f"sageattention {installed} has no {function.name}")
    if not getattr(sageattention.core, function.compiled, True):
        raise ImportError(f"{function.name} was not compiled into this sageattention {installed}")
    return installed


def build() -> Build:
    """Returns the installed version's build; 1.x lacks the log-sum-exp."""
    installed = probe()
    numbers = numbers_of(installed)
    return Build(f"sageattention {installed}", ("lse",) if numbers < (2,) else (), version=numbers)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec, word: str = "auto") -> dict[str, Any]:
    """Returns the function's arguments. rows: the padded length of q, k and v. repeat: the repeats of k's heads.

    The package's own choice of 2.x smooths k again and cannot correct the log-sum-exp of grouped heads for it.
    """
    is_causal = spec.causal and spec.q_len == spec.kv_len
    padded = is_causal and word in ("auto", "fp16_triton")
    # smooth_k is False because _forward smooths k itself: 1.x would change the caller's own k.
    arguments = {"tensor_layout": "NHD", "is_causal": is_causal, "sm_scale": spec.scale, "smooth_k": False}
    return {
        "function": FUNCTIONS[word].name,
        "arguments": {**arguments, **FUNCTIONS[word].options, **({"return_lse": True} if spec.return_lse else {})},
        "rows": -(-spec.q_len // _ROWS) * _ROWS if padded else None,
        "repeat": spec.group_size if spec.return_lse and word == "auto" else 1,
    }


@cache
def _function(name: str) -> Callable[..., Any]:
    import sageattention

    return getattr(sageattention, name)


def _width(dim: int) -> int:
    return 64 if dim <= 64 else 128


@without_gradient
def _forward(word: str, spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) at a width that the kernels have. The log-sum-exp is NaN if it was not requested."""
    import torch

    how = lower(spec, word)
    q, k, v = (readable(tensor) for tensor in inputs[:3])
    # Smoothing: k without its mean has smaller values, so 8 bits represent it better. The softmax is the same.
    mean = k.mean(1, keepdim=True)  # [batch, 1, kv_heads, head_dim]
    operands: tuple[Any, ...] = (q, k - mean, v)
    if how["rows"] not in (None, spec.q_len):
        missing = (0, 0, 0, 0, 0, how["rows"] - spec.q_len)
        operands = tuple(torch.nn.functional.pad(tensor, missing) for tensor in operands)
    if how["repeat"] > 1:  # see lower: 2.x would correct the log-sum-exp of grouped heads wrongly
        keys_and_values = (tensor.repeat_interleave(how["repeat"], dim=2) for tensor in operands[1:])
        operands = (operands[0], *keys_and_values)
    result = _function(how["function"])(*operands, **how["arguments"])
    if not spec.return_lse:
        return result[:, : spec.q_len], q.new_full(spec.lse_shape, torch.nan, dtype=torch.float32)
    out, lse = result[0][:, : spec.q_len], result[1][..., : spec.q_len]
    means = mean.float().repeat_interleave(spec.group_size, dim=2)
    # Subtracting k's mean took q . mean from every score of a row: [batch, heads, q_len]
    mean_share = (q.float() * means).sum(-1).transpose(1, 2)
    return out, lse + spec.scale * mean_share  # type: ignore[operator]  # every spec has set its scale


def _no_gradient(*_: object) -> Gradients:
    raise NotImplementedError("backward: this kernel has no gradient")


def _backend(
    name: str,
    word: str,
    requires: str,
    build: Callable[[], Build] | None = None,
    also_called: tuple[str, ...] = (),
    variants: tuple[Backend, ...] = (),
) -> Backend:
    """Returns a function of the package as a backend."""
    return Backend(
        name=name,
        framework="torch",
        requires=requires,
        forward_claims=FUNCTIONS[word].support,
        backward_claims=None,
        refuses=partial(refuses, word=word),
        probe=partial(probe, word=word),
        lower=partial(lower, word=word),
        forward=partial(rewrites.forward, rewrites.Kernel(partial(_forward, word), _no_gradient, _width)),
        backward=None,
        build=build,
        also_called={word: 10 for word in also_called},
        variants=variants,
    )


_VARIANTS = tuple(
    _backend(f"sage_{word}", word, "sageattention>=2")
    for word in ("fp16_cuda", "fp16_triton", "fp8_cuda", "fp8_cuda_sm90")
)
BACKEND = _backend(
    "sage", "auto", "sageattention>=1.0.6", build, ("sageattention", "sage_attention"), variants=_VARIANTS
)
