"""cuDNN's flash attention inside XLA programs: ``jax.nn.dot_product_attention(implementation="cudnn")``.

Limits: bfloat16 and float16, head_dim a multiple of 8 up to 128 (256 on sm90), value_dim == head_dim; causal starts at
the top left; a window reaches to the left only and needs causal; no softcap, bias, ALiBi, sinks, dropout, packed
documents, deterministic gradients or log-sum-exp (jax.nn rounds that to the inputs' dtype). jax.nn turns a mask into an
additive one of the inputs' dtype, with all rows and keys and finite values. Therefore a mask must have all its rows and
keys; float16 masks are refused, because a score can outweigh -32768; and rows that see no key, which jax.nn turns into
a mean of v, are set to 0 here together with their gradients. A bias is refused, because jax.nn would round it to the
inputs' dtype. Gradients need even lengths, which jax.nn requires for a bias, and it treats its own placeholder as one.
cuDNN's known faults are refused by version. The backward is jax.vjp of the forward; both request the residual, so that
XLA can run the forward once.
Upstream: jax 0.10 to 0.12 (jax/_src/nn/functions.py, jax/_src/cudnn/fused_attention_stablehlo.py) with cuDNN 9.8 or
later. ``local_window_size=(left, 0)`` is inclusive, as ours; jax.nn itself adds the 1 that cuDNN wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from attn_core.backends.shared import jax_nn
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "jax"
REQUIRES = "jax[cuda13]>=0.10 or jax[cuda12]>=0.10"

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
    deterministic=True,
)
BACKWARD = replace(FORWARD, deterministic=False)

WIDE_HEADS = (9, 10)
"""The first cuDNN with head dims over 128, on sm90."""
NAN_FIXED = (9, 26)
"""The first cuDNN whose sm90 gradient of uncausal calls has no NaN where kv_len % 128 == 64."""
VERSIONS = ("jax_cuda13_plugin._versions", "jax_cuda12_plugin._versions", "jaxlib.cuda._versions")
"""Modules in which jax's CUDA plugins report the version of the loaded cuDNN."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses combinations that cuDNN or jax.nn lacks, and known faults. No build means the oldest cuDNN."""
    version = build.version if build is not None else ()
    by_device = (*_size_reasons(spec, device, version), *_faults(spec, device, version))
    return (*_band_reasons(spec), *_mask_reasons(spec), *by_device)


def _band_reasons(spec: AttentionSpec) -> list[str]:
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
    if edge.left is not None and spec.mask_shape is not None:
        reasons.append(f"window={spec.window} and a mask: cuDNN has one or the other")
    return reasons


def _mask_reasons(spec: AttentionSpec) -> list[str]:
    if spec.mask_shape is None:
        return []
    mask = f"mask of shape {list(spec.mask_shape)}"
    reasons = []
    if spec.mask_shape[2:] != (spec.q_len, spec.kv_len):
        reasons.append(f"{mask}: cuDNN through jax.nn needs all rows and keys, [.., {spec.q_len}, {spec.kv_len}]")
    if spec.dtype == "float16":
        reasons.append(f"{mask} with dtype float16: jax.nn hides keys behind -32768, which scores can outweigh")
    return reasons


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
    reasons += [f"{name}={size}: cuDNN stops at {GRID_LIMIT}" for name, size in _grid(spec) if size > GRID_LIMIT]
    return reasons


def _grid(spec: AttentionSpec) -> tuple[tuple[str, int], ...]:
    return ("batch", spec.batch), ("num_heads", spec.num_heads)


def _faults(spec: AttentionSpec, device: str, version: tuple[int, ...]) -> list[str]:
    if not spec.needs_backward or device != "sm90":
        return []
    reasons = []
    causal = _causal(spec) and spec.mask_shape is None
    if not causal and spec.kv_len % 128 == 64 and version < NAN_FIXED:
        reasons.append(
            f"backward: kv_len={spec.kv_len}: cuDNN {_version_text(version)} can give NaN where kv_len % 128 == 64"
        )
    if spec.q_len == 1 and version[:2] == NAN_FIXED:
        reasons.append(f"backward: q_len=1: cuDNN {_version_text(version)} can give NaN for a single query")
    return reasons


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "(of unknown version)"


def probe() -> str:
    """Checks for jax's attention and a CUDA plugin's cuDNN, and returns jax's version."""
    import jax

    _ = (jax_nn.jax_function(), _cudnn_version())
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
    """Returns whether the call needs causal; a causal mask that hides nothing (one query, bottom-right) does not."""
    edge = band(spec)
    return edge.right == 0 and not edge.hides_nothing(spec.q_len, spec.kv_len)


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


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns (out, None): there is no log-sum-exp. Traceable."""
    with _usual_promotion():
        return _attend(spec, inputs.mask, *inputs[:3]), None


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``; traceable."""
    import jax

    with _usual_promotion():
        _, pull = jax.vjp(lambda *qkv: _attend(spec, inputs.mask, *qkv), *inputs[:3])
        return Gradients(*pull(dout))


@contextmanager
def _usual_promotion() -> Iterator[None]:
    """Sets JAX's default promotion of ranks and dtypes, which jax.nn relies on, whatever the caller has set."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _attend(spec: AttentionSpec, mask: Any, q: Any, k: Any, v: Any) -> Any:
    import jax.numpy as jnp

    how = lower(spec)
    out = jax_nn.dot_product_attention(q, k, v, mask=mask, **how)
    out = out[0] if how["return_residual"] else out
    if mask is None:
        return out
    # A row that sees no key has the mean of v here; select 0 instead, which also makes its gradients 0.
    seen = mask
    if _causal(spec):
        rows, keys = jnp.arange(spec.q_len)[:, None], jnp.arange(spec.kv_len)
        seen = mask & band(spec).contains(rows, keys)
    has_key = jnp.swapaxes(seen.any(-1), 1, 2)[..., None]  # [batch, heads, q_len] -> [batch, q_len, heads, 1]
    return jnp.where(has_key, out, jnp.zeros_like(out))
