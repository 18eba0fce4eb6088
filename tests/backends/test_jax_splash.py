"""Tests jax_splash in Pallas's TPU interpret mode on a CPU: against the reference, by the mask probe, and its lowering.

The kernels never ran on a TPU. Interpret mode computes what they say, block by block, with NaN in memory that they have
not written; and a program that lowers for a TPU contains them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pallas_tpu
from oracle_cases import Case, fill

from attn_core import AttentionSpec, Target, backends, explain, select
from attn_core.backends.jax_splash import backend as jax_splash
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy

SIZES = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 11, "value_dim": 13, "dtype": "float32"}
DENSE = AttentionSpec(**SIZES, q_len=131, kv_len=137, needs_backward=True)  # two blocks, mostly padding
LENGTHS = ((31, 0, 53, 40, 3), (29, 11, 0, 71, 3))
PACKED = replace(DENSE, q_len=127, kv_len=114, documents=5, max_len_q=53, max_len_k=71)
CASES = {
    "plain": DENSE,
    "whole blocks": replace(DENSE, q_len=128, kv_len=256, num_kv_heads=2),
    "two rows, causal": replace(DENSE, batch=2, causal=True),
    "causal, top left, rows that see nothing": replace(
        DENSE, q_len=300, causal=True, window=(5, 0), alignment="top_left"
    ),
    "causal, rows that see nothing": replace(DENSE, q_len=137, kv_len=5, causal=True, sinks=True),
    "window": replace(DENSE, window=(7, 3)),
    "softcap, sinks": replace(DENSE, softcap=1.5, sinks=True, scale=0.9, num_heads=4, num_kv_heads=2),
    "bfloat16, causal": replace(DENSE, dtype="bfloat16", causal=True, sinks=True, head_dim=72),
    "bfloat16, scaled by a power of two": replace(DENSE, dtype="bfloat16", head_dim=64),
    "packed": PACKED,
    "packed, causal, sinks": replace(PACKED, causal=True, sinks=True),
    "packed, window, top left": replace(PACKED, window=(4, 2), alignment="top_left", softcap=2.0),
}


def case_of(spec: AttentionSpec) -> Case:
    return fill(spec, 3, *(LENGTHS if spec.packed else ()))


def arrays_of(spec: AttentionSpec, inputs: Inputs) -> Inputs:
    """The inputs as JAX arrays of the call's dtype; offsets stay int32."""
    dtypes = {"cu_seqlens_q": jnp.int32, "cu_seqlens_k": jnp.int32, "sinks": jnp.float32}
    return Inputs(
        *(
            None if array is None else jnp.asarray(array, dtypes.get(name, spec.dtype))
            for name, array in inputs._asdict().items()
        )
    )


def results_of(spec: AttentionSpec, inputs: Inputs, dout: Any = None) -> tuple[Any, Any, Gradients | None]:
    """out, lse and the gradients of a call in interpret mode, in float64."""
    arrays = arrays_of(spec, inputs)
    with pallas_tpu.force_tpu_interpret_mode():
        out, lse = jax.jit(lambda inputs: jax_splash.forward(spec, inputs))(arrays)
        gradients = None
        if dout is not None:
            dout = jnp.asarray(dout, spec.dtype)
            gradients = jax.jit(lambda *args: jax_splash.backward(spec, *args, None))(arrays, out, lse, dout)
    assert out.dtype == spec.dtype and lse.dtype == "float32"
    double = lambda array: None if array is None else np.asarray(array, np.float64)
    lse = double(lse)
    if spec.sinks:  # the frontends insert the sink of a row that sees no key
        lse = np.where(lse == -np.inf, inputs.sinks[:, None], lse)
    return double(out), lse, gradients and Gradients(*map(double, gradients))


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_in_interpret_mode(name: str) -> None:
    spec = CASES[name]
    assert explain(spec, Target("jax", "tpu"), "jax_splash").reasons("jax_splash") == ()
    case = case_of(spec)
    out, lse, gradients = results_of(spec, case.inputs, case.dout)
    verdict = accuracy.check(spec, case.inputs, out=out, lse=lse, gradients=gradients, dout=case.dout)
    assert verdict.ok, verdict
