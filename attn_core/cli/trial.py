"""Trials: a spec with random tensors, and a framework's results for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import AUX, KINDS, has_functions, named
from attn_core.call.options import ON_PAGES, PLAIN
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness.accuracy import Accuracy, Expected, expect
from attn_core.expressions import Expression, TracedFunction
from attn_core.expressions.tracing import Aux


class Trial(NamedTuple):
    """A call to run."""

    spec: AttentionSpec
    # numpy arrays laid out as Inputs says, with pages as PagedInputs: float64 arrays whose values the spec's dtype
    # represents exactly
    inputs: Any
    seq_info: SeqInfo | None  # the packed documents with numpy offsets, or None
    # the gradients of the output and of the log-sum-exp. dlse is None unless the spec has a backward and returns
    # the log-sum-exp.
    dout: np.ndarray
    dlse: np.ndarray | None
    seed: int = 0  # of the numbers

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the inputs whose gradients are computed."""
        if not self.spec.needs_backward:
            return ()
        arrays = [AUX[number] for number in self.spec.aux_gradients]
        return ("q", "k", "v", *("bias",) * self.spec.bias_gradient, *("sinks",) * self.spec.sinks, *arrays)


def keywords_of(spec: AttentionSpec, seq_info: SeqInfo | None) -> dict[str, Any]:
    """Returns the keyword arguments of ``attention``, or of ``paged_attention``, other than tensors."""
    if spec.paged is not None:
        return {name: getattr(spec, name) for name in (*ON_PAGES, "window", "max_len_q")}
    return {name: getattr(spec, name) for name in PLAIN} | {"seq_info": seq_info} | functions_of(spec)


Arrays = dict[str, np.ndarray]
"""A backend's results in a framework: float64 copies by name (out, lse, dq, ...)."""


def draw(spec: AttentionSpec, seq_info: SeqInfo | None = None, seed: int = 0) -> Trial:
    """Draws the tensors of a spec: standard normal values, a mask that hides a fifth, slopes ``2^(-8 h / heads)``."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, dtype: str = spec.dtype) -> np.ndarray:
        return rounded(random.standard_normal(shape), dtype)

    row, extras = () if spec.packed else (spec.batch,), spec.lse_dtype
    offsets = (None, None) if seq_info is None else (seq_info.cu_seqlens_q, seq_info.cu_seqlens_k)
    slopes = rounded(2.0 ** (-8.0 * np.arange(1, spec.num_heads + 1) / spec.num_heads), extras)
    inputs = Inputs(
        q=normal(*row, spec.q_len, spec.num_heads, spec.head_dim),
        k=normal(*row, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        v=normal(*row, spec.kv_len, spec.num_kv_heads, spec.value_dim),
        mask=None if spec.mask_shape is None else random.random(spec.mask_shape) > 0.2,
        bias=None if spec.bias_shape is None else normal(*spec.bias_shape, dtype=spec.bias_dtype or spec.dtype),
        alibi_slopes=None if spec.alibi_shape is None else np.broadcast_to(slopes, spec.alibi_shape).copy(),
        sinks=normal(spec.num_heads, dtype=extras) if spec.sinks else None,
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        key_ranges=None if spec.key_ranges_shape is None else _ranges(spec, seed),
        **named(aux_arrays(spec.aux, seed)),
    )
    # Only a log-sum-exp that is returned can have a gradient.
    both = spec.needs_backward and spec.return_lse
    dlse = normal(*spec.lse_shape, dtype=spec.lse_dtype) if both else None
    return Trial(spec, inputs, seq_info, normal(*spec.out_shape), dlse, seed)


def _ranges(spec: AttentionSpec, seed: int) -> np.ndarray:
    """Draws key ranges: a quarter empty, the others of any length."""
    random = np.random.default_rng((seed, 1))  # of its own, so that other numbers do not depend on them
    ranges = np.sort(random.integers(0, spec.q_len + 1, spec.key_ranges_shape, np.int32), -1)
    return np.where(random.random((*ranges.shape[:-1], 1)) < 0.25, ranges[..., :1], ranges)


def aux_arrays(aux: tuple[Aux, ...], seed: int) -> list[np.ndarray]:
    """Returns random arrays: ints from 0 to 3, so that documents repeat."""
    random = np.random.default_rng((seed, 31))
    arrays = []
    for shape, dtype in aux:
        if dtype == "bool":
            arrays.append(random.random(shape) < 0.6)
        elif dtype == "int32":
            arrays.append(random.integers(0, 4, shape, np.int32))
        else:
            arrays.append(abs(random.standard_normal(shape)).astype(np.float32).astype(np.float64))
    return arrays


def as_keywords(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``attention``, in which aux0 to aux3 are one tuple, or of ``paged_attention``."""
    if "block_table" in arrays:
        return {{"k": "k_pages", "v": "v_pages"}.get(name, name): array for name, array in arrays.items()}
    names = sorted(name for name in arrays if name in AUX)
    rest = {name: array for name, array in arrays.items() if name not in names}
    return rest | ({"aux": tuple(arrays[name] for name in names)} if names else {})


@lru_cache(maxsize=256)  # one object, because jitted programs are known by it
def traced(tree: Expression, aux: int) -> TracedFunction:
    """Returns an expression as ``attention`` takes it. ``aux``: the number of arrays."""
    return TracedFunction(tree, (), aux)


def functions_of(spec: AttentionSpec) -> dict[str, TracedFunction]:
    """Returns the functions of a call as keywords of ``attention``; none for a call without."""
    trees = {name: getattr(spec, name) for name in KINDS}
    return {name: traced(tree, len(spec.aux)) for name, tree in trees.items() if tree is not None}


def arrays_of_call(trial: Trial) -> tuple[str, ...]:
    """Returns the arrays of a call as fields of its inputs; key_ranges and aux arrays if it has them, because few
    functions take them."""
    if trial.spec.paged is not None:
        return ("q", "k", "v", "block_table", "seq_lens", "cu_seqlens_q", "sinks")
    usual = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks")
    return (*usual, *(name for name in ("key_ranges", *AUX) if getattr(trial.inputs, name) is not None))


def is_plain(spec: AttentionSpec) -> bool:
    """Returns whether a call has only features that a framework's own function may have arguments for."""
    special = spec.packed or spec.sinks or spec.softcap is not None or spec.alibi_shape is not None
    return not (special or spec.key_ranges_shape is not None or has_functions(spec) or spec.return_lse)


def dtype_of(trial: Trial, name: str) -> str:
    """Returns the dtype of one of the trial's inputs in a framework."""
    array = getattr(trial.inputs, name)
    if array.dtype in (np.bool_, np.int32):
        return str(array.dtype)
    if name in AUX:
        return str(trial.spec.aux[AUX.index(name)].dtype)
    if name in ("alibi_slopes", "sinks"):
        return trial.spec.lse_dtype
    return trial.spec.bias_dtype or trial.spec.dtype if name == "bias" else trial.spec.dtype


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns float64 copies, rounded to the nearest values (ties to even) of a dtype."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    # numpy has no bfloat16: keep the upper 16 bits of float32. Adding 0x7FFF, plus 1 if the lowest kept bit is odd,
    # carries into that bit exactly if the rest is above half of it, or equal to half of it and the bit is odd.
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + (((bits >> 16) & 1) + 0x7FFF)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def judge(expected: Expected, results: Arrays) -> Accuracy:
    """Compares results with the float64 reference."""
    gradients = Gradients(**{name: results.get(name) for name in Gradients._fields}) if "dq" in results else None
    return expected.judge(out=results["out"], lse=results.get("lse"), gradients=gradients)


def expectation(trial: Trial) -> Expected:
    """Returns the float64 reference's results for a trial, and their bounds."""
    return expect(trial.spec, trial.inputs, dout=trial.dout if trial.learned else None, dlse=trial.dlse)


def differing(one: Arrays, other: Arrays) -> str:
    """Returns the results that differ in any bit, each with the largest difference; empty if none does.

    Compares the results that both have, as long as the shorter.
    """
    found = []
    for name in (name for name in one if name in other):
        size = min(len(one[name]), len(other[name]))
        first, second = one[name][:size], other[name][:size]
        if first.tobytes() != second.tobytes():  # as bytes, because NaN differs from itself, and -0.0 equals 0.0
            with np.errstate(invalid="ignore"):
                found.append(f"{name} by {np.nanmax(np.abs(first - second), initial=0.0):.2g}")
    return ", ".join(found)
