"""The mask probe: builds inputs whose output shows which keys each query sees.

A tolerance on the output cannot detect one key too many among thousands. The probe's inputs make every visible (query,
key) pair a positive number of the output, so a backend's mask is compared with the spec's exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_core.call.arithmetic import dropout_keeps
from attn_core.call.functions import named, scored
from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Array, Inputs
from attn_core.errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, eq=False)
class MaskProbe:
    """Inputs that show a backend's mask, and the mask that the spec defines.

    q is 0, so every visible key gets the same weight. The values are the rows of an identity matrix over (key, kv head)
    pairs, so channel c of an output row is positive if and only if that row reads the pair c. One call shows
    ``value_dim`` pairs; ``inputs`` yields as many calls as all pairs need.

    Attributes:
        spec: the call.
        expected: bool ``[batch, heads, q_len, kv_heads, kv_len]``: True if query head h in row i reads key j of kv head
            g. Weights that dropout drops are False.
        shared: the inputs that all calls share. q, k, bias, slopes and sinks are 0; mask, cu_seqlens and rng are the
            caller's; v is None.
    """

    spec: AttentionSpec
    expected: np.ndarray
    shared: Inputs

    @property
    def calls(self) -> int:
        """The number of calls that show all pairs: one for every ``value_dim`` (key, kv head) pairs."""
        return -(-self.spec.kv_len * self.spec.num_kv_heads // self.spec.value_dim)

    def inputs(self) -> Iterator[Inputs]:
        """Yields the inputs of each call as numpy arrays.

        Floating-point arrays are float32 (float64 if the spec is). Cast q, k and v to ``spec.dtype``; they hold only 0
        and 1, which every dtype can represent.
        """
        spec = self.spec
        # cells[j, g] numbers the pair of key j and kv head g; call c shows the pairs c * value_dim onwards.
        cells = np.arange(spec.kv_len * spec.num_kv_heads).reshape(spec.kv_len, spec.num_kv_heads, 1)
        for call in range(self.calls):
            channel = call * spec.value_dim + np.arange(spec.value_dim)
            values = (cells == channel).astype(spec.lse_dtype)  # [kv_len, kv_heads, value_dim]
            shape = values.shape if spec.packed else (spec.batch, *values.shape)
            yield self.shared._replace(v=np.ascontiguousarray(np.broadcast_to(values, shape)))

    def visible_pairs(self, outs: Iterable[ArrayLike]) -> np.ndarray:
        """Returns the mask that a backend applied, in the shape of ``expected``.

        Args:
            outs: the outputs of all calls in the order of ``inputs``, each an array of ``spec.out_shape``.

        Raises:
            ShapeError: if an output does not have the shape ``spec.out_shape``, or an output is missing.
        """
        spec, arrays = self.spec, [np.asarray(out) for out in outs]
        if [array.shape for array in arrays] != [spec.out_shape] * self.calls:
            raise ShapeError(
                f"outs: expected {self.calls} outputs of shape {list(spec.out_shape)}, "
                f"got {[list(array.shape) for array in arrays]}"
            )
        if not arrays:
            return np.zeros_like(self.expected)
        # The last call may have channels beyond the last pair: cut them off.
        channels = np.concatenate([array > 0 for array in arrays], axis=-1)[..., : spec.kv_len * spec.num_kv_heads]
        pairs = channels.reshape(spec.batch, spec.q_len, spec.num_heads, spec.kv_len, spec.num_kv_heads)
        return pairs.transpose(0, 2, 1, 4, 3)

    def differences(self, outs: Iterable[ArrayLike]) -> list[str]:
        """Returns a sentence for each pair on which the backend's mask differs from the spec's; empty if none does.

        Args and errors are the same as for ``visible_pairs``.
        """
        seen = self.visible_pairs(outs)
        return [
            f"batch {b}, head {h}, query {i}: key {j} of kv head {g} is "
            + ("seen though hidden" if seen[b, h, i, g, j] else "hidden though visible")
            for b, h, i, g, j in np.argwhere(seen != self.expected).tolist()
        ]


def mask_probe(
    spec: AttentionSpec,
    *,
    mask: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    rng: Any = None,
    key_ranges: Array | None = None,
    aux: Sequence[Array] = (),
) -> MaskProbe:
    """Builds the mask probe of a spec.

    Run a backend on each of ``probe.inputs()`` and pass the outputs to ``probe.differences``.

    Args:
        mask: bool, of shape ``spec.mask_shape``; None if the spec has no mask.
        cu_seqlens_q, cu_seqlens_k: int32 ``[documents + 1]`` if the spec is packed.
        rng: two integer words (seed, offset) if the spec has dropout.
        key_ranges: int32, of shape ``spec.key_ranges_shape``; None if the spec has none.
        aux: the arrays of its functions.
    """
    full = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    pairs = np.broadcast_to(visible(spec, mask, cu_seqlens_q, cu_seqlens_k, key_ranges, aux), full)
    if spec.score_mod is not None:  # all scores are 0
        pairs = pairs & (scored(spec, np.zeros(full), aux)[0] != -np.inf)
    if spec.dropout:  # a dropped weight is 0, so its pair does not show in the output
        seed, offset = (int(word) for word in rng)
        pairs = pairs & dropout_keeps((seed, offset), tuple(np.ogrid[tuple(slice(n) for n in full)]), spec.dropout)
    reads = np.arange(spec.num_heads)[:, None] // spec.group_size == np.arange(spec.num_kv_heads)  # [heads, kv_heads]
    shared = Inputs(
        q=_zeros(spec, spec.q_len, spec.num_heads),
        k=_zeros(spec, spec.kv_len, spec.num_kv_heads),
        v=None,
        mask=mask,
        # The features of the spec stay in the call, but as zeros, so that no visible weight underflows to 0.
        bias=None if spec.bias_shape is None else np.zeros(spec.bias_shape, spec.lse_dtype),
        alibi_slopes=None if spec.alibi_shape is None else np.zeros(spec.alibi_shape, spec.lse_dtype),
        sinks=np.zeros(spec.num_heads, spec.lse_dtype) if spec.sinks else None,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_ranges=key_ranges,
        rng=rng,
        **named(aux),
    )
    return MaskProbe(spec, pairs[:, :, :, None, :] & reads[None, :, None, :, None], shared)


def _zeros(spec: AttentionSpec, length: int, heads: int) -> np.ndarray:
    shape = (length, heads, spec.head_dim)
    return np.zeros(shape if spec.packed else (spec.batch, *shape), spec.lse_dtype)
