"""cuDNN's flash attention inside XLA programs: ``jax.nn.dot_product_attention(implementation="cudnn")``.

Limits: bfloat16 and float16, head_dim a multiple of 8 up to 128 (256 on sm90), value_dim == head_dim; no softcap,
ALiBi, sinks, dropout, packed documents, deterministic gradients, gradient of a bias, or log-sum-exp (jax.nn rounds that
to the inputs' dtype). Without a mask or bias, causal starts at the top left, and a window reaches to the left only and
needs causal. Mask, bias and other bands become one additive array here, of the inputs' dtype, with all rows and keys
and -inf where a key is hidden: jax.nn would hide keys behind finite values, which float16 scores can outweigh. So a
bias that the dtype would round is refused, and so is a mask or bias without its own rows or keys if the array would be
large. Rows that see no key are shown all of them, and their results and gradients are set to 0. Gradients need even
lengths, which jax.nn requires for a bias, and it treats its own placeholder as one.
The backward is jax.vjp of the forward; both request the residual, so that
XLA can run the forward once.
Upstream: jax 0.10 to 0.12 (jax/_src/nn/functions.py, jax/_src/cudnn/fused_attention_stablehlo.py) with cuDNN 9.8 or
later. ``local_window_size=(left, 0)`` is inclusive, as ours; jax.nn itself adds the 1 that cuDNN wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Timing
from attn_core.backends.shared.aten_masks import explicit
from attn_core.backends.shared.in_jax import usual_promotion
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import jax
    import numpy as np

FORWARD = Support(
    kernel="cuDNN through jax.nn",
    devices=("sm80", "sm90", "sm100"),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    head_dim_multiple=8,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),  # refuses() allows bottom_right only if it equals top_left
    causal=True,
    window=True,
    mask=True,
    bias=True,
    deterministic=True,
)
BACKWARD = replace(FORWARD, deterministic=False)

WIDE_HEADS = (9, 10)
"""The first cuDNN with head dims over 128, on sm90."""
LARGEST_EXPANSION = 2**24
"""The most elements of the additive array if the mask or bias has fewer rows or keys: 32 MiB."""
CUSTOM_CALLS = tuple(
    f"__cudnn$fmha{bias}Softmax{dropout}{direction}"
    for bias in ("", "ScaleBias")
    for dropout in ("", "Dropout")
    for direction in ("", "Backward")
)
"""The names of jax.nn's calls of cuDNN in XLA programs, which ``jax.export`` refuses unless they are listed."""
VERSIONS = ("jax_cuda13_plugin._versions", "jax_cuda12_plugin._versions", "jaxlib.cuda._versions")
"""Modules in which jax's CUDA plugins report the version of the loaded cuDNN."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses combinations that cuDNN or jax.nn lacks. No build means the oldest cuDNN."""
    version = build.version if build is not None else ()
    return (*(_table_reasons(spec) if explicit(spec) else _band_reasons(spec)), *_size_reasons(spec, device, version))


def _band_reasons(spec: AttentionSpec) -> list[str]:
    """Returns why cuDNN cannot run the call's causal alignment or window; packed calls have reasons of their own."""
    edge = band(spec)
    if spec.packed or (edge.left is None and edge.right is None) or edge.hides_nothing(spec.q_len, spec.kv_len):
        return []
    where = f"q_len {spec.q_len} and kv_len {spec.kv_len}"
    reasons = []
    if edge.right != 0:
        reasons.append(f"window={spec.window}: cuDNN through jax.nn has none that is open or positive to the right")
    if edge.offset:
        reasons.append(f"alignment={spec.alignment} with {where}: cuDNN through jax.nn has top_left")
    if edge.empties_a_row(spec.q_len, spec.kv_len):
        reasons.append(f"window={spec.window} with {where}: cuDNN through jax.nn has no rows that see nothing")
    elif edge.left is not None and spec.q_len > spec.kv_len:
        reasons.append(f"window={spec.window} with {where}: cuDNN has windows for q_len <= kv_len")
    return reasons


def _table_reasons(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.rounds_bias:
        reasons.append(f"bias in {spec.bias_dtype} with {spec.dtype}: cuDNN through jax.nn would round it")
    whole = (spec.q_len, spec.kv_len)
    elements = math.prod(_table_shape(spec))
    for name, shape in (("mask", spec.mask_shape), ("bias", spec.bias_shape)):
        if shape is not None and shape[2:] != whole and elements > LARGEST_EXPANSION:
            reasons.append(
                f"{name} of shape {list(shape)}: cuDNN through jax.nn needs all rows and keys, {elements} elements; "
                f"at most {LARGEST_EXPANSION} are added"
            )
    return reasons


def _table_shape(spec: AttentionSpec) -> tuple[int, int, int, int]:
    """Returns the shape of the additive array, ``[batch or 1, heads or 1, q_len, kv_len]``."""
    shapes = [shape for shape in (spec.mask_shape, spec.bias_shape) if shape is not None]
    return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes), spec.q_len, spec.kv_len


def _size_reasons(spec: AttentionSpec, device: str, version: tuple[int, ...]) -> list[str]:
    reasons = []
    if spec.head_dim > 128 and (device != "sm90" or version < WIDE_HEADS):
        reasons.append(f"head_dim={spec.head_dim} on {device}: cuDNN {_version_text(version)} stops at 128")
    if spec.kv_len == 1:
        reasons.append("kv_len=1: cuDNN's kernel needs two keys")
    # The module's docstring says why: jax.nn counts its placeholder as a bias.
    if spec.needs_backward and (spec.q_len % 2 or spec.kv_len % 2):
        lengths = f"q_len {spec.q_len} and kv_len {spec.kv_len}"
        reasons.append(f"backward: {lengths}: jax.nn has gradients of cuDNN's attention for even lengths")
    grid = {"batch": spec.batch, "num_heads": spec.num_heads}
    return reasons + [f"{name}={size}: cuDNN stops at {GRID_LIMIT}" for name, size in grid.items() if size > GRID_LIMIT]


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "(of unknown version)"


def probe() -> str:
    """Checks for jax's attention and a CUDA plugin's cuDNN, and returns jax's version."""
    import jax

    _ = (attention_of_jax(), _cudnn_version())
    return jax.__version__


def build() -> Build:
    """Returns the version of the cuDNN that jax has loaded."""
    number = _cudnn_version()
    version = (number // 10000, number // 100 % 100, number % 100)  # 91900 is 9.19.0
    return Build(f"cuDNN {_version_text(version)}", version=version)


def _cudnn_version() -> int:
    for name in VERSIONS:
        try:
            return int(import_module(name).cudnn_get_version())
        except ImportError:  # only the plugin of one CUDA version is installed
            continue
    raise ImportError("no CUDA plugin of jax has a cuDNN: " + ", ".join(VERSIONS))


def _causal(spec: AttentionSpec) -> bool:
    """Returns whether the kernel applies causal; one that hides nothing (one query, bottom-right) is not needed.

    With a mask or a bias the kernel does so only if causal starts at the top left and there is no window.
    """
    edge = band(spec)
    if edge.right != 0 or edge.hides_nothing(spec.q_len, spec.kv_len):
        return False
    return not explicit(spec) or (edge.left is None and not edge.offset)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the keywords of jax.nn.dot_product_attention. ``return_residual`` selects the forward of a gradient."""
    edge = band(spec)
    how: dict[str, Any] = {"scale": spec.scale, "implementation": "cudnn", "return_residual": spec.needs_backward}
    if not _causal(spec):
        return how
    if edge.left is not None and edge.left < spec.q_len - 1:  # else the window begins before the first key
        how["local_window_size"] = (edge.left, 0)
    return {**how, "is_causal": True}


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[jax.Array, None]:
    """Returns (out, None): there is no log-sum-exp. Traceable."""
    with usual_promotion():
        return _attend(spec, inputs.mask, inputs.bias, *inputs[:3]), None


def backward(
    spec: AttentionSpec, inputs: Inputs, out: jax.Array, lse: jax.Array | None, dout: jax.Array, dlse: None
) -> Gradients:
    """See ``Backend.backward``; traceable."""
    import jax

    with usual_promotion():
        _, pull = jax.vjp(lambda *qkv: _attend(spec, inputs.mask, inputs.bias, *qkv), *inputs[:3])
        return Gradients(*pull(dout))


def _attend(
    spec: AttentionSpec, mask: jax.Array | None, bias: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    import jax.numpy as jnp

    how = lower(spec)
    added, has_key = _additive(spec, mask, bias, q.dtype) if explicit(spec) else (None, None)
    out = attention_of_jax()(q, k, v, bias=added, **how)
    out = out[0] if how["return_residual"] else out
    if has_key is None:
        return out
    # Selected, so that the gradients of the other rows are 0, too.
    return jnp.where(jnp.swapaxes(has_key, 1, 2), out, jnp.zeros_like(out))  # [batch, q_len, heads, 1]


def attention_of_jax() -> Callable[..., Any]:
    """Returns JAX's function from the module that defines it (the same module in jax 0.10 to 0.12).

    The public name may be ours by now, and calling that would recurse.
    """
    try:
        from jax._src.nn import functions
    except ImportError:  # a later JAX
        import jax.nn

        return jax.nn.dot_product_attention
    return functions.dot_product_attention


def _additive(
    spec: AttentionSpec, mask: jax.Array | None, bias: jax.Array | None, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns the additive array, and whether each row sees a key: ``[batch or 1, heads or 1, q_len, 1]``."""
    import jax.numpy as jnp

    hidden = jnp.asarray(-jnp.inf, dtype)
    added = jnp.zeros((1, 1, 1, 1), dtype) if bias is None else bias.astype(dtype)
    added = added if mask is None else jnp.where(mask, added, hidden)
    edge, in_band = band(spec), True
    if not edge.hides_nothing(spec.q_len, spec.kv_len):
        in_band = edge.contains(jnp.arange(spec.q_len)[:, None], jnp.arange(spec.kv_len))
    if not _causal(spec):
        added = jnp.where(in_band, added, hidden)
    added = jnp.broadcast_to(added, _table_shape(spec))
    # A NaN counts as a key, so that it reaches the output.
    has_key = ((added != hidden) & in_band).any(-1, keepdims=True)
    return jnp.where(has_key, added, jnp.zeros_like(added)), has_key


BACKEND = Backend(
    name="jax_cudnn",
    framework="jax",
    requires="jax[cuda13]>=0.10 or jax[cuda12]>=0.10",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    build=build,
    # torch's kernels have the same bits in both frameworks, so they come first.
    preference={"cuda": 90},
    also_called={"cudnn": 20},
    # It applies causal beside a mask or bias in the kernel. torch's op needs causal in the mask, and computes all
    # pairs: a call of 4 rows of 10816 tokens on an H200 took 11.5 ms, and sdpa_efficient 32.8 ms.
    timing=Timing(in_xla=(20.0, 140.0), beside_table=0.5, model_of=("sdpa_cudnn", "sdpa_cudnn")),
)
