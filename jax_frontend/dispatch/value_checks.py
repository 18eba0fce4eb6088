"""The values of an eager call as numpy arrays, for ``attn_core.checks``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call import cache_rows
from attn_core.call.arguments import Arrays
from attn_core.call.checks import CheckWarning, warn_of_results, warn_of_values
from attn_core.call.key_ranges import check_values
from attn_core.call.kinds import is_number
from attn_core.call.observe import range_name
from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import plan


def check(spec: AttentionSpec, inputs: Inputs, info: SeqInfo | None) -> None:
    """Warns of mistakes in the values of a call. While JAX traces there are none: then the program checks its offsets.

    Kernels clamp wrong offsets, so a jitted program would hide them.
    """
    if are_traced(inputs):
        if info is not None and isinstance(info.cu_seqlens_q, jax.core.Tracer):
            report = partial(_warn_of_offsets, spec, info.max_len_q, info.max_len_k)
            jax.debug.callback(report, info.cu_seqlens_q, info.cu_seqlens_k)
        if isinstance(inputs.key_ranges, jax.core.Tracer):
            jax.debug.callback(partial(_warn_of_ranges, spec), inputs.key_ranges)
        return
    if inputs.key_ranges is not None:
        check_values(np.asarray(inputs.key_ranges), spec.q_len)
    tokens = None if info is None else int(info.cu_seqlens_q[-1])
    warn_of_values(spec, {name: _numpy(a) for name, a in zip(Arrays._fields, inputs, strict=False)}, tokens)


def check_cache(qkv: tuple[jax.Array, ...], keywords: Mapping[str, Any]) -> None:
    """Runs ``check`` for a call on rows of a cache, with the tensors and the keywords of its form with key ranges."""
    inputs, options = cache_rows.as_inputs(qkv, keywords)
    check(plan.spec(plan.metadata(inputs), plan.device_name(inputs.q), options), inputs, None)


def ranges_here(key_ranges: object, *, named: bool) -> bool:
    """Returns whether kernels without key ranges may run the call in parts, because the values are on the host.

    named: whether the call names backends. Automatic choice reads numpy's arrays alone, because it has key ranges.
    """
    return isinstance(key_ranges, np.ndarray) or (named and plan.is_on_host(key_ranges))


def check_tables(spec: AttentionSpec, info: SeqInfo | None, key_ranges: object) -> None:
    """Checks the values of offsets and key ranges that are on the host; traced ones have none yet.

    Kernels clamp offsets elsewhere, and wrong ranges there only hide keys.
    """
    if info is not None:
        if plan.is_on_host(info.cu_seqlens_q):
            _check_offsets(spec, "q", info.max_len_q, info.cu_seqlens_q)
        if plan.is_on_host(info.cu_seqlens_k):
            _check_offsets(spec, "k", info.max_len_k, info.cu_seqlens_k)
    if plan.is_on_host(key_ranges):
        with jax.transfer_guard("allow"):
            check_values(np.asarray(key_ranges), spec.q_len)


def _check_offsets(spec: AttentionSpec, side: str, longest: int, offsets: jax.Array | np.ndarray) -> None:
    tokens = spec.q_len if side == "q" else spec.kv_len
    known = tokens if is_number(tokens) else None  # offsets beyond a symbolic length are clamped when they run
    check_cu_seqlens(np.asarray(offsets), longest, side=side, tokens=known)


def are_traced(inputs: Inputs) -> bool:
    """Returns whether JAX traces the call, so that its arrays have no values yet."""
    return any(isinstance(array, jax.core.Tracer) for array in inputs)


def report_results(call: BridgedCall, operands: Sequence[jax.Array], results: Sequence[jax.Array]) -> None:
    """Makes the program warn of NaN in the results of a call with finite operands, whenever it runs; traceable."""
    report = partial(warn_of_results, range_name(call.backend, call.spec, call.direction), call.spec.dropout)
    named = dict(zip(call.results, results, strict=True))
    named.pop("row_maximum", None)  # a kernel leaves it unwritten at tokens beyond max_len_q
    jax.debug.callback(report, dict(zip(call.names, operands, strict=True)), named)


def _warn_of_ranges(spec: AttentionSpec, key_ranges: jax.Array | np.ndarray) -> None:
    _warn(check_values, np.asarray(key_ranges), spec.q_len)


def _warn_of_offsets(
    spec: AttentionSpec, max_len_q: int, max_len_k: int, queries: jax.Array | np.ndarray, keys: jax.Array | np.ndarray
) -> None:
    _warn(_check_offsets, spec, "q", max_len_q, queries)
    _warn(_check_offsets, spec, "k", max_len_k, keys)


def _warn(check: Callable[..., None], *arguments: object) -> None:
    """Warns of the error that a check raises."""
    try:
        check(*arguments)
    except SpecError as error:
        warnings.warn(str(error), CheckWarning, stacklevel=3)


def _numpy(array: jax.Array | None) -> np.ndarray | None:
    if array is None:
        return None
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)
