"""Calls with rings of exact newest tokens beside quantised pages. What no key may be read from is NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from oracle_cases import rounded
from paged_cases import PagedCall


def with_rings(call: PagedCall, recent: int, seed: int = 0) -> PagedCall:
    """A quantised call in which some sequences have a ring, good from some position on.

    The tokens of a ring are not those of its pages, so that reading the wrong one shows.
    """
    random, lengths = np.random.default_rng(seed), call.inputs.seq_lens
    rings = random.permutation(len(lengths) + 2)[: len(lengths)]
    rings = np.where(random.random(len(lengths)) < 0.2, -1, rings)
    firsts = [int(random.integers(0, n + 1)) if random.random() < 0.5 else 0 for n in lengths]
    spec, arrays = call.spec, []
    for dim in (spec.head_dim, spec.value_dim):
        array = np.full((len(lengths) + 2, recent, spec.num_kv_heads, dim), np.nan)
        for ring, first, length in zip(rings, firsts, lengths, strict=True):
            for position in range(max(first, length - recent), length):
                if ring >= 0:
                    array[ring, position % recent] = random.standard_normal((spec.num_kv_heads, dim))
        arrays.append(rounded(array, spec.dtype))
    rows = np.stack([rings, firsts], 1).astype(np.int32)
    inputs = call.inputs._replace(k_recent=arrays[0], v_recent=arrays[1], recent_rows=rows)
    return replace(call, spec=replace(spec, paged=replace(spec.paged, recent=recent)), inputs=inputs)
