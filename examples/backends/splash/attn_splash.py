"""JAX's splash attention for TPUs as a plug-in: ``jax.experimental.pallas.ops.tpu.splash_attention``.

Nobody ran it on a TPU for this project; a CPU runs it in Pallas's interpret mode, which is right and very slow.

What the kernel lacks or gets wrong, and this file does:
- It takes no scale: q is scaled here. If that would round bfloat16, the kernel gets float32.
- Lengths must be multiples of 128, or it leaves out the last tokens: q, k and v are padded, and the mask hides the
  padding. Channels are padded to the 128 of a vector, as a TPU's memory does.
- Rows that see no key are the mean of some values, or NaN. They become 0, with a log-sum-exp of -inf and no gradient.
- It sums the gradient of sinks in the inputs' dtype before jax 0.12. It is summed here, in float32.
It has no batch: the heads of all rows are heads of one row. The backward is ``jax.vjp`` of the kernel, which runs the
forward once more; XLA merges the two, because they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from attn_core import AttentionSpec
from attn_core.backends import Backend, Band, Build, Gradients, Inputs, Support, band

CLAIMS = Support(
    kernel="JAX's splash attention",
    devices=("cpu",),
    dtypes=("bfloat16", "float32"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    sinks=True,
    lse=True,
)
LANES = 128
"""The elements of a TPU's vector. Lengths and channels are padded to a multiple of it."""
BLOCKS = (512, 256, 128)
"""Lengths of the kernel's blocks: the first that divides the padded length."""
MOST_INTERPRETED = 2**22  # scores, which take seconds


@dataclass(frozen=True)
class InBand:
    """Whether queries see keys by a band, among the first ``kv_len`` keys. Plain data, so that JAX traces once."""

    edge: Band
    kv_len: int

    def __call__(self, queries: Any, keys: Any) -> Any:
        return (keys < self.kv_len) & self.edge.contains(queries, keys)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses long calls in interpret mode; on a TPU every combination of claims works."""
    scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
    if device == "tpu" or scores <= MOST_INTERPRETED:
        return ()
    why = f"splash attention is interpreted on a CPU, up to {MOST_INTERPRETED} scores, not {scores}"
    return (f"q_len {spec.q_len} and kv_len {spec.kv_len}: {why}",)


def probe() -> str:
    """Imports the kernel's symbols and returns jax's version."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention

    _ = (splash_attention.make_splash_mha, splash_attention.BlockSizes, _mask_class())
    return jax.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns how a call becomes one of splash: its padded lengths and channels, blocks, dtype and what is seen."""
    sizes = (spec.q_len, spec.kv_len, spec.head_dim, spec.value_dim)
    padded = tuple(-(-size // LANES) * LANES for size in sizes)
    is_exact = spec.dtype == "float32" or math.frexp(spec.scale or 1.0)[0] == 0.5  # a power of two rounds nothing
    return {
        "lengths": padded[:2],  # of queries and keys
        "blocks": tuple(next(block for block in BLOCKS if length % block == 0) for length in padded[:2]),
        "widths": padded[2:],  # of q and k, and of v
        "scale": spec.scale,
        "softcap": spec.softcap,
        "dtype": spec.dtype if is_exact else "float32",
        "visible": InBand(band(spec), spec.kv_len),
    }


def forward(spec: AttentionSpec, inputs: Inputs, *, interpret: bool) -> tuple[Any, Any]:
    """Returns (out, lse); traceable."""
    import jax.numpy as jnp

    with _usual_settings():
        with_lse = spec.return_lse or spec.needs_backward
        results = _kernel(spec, with_lse, interpret)(*_operands(spec, inputs), None, _sinks(spec, inputs))
        out, lse = (results[0], results[1][0]) if with_lse else (results, None)
        out = _tokens_first(out, spec.out_shape).astype(inputs.q.dtype)
        lse = jnp.zeros(spec.lse_shape) if lse is None else lse[:, : spec.q_len].reshape(spec.lse_shape)
        sees = _sees_key(spec)
        return jnp.where(sees[:, None, None], out, jnp.zeros_like(out)), jnp.where(sees, lse, -jnp.inf)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, *, interpret: bool
) -> Gradients:
    """Returns the gradients; traceable."""
    import jax
    import jax.numpy as jnp

    with _usual_settings():
        how, sinks = lower(spec), _sinks(spec, inputs)
        # With a gradient of 0 the kernel's own values of a row that sees no key reach no gradient.
        dout = jnp.where(_sees_key(spec)[:, None, None], dout, jnp.zeros_like(dout))
        kernel = _kernel(spec, False, interpret)
        _, pull = jax.vjp(lambda *qkv: kernel(*qkv, None, sinks), *_operands(spec, inputs))
        dq, dk, dv = pull(_heads_first(dout.astype(how["dtype"]), how["lengths"][0], how["widths"][1]))
        padded = (dq.astype("float32") * how["scale"], dk, dv)
        gradients = (_tokens_first(d, x.shape).astype(x.dtype) for d, x in zip(padded, inputs[:3], strict=True))
        return Gradients(*gradients, dsinks=_sink_gradient(inputs, out, lse, dout) if spec.sinks else None)


@contextmanager
def _usual_settings() -> Iterator[None]:
    """JAX's defaults for promotion, whatever the caller has set, and float32 products that are not rounded."""
    import jax

    usual = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with usual[0], usual[1], jax.default_matmul_precision("highest"):
        yield


def _kernel(spec: AttentionSpec, with_lse: bool, interpret: bool) -> Any:
    """Returns splash's kernel of a call. It skips the blocks that the mask hides."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    how = lower(spec)
    queries, keys = how["blocks"]
    mask = _mask_class()(how["lengths"], how["visible"])
    return splash.make_splash_mha(
        splash.splash_attention_mask.MultiHeadMask([mask] * (spec.batch * spec.num_heads)),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(queries, keys, keys, queries, keys, keys, queries, keys),
        save_residuals=with_lse,
        attn_logits_soft_cap=how["softcap"],
        interpret=interpret,
    )


@cache
def _mask_class() -> Any:
    """Returns a class of splash masks of an ``InBand``: splash looks at its blocks while JAX traces."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    class BandMask(splash_attention_mask.Mask):
        """A splash mask of padded lengths. splash calls ``mask_function`` inside its kernels."""

        def __init__(self, shape: tuple[int, int], mask_function: InBand) -> None:
            self._shape, self.mask_function = shape, mask_function
            self.q_sequence = np.arange(shape[0], dtype=np.int32)

        @property
        def shape(self) -> tuple[int, int]:
            return self._shape

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            queries, keys = self.q_sequence[index[0]], np.arange(self._shape[1], dtype=np.int32)[index[1]]
            return np.broadcast_to(self.mask_function(queries[:, None], keys[None, :]), (len(queries), len(keys)))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, BandMask) and hash(self) == hash(other)

        def __hash__(self) -> int:
            return hash((self._shape, self.mask_function))

    return BandMask


def _sees_key(spec: AttentionSpec) -> np.ndarray:
    """Returns which queries see a key, bool ``[q_len]``."""
    edge = band(spec)
    ranges = (edge.keys_of(row, row, spec.kv_len) for row in range(spec.q_len))
    return np.array([start < stop for start, stop in ranges])


def _operands(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Returns the scaled q, and k and v, as ``[batch * heads, padded length, padded channels]``."""
    how = lower(spec)
    (rows, keys), (width, value_width) = how["lengths"], how["widths"]
    q = (inputs.q.astype("float32") * how["scale"]).astype(how["dtype"])
    k, v = (array.astype(how["dtype"]) for array in (inputs.k, inputs.v))
    return _heads_first(q, rows, width), _heads_first(k, keys, width), _heads_first(v, keys, value_width)


def _heads_first(array: Any, length: int, width: int) -> Any:
    """``[batch, tokens, heads, channels]`` -> ``[batch * heads, length, width]``, padded by zeros."""
    import jax.numpy as jnp

    array = array.swapaxes(1, 2)
    array = array.reshape(-1, *array.shape[2:])
    return jnp.pad(array, ((0, 0), (0, length - array.shape[1]), (0, width - array.shape[2])))


def _tokens_first(array: Any, shape: tuple[int, ...]) -> Any:
    """``[batch * heads, length, width]`` -> ``[batch, tokens, heads, channels]``."""
    batch, tokens, heads, channels = shape
    return array[:, :tokens, :channels].reshape(batch, heads, tokens, channels).swapaxes(1, 2)


def _sinks(spec: AttentionSpec, inputs: Inputs) -> Any:
    import jax.numpy as jnp

    return jnp.tile(inputs.sinks.astype("float32"), spec.batch) if spec.sinks else None


def _sink_gradient(inputs: Inputs, out: Any, lse: Any, dout: Any) -> Any:
    """Returns minus the sum of exp(sink - lse) * (dout . out) over the rows that see a key."""
    import jax.numpy as jnp

    delta = (dout.astype("float32") * out.astype("float32")).sum(-1).swapaxes(1, 2)  # [batch, heads, q_len]
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(inputs.sinks.astype("float32")[:, None] - lse))
    return -(weight * delta).sum((0, 2)).astype(inputs.sinks.dtype)


def record_on(device: str, on: Mapping[str, Backend]) -> Backend:
    """Returns the record for a device: a CPU interprets the kernel."""
    claims = replace(CLAIMS, devices=(device,), unproven=device == "tpu")
    interpret = device == "cpu"
    return Backend(
        name="jax_splash",
        framework="jax",
        requires="jax>=0.10",
        forward_claims=claims,
        backward_claims=claims,
        refuses=refuses,
        probe=probe,
        lower=lower,
        forward=partial(forward, interpret=interpret),
        backward=partial(backward, interpret=interpret),
        on=on,
    )


BACKEND = record_on("cpu", on={"tpu": record_on("tpu", on={})})
