"""Tests which data a call moves to a device under ``jax.transfer_guard("disallow")``: none implicitly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_core import SeqInfo
from attn_core.call.options import Options
from attn_core.call.tensors import Inputs
from jax_frontend import attention, dot_product_attention
from jax_frontend.dispatch import offsets, plan

pytestmark = pytest.mark.sampled

X = jnp.ones((1, 16, 2, 8))
MASK = jnp.ones((1, 1, 16, 16), bool)
BIAS = jnp.zeros((1, 2, 16, 16))
PER_HEAD = jnp.ones(2)
KEY = jax.random.key(0)
EARLY = SeqInfo(np.array([0, 6, 13], np.int32), np.array([0, 6, 13], np.int32), 7, 7)

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and softcap": {"causal": True, "window": 3, "softcap": 4.0},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS},
    "alibi": {"causal": True, "alibi_slopes": PER_HEAD},
    "sinks": {"sinks": PER_HEAD},
    "dropout": {"dropout": 0.5, "dropout_rng": KEY},
    "host offsets": {"seq_info": SeqInfo.from_lengths([6, 10]), "causal": True},
    "host offsets that end early": {"seq_info": EARLY, "causal": True},
}


@pytest.mark.parametrize("backend", [None, "jax_xla"])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_call_makes_no_implicit_transfer(compiled: bool, call: dict[str, Any], backend: str | None) -> None:
    forward: Callable[..., Any] = lambda q, k, v: attention(q, k, v, backend=backend, **call)  # noqa: E731

    def with_gradients(q: Any, k: Any, v: Any) -> Any:
        out, backward = jax.vjp(forward, q, k, v)
        return out, backward(q)

    run = jax.jit(with_gradients) if compiled else with_gradients
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(run(X, X, X))


def test_dot_product_attention_makes_no_implicit_transfer() -> None:
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(dot_product_attention(X, X, X, local_window_size=3))
        lengths = jax.device_put(np.array([5], np.int32))
        jitted = jax.jit(lambda q: dot_product_attention(q, q, q, key_value_seq_lengths=lengths))
        jax.block_until_ready(jitted(X))


def test_offsets_on_a_device_need_no_implicit_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose offsets are not read on the host: the device extends them."""
    monkeypatch.setattr(plan, "is_on_host", lambda array: False)
    info = SeqInfo.from_lengths([6, 7], array=jax.device_put)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(attention(X[0], X[0], X[0], seq_info=info))
    made = offsets.attach_complete(info, Inputs(X[0], X[0], X[0]), Options())[0]
    assert made.cu_seqlens_q.tolist()[:3] == [0, 6, 13] and made.cu_seqlens_q.tolist()[-1] == 16
