"""FlashAttention 3 as custom calls of XLA, with gradients and without torch: the Hopper library of dew-flash-attn.

Limits: sm90, float16 and bfloat16, head_dim up to 256, bottom-right alignment only; no softcap, mask, bias, ALiBi,
dropout or pages. The kernel reads keys and values with the strides of one width, and takes multiples of 8, so narrower
channels are padded with zeros, which change no score. It has no gradient of the log-sum-exp: such calls are refused.
The wheel has FlashAttention 2, too, 340 MB that an import of its package would load. So we import nothing of it: we
load ``libdew_flash_attn3.so`` from its folder, and register the four handlers under names of our own.
Upstream: dew-flash-attn-cu13 or -cu12 0.3.6, which needs jax 0.11.2: flash-attn3-jax's port of FlashAttention's
``hopper/`` (https://github.com/rhaps0dy/flash-attn3-jax), built without split keys, packed groups of heads and softcap.

Conventions: natural log-sum-exp in float32, ``[batch, heads, q_len]`` or ``[heads, tokens]``; rows that see no key have
0 and -inf, and gradients 0. -1 is an open side of a window. The handlers allocate their own scratch memory, apart from
two results of the backward, rows of float32 that each document pads to at most 128 more. Heads that share keys add
their gradients in float32.
Equal bits on every run: the forward always, because no keys are split. The gradient never: tiles add to dq in any
order, and the handlers do not pass the kernel's ``deterministic``.
A tile of keys may reach into the next packed document: those keys have weight 0, but 0 * NaN is NaN.
Sinks are added after the kernel, and its backward gets out and lse with them, which is exact: see ``shared.rewrites``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Timing
from attn_core.backends.shared import kernel_limits
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.in_jax import sink_gradient, usual_promotion, with_sinks
from attn_core.backends.shared.rewrites import whole_eights
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

FORWARD = Support(
    kernel="the FlashAttention 3 kernel for XLA",
    devices=("sm90",),
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
)
BACKWARD = replace(FORWARD, deterministic=False)

HANDLERS = ("fwd", "bwd", "varlen_fwd", "varlen_bwd")
"""The library's handlers, without the prefix ``dew_flash3_mha_``."""
OUR_NAMES = {handler: f"attn_core_flash3_{handler}" for handler in HANDLERS}
"""The names of the handlers in XLA programs."""
CUSTOM_CALLS = tuple(OUR_NAMES.values())
"""What ``jax.export`` refuses unless it is listed."""
TILE = 128
"""Queries of a tile, and the most rows by which the backward pads a document."""
WIDEST = 256


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses sizes that the launch grid or a 32-bit index cannot hold."""
    return (*kernel_limits.grid(spec, FORWARD.kernel), *_too_many_sums(spec))


def _too_many_sums(spec: AttentionSpec) -> Iterator[str]:
    """Yields refusals of gradients whose float32 sums the kernel would index with more than 32 bits.

    The sums are ``[batch, heads, rows, WIDEST]``. Their strides by head and by batch row are products of ints
    (flash_bwd_launch_template.h); the latter is not used if there is one batch row, as in packed calls.
    """
    if not spec.needs_backward:
        return
    sides = {"q_len": (spec.q_len, spec.num_heads), "kv_len": (spec.kv_len, spec.num_kv_heads)}
    for name, (length, heads) in sides.items():
        # Each document begins a tile of its own, and the last tile is filled up.
        rows = length + TILE * (1 + (spec.documents or 0))
        elements = rows * WIDEST * (heads if spec.batch > 1 else 1)
        if elements >= kernel_limits.COUNTABLE:
            yield f"backward: {name}={length}: {FORWARD.kernel} counts the sums of a gradient in 32 bits"


def modelled(spec: AttentionSpec) -> bool:
    """Returns whether the models of ``timing`` hold: flash3 splits the keys of few queries, and this kernel does not.

    Nor does it put the heads of a group into one tile, so tiles of few queries are mostly empty. flash3 splits no keys
    if tiles fill four fifths of an H200's 132 processors, or if there are few keys.
    """
    queries, keys = spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len
    tiles = spec.num_heads * (spec.documents or spec.batch) * -(-queries // TILE)
    return queries > TILE // 2 and (tiles >= 106 or keys <= 4 * TILE)


# The library

PACKAGE, LIBRARY, MAJORS = "dew_flash_attn", "libdew_flash_attn3.so", (13, 12)


def probe() -> str:
    """Loads the library, registers its handlers, and returns the installed distribution and its version."""
    distribution, version, _ = _installed()
    register()
    return f"{distribution} {version}"


@cached_once
def register() -> None:
    """Registers the library's handlers with JAX, once in a process.

    Raises:
        ImportError: if the package, a library or a handler is missing, or if the wheel is for another CUDA than JAX's.
    """
    import jax

    distribution, version, major = _installed()
    library = _load(major)
    for handler, name in OUR_NAMES.items():
        symbol = getattr(library, f"dew_flash3_mha_{handler}", None)
        if symbol is None:
            raise ImportError(f"{distribution} {version}: {LIBRARY} has no dew_flash3_mha_{handler}")
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform="CUDA")


def _installed() -> tuple[str, str, int]:
    """Returns the installed distribution, its version and the major CUDA version that it is for."""
    names = {major: f"dew-flash-attn-cu{major}" for major in MAJORS}
    found = {major: version for major, name in names.items() if (version := _version(name)) is not None}
    if not found:
        raise ImportError(f"neither {' nor '.join(names.values())} is installed")
    plugins = [major for major in MAJORS if _version(f"jax-cuda{major}-plugin") is not None]
    major = next((major for major in plugins if major in found), next(iter(found)))
    if plugins and major not in plugins:
        raise ImportError(f"{names[major]} needs jax-cuda{major}-plugin, and JAX has jax-cuda{plugins[0]}-plugin")
    return names[major], found[major], major


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _load(major: int) -> ctypes.CDLL:
    """Loads the library without importing its package, whose import would load FlashAttention 2."""
    package = find_spec(PACKAGE)
    folders = list(package.submodule_search_locations or ()) if package else []
    path = next((path for folder in folders if (path := Path(folder, LIBRARY)).is_file()), None)
    if path is None:
        raise ImportError(f"the package {PACKAGE} has no {LIBRARY}")
    runtime = _load_runtime(major)  # held until the library is loaded, which then finds it by its name
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{LIBRARY} cannot be loaded beside {runtime._name}: {error}") from error


def _load_runtime(major: int) -> ctypes.CDLL:
    """Loads the CUDA runtime: the one that JAX has loaded, or the system's, or that of NVIDIA's packages."""
    name, folders = f"libcudart.so.{major}", []
    for package in (f"nvidia.cu{major}", "nvidia.cuda_runtime"):
        try:
            module = find_spec(package)
        except ModuleNotFoundError:  # no package of NVIDIA at all
            continue
        folders += list(module.submodule_search_locations or ()) if module else []
    for path in (name, *(str(Path(folder, "lib", name)) for folder in folders)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise ImportError(f"{name} was not found; jax[cuda{major}] installs it")


# A call


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the attributes of the custom calls, for both directions."""
    edge = band(spec)
    lengths = {}
    if spec.packed:
        lengths = {"max_seqlen": spec.max_len_q or spec.q_len, "max_seqlen_k": spec.max_len_k or spec.kv_len}
    return {
        **lengths,
        "softmax_scale": spec.scale,
        "is_causal": edge.left is None and edge.right == 0,
        "window_size_left": -1 if edge.left is None else edge.left,
        "window_size_right": -1 if edge.right is None else edge.right,
    }


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. Traceable."""
    with usual_promotion():
        q, k, v = _padded(spec, *inputs[:3])
        # The last two results would hold split keys.
        types = ((q.shape, q.dtype), (spec.lse_shape, "float32"), ((1, 1, 1, 1), "float32"), ((1, 1, 1), "float32"))
        out, lse, _, _ = _run(spec, "fwd", types, q, k, v, *_offsets(inputs))
        out = out[..., : spec.value_dim]
        return with_sinks(out, lse, inputs.sinks) if spec.sinks else (out, lse)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: None
) -> Gradients:
    """Returns the gradients from the saved out and lse; traceable. dlse is None, because no claim covers it."""
    with usual_promotion():
        wide = _padded(spec, dout, *inputs[:3], out)
        _, q, k, v, _ = wide
        sequences = spec.documents or spec.batch
        rows = spec.q_len * (1 if spec.packed else spec.batch) + TILE * (sequences + 1)
        types: Types = (*((like.shape, like.dtype) for like in (q, k, v)), *[((spec.num_heads * rows,), "float32")] * 2)
        dq, dk, dv, _, _ = _run(spec, "bwd", types, *wide, lse, *_offsets(inputs))
        dsinks = sink_gradient(inputs.sinks, out, lse, dout) if spec.sinks else None
        dq, dk, dv = dq[..., : spec.head_dim], dk[..., : spec.head_dim], dv[..., : spec.value_dim]
        return Gradients(dq, dk, dv, dsinks=dsinks)


def _padded(spec: AttentionSpec, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays at the width that the kernel runs, with zeros in the other channels."""
    import jax.numpy as jnp

    width = whole_eights(max(spec.head_dim, spec.value_dim))

    def pad(array: jax.Array) -> jax.Array:
        missing = width - array.shape[-1]
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array

    return tuple(map(pad, arrays))


def _offsets(inputs: Inputs) -> tuple[jax.Array, ...]:
    return () if inputs.cu_seqlens_q is None else (inputs.cu_seqlens_q, inputs.cu_seqlens_k)


Types = tuple[tuple[tuple[int, ...], "DTypeLike"], ...]
"""(shape, dtype) of each result."""


def _run(spec: AttentionSpec, direction: str, types: Types, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs a handler on operands."""
    import numpy as np

    kinds = {bool: bool, int: np.int64, float: np.float64}  # a Python int or float would have 32 bits
    attributes = {name: kinds[type(value)](value) for name, value in lower(spec).items()}
    handler = f"varlen_{direction}" if spec.packed else direction
    return tuple(_call(OUR_NAMES[handler], _types_like(operands[0], types), *operands, **attributes))


def _types_like(operand: jax.Array, types: Types) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of results, varying over the same mesh axes of ``jax.shard_map`` as an operand."""
    import jax

    like: Any = jax.typeof(operand)
    whole = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
    varying = {"sharding": whole, "manual_axis_type": like.manual_axis_type}
    return tuple(jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), **varying) for shape, dtype in types)


def _call(
    target: str, types: tuple[jax.ShapeDtypeStruct, ...], *operands: jax.Array, **attributes: object
) -> Sequence[jax.Array]:
    import jax

    register()
    # Mapped elements run one after another: those that can be folded into the batch have been.
    return jax.ffi.ffi_call(target, types, vmap_method="sequential")(*operands, **attributes)


BACKEND = Backend(
    name="flash3_xla",
    framework="jax",
    requires="dew-flash-attn-cu13>=0.3.6 or dew-flash-attn-cu12>=0.3.6",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    modelled=modelled,
    # The kernels of flash3 and flash4 come first, because they have the same bits in both frameworks.
    preference={"cuda": 25},
    # Its forward is flash3's kernel. Its training took about as long as flash4's on an H200 on 2026-11-30 with 64 and
    # 128 channels, and 0.84 of it with 256 (docs/lab/notes.md). A sweep has not measured it.
    timing=Timing(model_of=("flash3", "flash4")),
    reaches_next_document=True,
)
