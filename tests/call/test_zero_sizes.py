"""Tests calls without rows or without keys: defined results (out 0, lse -inf, gradients 0), no error and no kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy, spied

from attn_core import SeqInfo

pytestmark = pytest.mark.sampled

SIZES = {  # (batch, q_len, kv_len)
    "no batch": (0, 5, 7),
    "no queries": (2, 0, 7),
    "no keys": (2, 5, 0),
    "no tokens": (2, 0, 0),
    "nothing": (0, 0, 0),
}
PACKED = {"no tokens at all": ((0, 0), (0, 0)), "no query tokens": ((0, 0), (3, 2)), "no key tokens": ((3, 2), (0, 0))}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window": (2, 1), "softcap": 3.0},
    "sinks": {"sinks": True},
    "mask and bias": {"mask": True, "bias": True},
    "everything": {
        "causal": True,
        "window": 3,
        "softcap": 3.0,
        "sinks": True,
        "mask": True,
        "bias": True,
        "alibi": True,
    },
}
LEARNED = ("q", "k", "v", "bias", "sinks")


def call(framework: Framework, name: str, extras: str, dtype: str = "float32") -> dict[str, Any]:
    """The arguments of a call without rows or keys; every array holds ones."""
    options = dict(OPTIONS[extras])

    def ones(*shape: int, dtype: str = dtype) -> Any:
        return framework.array(np.ones(shape, np.float32), dtype)

    if name in PACKED:
        lengths_q, lengths_k = PACKED[name]
        batch, rows, keys = 1, (sum(lengths_q),), (sum(lengths_k),)
        options["seq_info"] = SeqInfo.from_lengths(lengths_q, lengths_k, array=lambda array: framework.array(array))
    else:
        batch, q_len, kv_len = SIZES[name]
        rows, keys = (batch, q_len), (batch, kv_len)
    full = (batch, 6, rows[-1], keys[-1])
    if options.pop("mask", False):
        options["mask"] = ones(*full, dtype="bool")
    if options.pop("bias", False):
        options["bias"] = ones(1, 6, 1, keys[-1])
    if options.pop("sinks", False):
        options["sinks"] = ones(6)
    if options.pop("alibi", False):
        options["alibi_slopes"] = ones(6)
    return {"q": ones(*rows, 6, 11), "k": ones(*keys, 3, 11), "v": ones(*keys, 3, 5), **options}


def results(framework: Framework, given: dict[str, Any], *, jit: bool) -> dict[str, np.ndarray]:
    """out, lse and the gradients of every learned input, of ``sum(out)`` without lse."""
    run = _torch_results if framework is TORCH else _jax_results
    return {name: as_numpy(array) for name, array in run(given, jit=jit).items()}


def _torch_results(given: dict[str, Any], *, jit: bool) -> dict[str, Any]:
    learned = {name: given[name].clone().requires_grad_() for name in LEARNED if name in given}
    attention = TORCH.frontend.attention
    if jit:
        torch._dynamo.reset()
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out, lse = attention(**{**given, **learned}, return_lse=True)
    out.sum().backward()
    alone = attention(**given)  # the path without gradients and without the log-sum-exp
    assert torch.equal(alone, out)
    return {"out": out, "lse": lse, **{f"d{name}": leaf.grad for name, leaf in learned.items()}}


def _jax_results(given: dict[str, Any], *, jit: bool) -> dict[str, Any]:
    learned = {name: given.pop(name) for name in LEARNED if name in given}

    def program(learned: dict[str, Any]) -> dict[str, Any]:
        out, lse = JAX.frontend.attention(**learned, **given, return_lse=True)
        gradients = jax.grad(lambda learned: JAX.frontend.attention(**learned, **given).sum())(learned)
        return {"out": out, "lse": lse, **{f"d{name}": gradient for name, gradient in gradients.items()}}

    return (jax.jit(program) if jit else program)(learned)


def check(actual: dict[str, np.ndarray], given: dict[str, Any]) -> None:
    """Checks for zeros of the right shapes and dtypes, and a log-sum-exp of -inf or of a sink."""
    q = given["q"]
    packed = "seq_info" in given
    assert actual["out"].shape == (*q.shape[:-1], 5)
    assert actual["lse"].shape == ((6, q.shape[0]) if packed else (q.shape[0], 6, q.shape[1]))
    assert actual["lse"].dtype == np.float32
    assert (actual["lse"] == (1.0 if "sinks" in given else -np.inf)).all()
    assert (actual["out"] == 0).all()
    for name in LEARNED:
        if name in given:
            assert actual[f"d{name}"].shape == tuple(given[name].shape)
            assert (actual[f"d{name}"] == 0).all()


@pytest.mark.parametrize("extras", OPTIONS)
@pytest.mark.parametrize("name", [*SIZES, *PACKED])
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_results_are_defined_and_no_kernel_runs(
    framework: Framework,
    name: str,
    extras: str,
) -> None:
    with spied() as ran:
        actual = results(framework, call(framework, name, extras), jit=False)
        assert ran == []
    check(actual, call(framework, name, extras))


@pytest.mark.parametrize("extras", ["plain", "everything"])
@pytest.mark.parametrize("name", [*SIZES, *PACKED])
def test_results_are_defined_inside_jit(name: str, extras: str) -> None:
    check(results(JAX, call(JAX, name, extras), jit=True), call(JAX, name, extras))


@pytest.mark.parametrize(
    ("name", "extras"), [("no batch", "plain"), ("no keys", "everything"), ("no tokens at all", "plain")]
)
def test_results_are_defined_inside_torch_compile(name: str, extras: str) -> None:
    check(results(TORCH, call(TORCH, name, extras), jit=True), call(TORCH, name, extras))


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_log_sum_exp_of_float64_inputs_is_float64(framework: Framework) -> None:
    with jax.enable_x64(True):
        out, lse = framework.frontend.attention(**call(framework, "no keys", "plain", "float64"), return_lse=True)
        assert (as_numpy(out).dtype, as_numpy(lse).dtype) == (np.float64, np.float64)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_one_row_of_empty_documents_keeps_its_rank(framework: Framework) -> None:
    given = call(framework, "no tokens at all", "causal")
    given |= {name: given[name][None] for name in "qkv"}
    out, lse = framework.frontend.attention(**given, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((1, 0, 6, 5), (6, 0))


def test_dropout_of_an_empty_call_needs_no_random_numbers() -> None:
    given = call(TORCH, "no keys", "plain")
    assert not TORCH.frontend.attention(**given, dropout=0.5).any()
    given = call(JAX, "no keys", "plain")
    assert not JAX.frontend.attention(**given, dropout=0.5, dropout_rng=jax.random.key(0)).any()


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_bad_call_is_an_error_even_if_it_is_empty(framework: Framework) -> None:
    with pytest.raises(ValueError, match=r"^softcap=-1.0: "):
        framework.frontend.attention(**call(framework, "no keys", "plain"), softcap=-1.0)


def test_vmap_over_a_call_without_keys() -> None:
    given = call(JAX, "no keys", "causal")
    many = {name: jnp.stack([given[name]] * 3) for name in "qkv"}
    out = jax.vmap(lambda q, k, v: JAX.frontend.attention(q, k, v, causal=True))(**many)
    assert out.shape == (3, 2, 5, 6, 5)
    assert not out.any()
