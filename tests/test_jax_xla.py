"""jax_xla against the float64 reference: every feature, the paths it takes, and what it costs to trace."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from attn_core import reference, xla_attention  # noqa: E402
from attn_core.backends import Inputs, jax_xla  # noqa: E402
from attn_core.spec import AttentionSpec  # noqa: E402

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
LSE_TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-4, "bfloat16": 2e-4}

DENSE = AttentionSpec(
    batch=2, q_len=13, kv_len=17, num_heads=6, num_kv_heads=2, head_dim=11, value_dim=11, dtype="float32"
)
LENGTHS = ((5, 0, 7, 3, 8), (7, 4, 0, 5, 3))  # query and key tokens of each document
PACKED = replace(DENSE, batch=1, q_len=23, kv_len=19, documents=5, max_len_q=8, max_len_k=7)

CASES = {
    "plain": DENSE,
    "one query": replace(DENSE, q_len=1, causal=True),
    "causal": replace(DENSE, causal=True),
    "causal, top left": replace(DENSE, causal=True, alignment="top_left"),
    "causal, rows that see nothing": replace(DENSE, q_len=17, kv_len=13, causal=True),
    "window": replace(DENSE, window=(3, 2)),
    "window, top left": replace(DENSE, window=(3, 2), alignment="top_left"),
    "window, one side": replace(DENSE, q_len=17, window=(None, 2)),
    "window, rows that see nothing": replace(DENSE, q_len=29, window=(1, 1), alignment="top_left"),
    "window, far": replace(DENSE, window=(2**40, 2**40)),
    "softcap": replace(DENSE, softcap=1.5, scale=0.9),
    "value_dim": replace(DENSE, value_dim=5),
    "mask": replace(DENSE, mask_shape=(2, 6, 13, 17)),
    "mask of keys": replace(DENSE, mask_shape=(2, 1, 1, 17)),
    "bias": replace(DENSE, bias_shape=(2, 6, 13, 17), bias_gradient=True),
    "bias of heads": replace(DENSE, bias_shape=(1, 6, 1, 17), bias_gradient=True, mask_shape=(2, 1, 13, 1)),
    "bias of rows": replace(DENSE, bias_shape=(1, 1, 13, 1), bias_gradient=True, softcap=2.0),
    "alibi": replace(DENSE, alibi_shape=(6,), causal=True),
    "alibi of batch": replace(DENSE, alibi_shape=(2, 6), alignment="top_left"),
    "sinks": replace(DENSE, sinks=True, mask_shape=(2, 1, 13, 17)),
    "sinks, rows that see nothing": replace(DENSE, q_len=17, kv_len=13, causal=True, sinks=True),
    "dropout": replace(DENSE, dropout=0.3, sinks=True),
    "packed": PACKED,
    "packed, causal": replace(PACKED, causal=True),
    "packed, window": replace(PACKED, window=(2, 1), alignment="top_left"),
    "packed, everything": replace(
        PACKED,
        causal=True,
        window=(4, 0),
        softcap=3.0,
        value_dim=7,
        alibi_shape=(6,),
        bias_shape=(1, 6, 23, 19),
        bias_gradient=True,
        mask_shape=(1, 1, 23, 19),
        sinks=True,
        dropout=0.2,
    ),
}


def make_inputs(spec: AttentionSpec, seed: int = 0) -> Inputs:
    """Random numpy inputs of a spec, float64 but already rounded to its dtype."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return np.array(jnp.asarray(random.standard_normal(shape), spec.dtype), np.float64)

    rows = () if spec.packed else (spec.batch,)
    made: dict[str, Any] = {
        "q": normal(*rows, spec.q_len, spec.num_heads, spec.head_dim),
        "k": normal(*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        "v": normal(*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim),
    }
    if spec.mask_shape:
        made["mask"] = random.random(spec.mask_shape) < 0.6
        made["mask"][..., :1, :] &= spec.mask_shape[2] == 1  # the first row sees nothing
    if spec.bias_shape:
        made["bias"] = normal(*spec.bias_shape)
        made["bias"].flat[::7] = -np.inf
    if spec.alibi_shape:
        made["alibi_slopes"] = abs(normal(*spec.alibi_shape))
    if spec.sinks:
        made["sinks"] = normal(spec.num_heads)
    if spec.dropout:
        made["rng"] = np.asarray([2**32 - 5, 11], np.uint32)
    if spec.packed:
        for side, lengths in zip("qk", LENGTHS, strict=True):
            made[f"cu_seqlens_{side}"] = np.cumsum((0, *lengths)).astype(np.int32)
    return Inputs(**made)


def on_device(spec: AttentionSpec, inputs: Inputs) -> Inputs:
    return Inputs(
        *(
            None if array is None else jnp.asarray(array, spec.dtype if array.dtype == np.float64 else array.dtype)
            for array in inputs
        )
    )


@partial(jax.jit, static_argnums=0)
def both(spec: AttentionSpec, inputs: Inputs, dout: Any, dlse: Any) -> tuple[Any, ...]:
    out, lse = jax_xla.forward(spec, inputs)
    return out, lse, *jax_xla.backward(spec, inputs, out, lse, dout, dlse)


def compare(spec: AttentionSpec, seed: int = 0) -> None:
    inputs = make_inputs(spec, seed)
    random = np.random.default_rng(seed + 1)
    dout = np.asarray(jnp.asarray(random.standard_normal(spec.out_shape), spec.dtype), np.float64)
    dlse = random.standard_normal(spec.lse_shape)
    out, lse = reference.forward(spec, inputs)
    expected = (out, lse, *reference.backward(spec, inputs, out, lse, dout, dlse))
    got = both(spec, on_device(spec, inputs), jnp.asarray(dout, spec.dtype), jnp.asarray(dlse, spec.lse_dtype))
    for name, actual, right in zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), got, expected, strict=True):
        if right is None:
            assert actual is None, name
            continue
        assert actual.shape == right.shape, name
        assert actual.dtype == (spec.lse_dtype if name == "lse" else spec.dtype), name
        tolerance = LSE_TOLERANCE[spec.dtype] if name == "lse" else TOLERANCE[spec.dtype] * max(1, abs(right).max())
        np.testing.assert_allclose(np.asarray(actual, np.float64), right, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    compare(CASES[name])


@pytest.mark.parametrize("name", ["causal", "packed, everything", "one query"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(name, dtype):
    compare(replace(CASES[name], dtype=dtype))


@pytest.mark.parametrize("name", ["causal", "packed, everything", "window, rows that see nothing", "bias of heads"])
def test_float64(name):
    with jax.enable_x64(True):
        compare(replace(CASES[name], dtype="float64"))


@pytest.mark.parametrize("name", CASES)
def test_blocks_change_nothing(name, monkeypatch):
    """Blocks far smaller than the lengths, the last one ragged; every feature crosses their borders."""
    monkeypatch.setattr(xla_attention, "Q_BLOCK", 5)
    monkeypatch.setattr(xla_attention, "KV_BLOCK", 3)
    monkeypatch.setattr(jax_xla, "MAX_SCORES", 0)
    jax.clear_caches()
    compare(replace(CASES[name], deterministic=True))  # a spec of its own: the caches know the other block sizes
