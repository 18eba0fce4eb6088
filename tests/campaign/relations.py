"""Relations: ways to write a call otherwise without changing its result (metamorphic tests).

A relation turns a trial into other trials, and joins their results to the results of the first. The joined results are
judged by the float64 reference of the first trial, so both sides of the relation are judged by one measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import has_functions
from attn_core.call.key_ranges import visible_in_ranges
from attn_core.call.masks import visible
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.cli.trial import Trial
from tests.campaign.case import is_banded

Arrays = dict[str, np.ndarray]


class Rewritten(NamedTuple):
    """The trials to run instead, and the function that joins their results."""

    trials: tuple[Trial, ...]
    join: Callable[[list[Arrays]], Arrays]


class Relation(NamedTuple):
    """A relation.

    Attributes:
        fits: whether it can rewrite calls of a spec.
        rewrite: rewrites a trial.
        splits: whether it gives several trials, of other lengths each time.
    """

    fits: Callable[[AttentionSpec], bool]
    rewrite: Callable[[Trial], Rewritten]
    splits: bool = False

    def takes(self, spec: AttentionSpec) -> bool:
        """Returns whether it fits, and the call has no function: relations move what functions count."""
        return not has_functions(spec) and self.fits(spec)


def _documents_apart(trial: Trial) -> Rewritten:
    """Runs each document as a call of its own; the tokens behind the last one as nothing."""
    spec, inputs = trial.spec, trial.inputs
    bounds = [inputs.cu_seqlens_q, inputs.cu_seqlens_k]
    pieces = [tuple(slice(int(cu[d]), int(cu[d + 1])) for cu in bounds) for d in range(spec.documents or 0)]
    trials = tuple(_document_alone(trial, rows, columns) for rows, columns in pieces)

    def join(results: list[Arrays]) -> Arrays:
        out = {"out": np.zeros(spec.out_shape)}
        if spec.return_lse:
            out["lse"] = np.full(spec.lse_shape, -np.inf)
        for name in trial.learned:
            out[f"d{name}"] = np.zeros(getattr(inputs, name).shape)
        for arrays, (rows, columns) in zip(results, pieces, strict=True):
            for name, array in arrays.items():
                if name == "lse":
                    out["lse"][:, rows] = array[0]
                elif name == "dsinks":
                    out[name] += array
                else:
                    out[name][rows if name in ("out", "dq") else columns] = array[0]
        return out

    return Rewritten(trials, join)


def _document_alone(trial: Trial, rows: slice, columns: slice) -> Trial:
    """Returns one document of a packed trial without functions as a row without documents."""
    spec, inputs = trial.spec, trial.inputs

    def cut(table: np.ndarray | None) -> np.ndarray | None:
        if table is None:
            return None
        table = table[:, :, rows] if table.shape[2] > 1 else table
        return table[..., columns] if table.shape[3] > 1 else table

    mask, bias = cut(inputs.mask), cut(inputs.bias)
    alone = replace(
        spec,
        q_len=rows.stop - rows.start,
        kv_len=columns.stop - columns.start,
        documents=None,
        max_len_q=None,
        max_len_k=None,
        mask_shape=None if mask is None else mask.shape,
        bias_shape=None if bias is None else bias.shape,
    )
    tensors = Inputs(
        inputs.q[None, rows],
        inputs.k[None, columns],
        inputs.v[None, columns],
        mask,
        bias,
        inputs.alibi_slopes,
        inputs.sinks,
    )
    dlse = None if trial.dlse is None else trial.dlse[None, :, rows]
    return Trial(alone, tensors, None, trial.dout[None, rows], dlse, trial.seed)


def _band_as_mask(trial: Trial) -> Rewritten:
    """Writes causal, window and mask as one mask."""
    spec, inputs = trial.spec, trial.inputs
    seen = visible(spec, inputs.mask)
    mask = np.broadcast_to(seen, np.broadcast_shapes(seen.shape, (1, 1, spec.q_len, spec.kv_len))).copy()
    plain = replace(spec, causal=False, window=(None, None), mask_shape=mask.shape)
    return Rewritten((trial._replace(spec=plain, inputs=inputs._replace(mask=mask)),), _only)


def _documents_as_mask(trial: Trial) -> Rewritten:
    """Writes packed documents, causal, window and mask as one mask of a row without documents."""
    spec, inputs = trial.spec, trial.inputs
    mask = visible(spec, inputs.mask, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    one_row = replace(
        spec,
        causal=False,
        window=(None, None),
        documents=None,
        max_len_q=None,
        max_len_k=None,
        mask_shape=mask.shape,
    )
    tensors = inputs._replace(
        q=inputs.q[None], k=inputs.k[None], v=inputs.v[None], mask=mask, cu_seqlens_q=None, cu_seqlens_k=None
    )
    dlse = None if trial.dlse is None else trial.dlse[None]

    def join(results: list[Arrays]) -> Arrays:
        (arrays,) = results
        return {name: array if name in ("dbias", "dsinks") else array[0] for name, array in arrays.items()}

    return Rewritten((Trial(one_row, tensors, None, trial.dout[None], dlse, trial.seed),), join)


def _keys_padded(trial: Trial) -> Rewritten:
    """Appends three keys of large values that a mask hides."""
    spec, inputs, more = trial.spec, trial.inputs, 3
    mask = np.ones((1, 1, 1, spec.kv_len), bool) if inputs.mask is None else inputs.mask
    mask = np.broadcast_to(mask, (*mask.shape[:3], spec.kv_len))
    mask = np.pad(mask, ((0, 0), (0, 0), (0, 0), (0, more)))
    keys, values = (
        np.pad(array, ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=8.0) for array in (inputs.k, inputs.v)
    )
    bias = inputs.bias
    if bias is not None and bias.shape[3] > 1:
        bias = np.pad(bias, ((0, 0), (0, 0), (0, 0), (0, more)))
    ranges = inputs.key_ranges
    if ranges is not None:  # the new keys' ranges are empty
        ranges = np.pad(ranges, ((0, 0), (0, 0), (0, more), (0, 0), (0, 0)))
    tables = {"bias_shape": bias, "key_ranges_shape": ranges}
    shapes: dict[str, Any] = {name: None if table is None else table.shape for name, table in tables.items()}
    longer = replace(spec, kv_len=spec.kv_len + more, mask_shape=mask.shape, **shapes)

    def join(results: list[Arrays]) -> Arrays:
        (arrays,) = results
        short: Arrays = {name: arrays[name][:, : spec.kv_len] for name in ("dk", "dv") if name in arrays}
        if "dbias" in arrays and arrays["dbias"].shape[3] > 1:
            short["dbias"] = arrays["dbias"][..., : spec.kv_len]
        return arrays | short

    changed = inputs._replace(k=keys, v=values, mask=mask, bias=bias, key_ranges=ranges)
    return Rewritten((trial._replace(spec=longer, inputs=changed),), join)


def _scale_in_q(trial: Trial) -> Rewritten:
    """Halves q and doubles the scale: both are exact, so that nothing but the order of multiplications can change."""
    assert trial.spec.scale is not None
    doubled = replace(trial.spec, scale=2 * trial.spec.scale)
    inputs = trial.inputs._replace(q=trial.inputs.q / 2)

    def join(results: list[Arrays]) -> Arrays:
        (arrays,) = results
        return arrays | ({"dq": arrays["dq"] / 2} if "dq" in arrays else {})

    return Rewritten((trial._replace(spec=doubled, inputs=inputs),), join)


def _upcast(trial: Trial) -> Rewritten:
    """Runs half-precision numbers in float32, whose result is nearer to the reference."""
    return Rewritten((trial._replace(spec=replace(trial.spec, dtype="float32", bias_dtype=None)),), _only)


def _as_documents(trial: Trial) -> Rewritten:
    """Packs the rows of a batch as documents of one row."""
    spec, inputs = trial.spec, trial.inputs

    def flat(array: Any) -> Any:
        return array.reshape(-1, *array.shape[2:])

    info = SeqInfo.from_lengths([spec.q_len] * spec.batch, [spec.kv_len] * spec.batch)
    packed = replace(
        spec,
        batch=1,
        q_len=spec.batch * spec.q_len,
        kv_len=spec.batch * spec.kv_len,
        documents=spec.batch,
        max_len_q=spec.q_len,
        max_len_k=spec.kv_len,
    )
    tensors = inputs._replace(
        q=flat(inputs.q),
        k=flat(inputs.k),
        v=flat(inputs.v),
        cu_seqlens_q=info.cu_seqlens_q,
        cu_seqlens_k=info.cu_seqlens_k,
    )
    by_head = None if trial.dlse is None else np.concatenate(list(trial.dlse), -1)

    def join(results: list[Arrays]) -> Arrays:
        (arrays,) = results
        rows = {
            name: array if name == "dsinks" else array.reshape(spec.batch, -1, *array.shape[1:])
            for name, array in arrays.items()
            if name != "lse"
        }
        if "lse" in arrays:
            rows["lse"] = arrays["lse"].reshape(spec.num_heads, spec.batch, spec.q_len).swapaxes(0, 1)
        return rows

    return Rewritten((Trial(packed, tensors, info, flat(trial.dout), by_head, trial.seed),), join)


AXES = {
    **{name: {"batch": 0, "heads": 2} for name in ("out", "dq")},
    **{name: {"batch": 0, "kv_heads": 2} for name in ("dk", "dv")},
    "lse": {"batch": 0, "heads": 1},
    "dbias": {"batch": 0, "heads": 1},
    "dsinks": {"heads": 0},
}
"""The axes of each result of a call without packed documents."""

INPUT_AXES = {
    "q": AXES["dq"],
    "k": AXES["dk"],
    "v": AXES["dv"],
    "mask": AXES["lse"],
    "bias": AXES["lse"],
    "sinks": AXES["dsinks"],
    "key_ranges": {"batch": 0, "kv_heads": 1},
}


def _permuted(trial: Trial, orders: dict[str, np.ndarray]) -> Rewritten:
    """Permutes the batch or the heads of everything."""

    def taken(array: Any, axes: dict[str, int], inverse: bool = False) -> Any:
        for name, order in orders.items():
            # An axis of 1 is shared by all rows or heads.
            if array is not None and name in axes and array.shape[axes[name]] == len(order):
                array = np.take(array, np.argsort(order) if inverse else order, axes[name])
        return array

    inputs = {name: taken(getattr(trial.inputs, name), axes) for name, axes in INPUT_AXES.items()}
    slopes = trial.inputs.alibi_slopes
    if slopes is not None:
        axes = {"heads": 0} if slopes.ndim == 1 else {"batch": 0, "heads": 1}
        inputs["alibi_slopes"] = taken(slopes, axes)
    dlse = taken(trial.dlse, AXES["lse"])
    other = trial._replace(inputs=trial.inputs._replace(**inputs), dout=taken(trial.dout, AXES["out"]), dlse=dlse)

    def join(results: list[Arrays]) -> Arrays:
        (arrays,) = results
        return {name: taken(array, AXES[name], inverse=True) for name, array in arrays.items()}

    return Rewritten((other,), join)


def _rows_permuted(trial: Trial) -> Rewritten:
    """Moves every row of the batch."""
    return _permuted(trial, {"batch": _rotation(trial.spec.batch, trial.seed)})


def _heads_permuted(trial: Trial) -> Rewritten:
    """Moves every head."""
    spec = trial.spec
    kv_order = _rotation(spec.num_kv_heads, trial.seed)
    # Query heads move with their kv head, and change places inside its group.
    order = [kv * spec.group_size + _rotation(spec.group_size, trial.seed) for kv in kv_order]
    return _permuted(trial, {"heads": np.concatenate(order), "kv_heads": kv_order})


def _ranges_as_mask(trial: Trial) -> Rewritten:
    """Writes key ranges and mask as one mask."""
    spec, inputs = trial.spec, trial.inputs
    seen = visible_in_ranges(inputs.key_ranges, spec.q_len, spec.num_heads)
    mask = seen if inputs.mask is None else seen & inputs.mask
    plain = replace(spec, key_ranges_shape=None, mask_shape=mask.shape)
    return Rewritten((trial._replace(spec=plain, inputs=inputs._replace(key_ranges=None, mask=mask)),), _only)


def _rotation(count: int, seed: int) -> np.ndarray:
    """Returns an order of ``count`` places that moves each of them, if there is more than one."""
    return np.roll(np.arange(count), 1 + seed % max(count - 1, 1))


def _only(results: list[Arrays]) -> Arrays:
    return results[0]


def _dense(spec: AttentionSpec) -> bool:
    return not spec.packed and not spec.dropout and not spec.empty


def _no_tables(spec: AttentionSpec) -> bool:
    return not (spec.mask_shape or spec.bias_shape or spec.key_ranges_shape) and len(spec.alibi_shape or ()) < 2


RELATIONS: dict[str, Relation] = {
    "batch rows permuted": Relation(lambda s: _dense(s) and s.batch > 1, _rows_permuted),
    "heads permuted": Relation(lambda s: _dense(s) and s.num_heads > 1, _heads_permuted),
    # A bias that all documents share would need the sum of its gradients.
    "documents apart": Relation(
        lambda s: s.packed and not (s.dropout or s.bias_gradient or s.key_ranges_shape), _documents_apart, True
    ),
    "key ranges as a mask": Relation(
        lambda s: bool(s.key_ranges_shape) and not (s.empty or s.dropout), _ranges_as_mask
    ),
    "rows as documents": Relation(lambda s: _dense(s) and _no_tables(s), _as_documents),
    "causal and window as a mask": Relation(lambda s: _dense(s) and is_banded(s), _band_as_mask),
    # The distances of ALiBi count within a document. Tokens behind the last one have no sinks; rows that see none do.
    "documents as a mask": Relation(
        lambda s: s.packed and not (s.dropout or s.empty or s.sinks) and s.alibi_shape is None, _documents_as_mask
    ),
    # More keys move a bottom-right diagonal.
    "hidden keys appended": Relation(
        lambda s: _dense(s) and (s.alignment == "top_left" or not (is_banded(s) or s.alibi_shape)), _keys_padded
    ),
    "scale moved into q": Relation(_dense, _scale_in_q),
    "float32 instead of a half dtype": Relation(
        lambda s: _dense(s) and s.dtype in ("bfloat16", "float16") and not s.rounds_bias, _upcast
    ),
}
