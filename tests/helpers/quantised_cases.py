"""Calls on quantised pages: a drawn paged call whose pools are quantised by the definition in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import quantised_numbers as quantised
import torch
from both_frontends import Results, _numpy
from paged_cases import PagedCall, jax_on

import jax_frontend
import torch_frontend
from attn_core.call.spec import BITS, SCALES

KINDS = [(dtype, by) for dtype in BITS for by in SCALES]
STORED = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "int8": np.int8, "int4": np.uint8}
POISON = {"float8_e4m3fn": np.nan, "int8": 127, "int4": 119}


def quantise(rows: np.ndarray, dtype: str, by: str) -> tuple[np.ndarray, np.ndarray]:
    """(stored numbers, scales) of a pool ``[num_pages, page_size, kv_heads, dim]``; a NaN slot stays poison."""
    pages, size, heads, dim = rows.shape
    used = np.isfinite(rows).all(-1)
    flat = np.where(used[..., None], rows, 0.0).reshape(-1, heads, dim).astype(np.float32)
    if by == "token":
        scales, factors = quantised.token_scales(flat, dtype)
        scales = np.where(used, scales.reshape(pages, size, heads), np.nan)
    else:
        most = np.abs(flat).reshape(pages, size, heads, dim).max((1, 3))
        scales = (np.maximum(most, 0.01) * np.float32(0.9) / quantised.LARGEST[dtype]).astype(np.float32)  # saturates
        factors = np.repeat(quantised.page_factors(scales), size, 0)
        scales = np.where(used.any(1), scales, np.nan)
    numbers = quantised.stored_numbers(flat, factors, dtype).reshape(rows.shape)
    stored = quantised.pack_int4(numbers) if dtype == "int4" else numbers.astype(STORED[dtype])
    stored[~used] = POISON[dtype]
    return stored, scales.astype(np.float32)


def quantised_call(call: PagedCall, dtype: str, by: str) -> PagedCall:
    """The call on quantised pages. Stored numbers and scales of unused slots are as wrong as they can be."""
    (k, k_scales), (v, v_scales) = (quantise(pool, dtype, by) for pool in call.inputs[1:3])
    pool = replace(call.spec.paged, dtype=dtype, scales=by)
    inputs = call.inputs._replace(k=k, v=v, k_scales=k_scales, v_scales=v_scales)
    return replace(call, spec=replace(call.spec, paged=pool), inputs=inputs)


def torch_pool(array: np.ndarray) -> torch.Tensor:
    """A pool of stored numbers as a tensor; torch knows no float8 of numpy's."""
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


def torch_arguments(call: PagedCall, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """((q, k_pages, v_pages), tables, scales, slopes and sinks) as tensors."""
    if device != "cpu":
        arrays, keywords = torch_arguments(call)
        return tuple(each.to(device) for each in arrays), {name: each.to(device) for name, each in keywords.items()}
    kind, inputs = getattr(torch, call.spec.dtype), call.inputs
    arrays = torch.tensor(inputs.q, dtype=kind), torch_pool(inputs.k), torch_pool(inputs.v)
    keywords = {n: torch.tensor(array) for n, array in call.int_arrays.items() if array is not None}
    keywords |= {n: torch.tensor(getattr(inputs, n)) for n in ("k_scales", "v_scales")}
    if inputs.alibi_slopes is not None:
        keywords["alibi_slopes"] = torch.tensor(inputs.alibi_slopes, dtype=torch.float32)
    return arrays, keywords | ({} if inputs.sinks is None else {"sinks": torch.tensor(inputs.sinks, dtype=kind)})


def jax_arguments(call: PagedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """((q, k_pages, v_pages), tables, scales, slopes and sinks) as JAX arrays."""
    inputs = call.inputs
    arrays = jnp.asarray(inputs.q, call.spec.dtype), jnp.asarray(inputs.k), jnp.asarray(inputs.v)
    keywords = {n: jnp.asarray(array) for n, array in call.int_arrays.items() if array is not None}
    keywords |= {n: jnp.asarray(getattr(inputs, n)) for n in ("k_scales", "v_scales")}
    if inputs.alibi_slopes is not None:
        keywords["alibi_slopes"] = jnp.asarray(inputs.alibi_slopes, jnp.float32)
    return arrays, keywords | ({} if inputs.sinks is None else {"sinks": jnp.asarray(inputs.sinks, call.spec.dtype)})


def run(framework: str, call: PagedCall, backend: str | None, device: str = "cpu") -> Results:
    """out and lse as numpy arrays; JAX runs inside jit, with traced tables and scales."""
    options = {**call.options, "return_lse": True, "backend": backend}
    if framework == "torch":
        arrays, keywords = torch_arguments(call, device)
        out, lse = torch_frontend.paged_attention(*arrays, **keywords, **options)
        return {"out": _numpy(out), "lse": _numpy(lse)}
    with jax_on(call, device):
        arrays, keywords = jax_arguments(call)
        program = jax.jit(lambda arrays, keywords: jax_frontend.paged_attention(*arrays, **keywords, **options))
        out, lse = program(arrays, keywords)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}
