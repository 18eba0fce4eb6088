"""The mask probe: inputs whose output *is* the visible set, so masks are compared bit for bit, without tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_core.call import dropout
from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.errors import ShapeError


@dataclass(frozen=True, eq=False)
class MaskProbe:
    """Reads one call's visible set out of a backend, in as many calls as its value channels require.

    With q = 0 every visible key has the same weight, and the values are pieces of an identity matrix over (key, kv
    head), so channel c of an output is positive iff its row saw the key and the kv head that c stands for.

    Attributes:
        spec: the call.
        expected: bool ``[batch, heads, q_len, kv_heads, kv_len]``: does query head h, row i, read key j of kv head g.
            Weights that dropout drops count as unseen.
        shared: the call's mask, cu_seqlens and rng, with neutral (zero) q, k, bias, slopes and sinks.
    """

    spec: AttentionSpec
    expected: np.ndarray
    shared: Inputs

    @property
    def calls(self) -> int:
        """The number of calls for the whole visible set: one for every value_dim pairs of key and kv head."""
        return -(-self.spec.kv_len * self.spec.num_kv_heads // self.spec.value_dim)

    def inputs(self) -> Iterator[Inputs]:
        """Yields each call's inputs, numpy in float32 (float64 for a float64 spec); cast q, k, v to ``spec.dtype``."""
        spec = self.spec
        cells = np.arange(spec.kv_len * spec.num_kv_heads).reshape(spec.kv_len, spec.num_kv_heads, 1)
        for call in range(self.calls):
            channel = call * spec.value_dim + np.arange(spec.value_dim)
            values = (cells == channel).astype(spec.lse_dtype)  # [kv_len, kv_heads, value_dim]
            shape = values.shape if spec.packed else (spec.batch, *values.shape)
            yield self.shared._replace(v=np.ascontiguousarray(np.broadcast_to(values, shape)))

    def seen(self, outs: Iterable[Any]) -> np.ndarray:
        """The visible set that the outputs of the calls show, in the shape of ``expected``.

        Raises:
            ShapeError: when an output has another shape than ``spec.out_shape``, or a call's output is missing.
        """
        spec, arrays = self.spec, [np.asarray(out) for out in outs]
        if [array.shape for array in arrays] != [spec.out_shape] * self.calls:
            raise ShapeError(
                f"outs: expected {self.calls} outputs of shape {list(spec.out_shape)}, "
                f"got {[list(array.shape) for array in arrays]}"
            )
        if not arrays:
            return np.zeros_like(self.expected)
        channels = np.concatenate([array > 0 for array in arrays], axis=-1)[..., : spec.kv_len * spec.num_kv_heads]
        pairs = channels.reshape(spec.batch, spec.q_len, spec.num_heads, spec.kv_len, spec.num_kv_heads)
        return pairs.transpose(0, 2, 1, 4, 3)

    def differences(self, outs: Iterable[Any]) -> list[str]:
        """A sentence for each pair seen though hidden, or hidden though visible; empty when the mask is right."""
        seen = self.seen(outs)
        return [
            f"batch {b}, head {h}, query {i}: key {j} of kv head {g} is "
            + ("seen though hidden" if seen[b, h, i, g, j] else "hidden though visible")
            for b, h, i, g, j in np.argwhere(seen != self.expected).tolist()
        ]


def mask_probe(
    spec: AttentionSpec, *, mask: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, rng: Any = None
) -> MaskProbe:
    """The probe of a spec with its mask (bool, ``spec.mask_shape``), cu_seqlens and rng, as Inputs has them.

    Run a backend on each of ``probe.inputs()`` and hand the outputs to ``probe.differences``.
    """
    full = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    pairs = np.broadcast_to(visible(spec, mask, cu_seqlens_q, cu_seqlens_k), full)
    if spec.dropout:
        seed, offset = (int(word) for word in rng)
        pairs = pairs & dropout.keep((seed, offset), tuple(np.ogrid[tuple(slice(n) for n in full)]), spec.dropout)
    reads = np.arange(spec.num_heads)[:, None] // spec.group_size == np.arange(spec.num_kv_heads)  # [heads, kv_heads]
    shared = Inputs(
        q=_zeros(spec, spec.q_len, spec.num_heads),
        k=_zeros(spec, spec.kv_len, spec.num_kv_heads),
        v=None,
        mask=mask,
        bias=None if spec.bias_shape is None else np.zeros(spec.bias_shape, spec.lse_dtype),
        alibi_slopes=None if spec.alibi_shape is None else np.zeros(spec.alibi_shape, spec.lse_dtype),
        sinks=np.zeros(spec.num_heads, spec.lse_dtype) if spec.sinks else None,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        rng=rng,
    )
    return MaskProbe(spec, pairs[:, :, :, None, :] & reads[None, :, None, :, None], shared)


def _zeros(spec: AttentionSpec, length: int, heads: int) -> np.ndarray:
    shape = (length, heads, spec.head_dim)
    return np.zeros(shape if spec.packed else (spec.batch, *shape), spec.lse_dtype)
