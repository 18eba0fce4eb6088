"""Tests Finetrainers' attention_dispatch in JAX: the same arguments and numbers as in torch, traced or not."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import JAX, TORCH, Framework, as_numpy, spied
from torch_first import torch_first  # noqa: F401 (a fixture)

from attn_core import NoBackendError, SpecError
from attn_core.dropins import finetrainers
from attn_core.dropins.finetrainers import AttentionProvider
from jax_frontend import use_backend
from jax_frontend.finetrainers import attention_dispatch, attention_provider
from torch_frontend import finetrainers as of_torch

pytestmark = pytest.mark.sampled

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 6, 3, 5, 7, 11
RANDOM = np.random.default_rng(1)
# left padding and a hole; right padding and a hole
KEEP = np.array([[0, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 0]], bool)
KEEP4 = KEEP[:, None, None, :]
TABLE = RANDOM.random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.7
ADDED = RANDOM.normal(size=(BATCH, 1, Q_LEN, KV_LEN)).astype(np.float32)
DIRECT = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "dropout_rng")


def numbers(q_len: int = Q_LEN, kv_len: int = KV_LEN, value_dim: int = HEAD_DIM) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    shapes = ((HEADS, q_len, HEAD_DIM), (KV_HEADS, kv_len, HEAD_DIM), (KV_HEADS, kv_len, value_dim))
    return tuple(random.normal(size=(BATCH, *shape)).astype(np.float32) for shape in shapes)


def dispatched(framework: Framework, word: str, qkv: Any, arguments: dict[str, Any]) -> Any:
    """One call. numpy arrays become the framework's arrays, and other options become keywords."""
    module = of_torch if framework is TORCH else importlib.import_module("jax_frontend.finetrainers")
    own = {name: framework.array(it) if isinstance(it, np.ndarray) else it for name, it in arguments.items()}
    direct = {name: value for name, value in own.items() if name in DIRECT}
    kwargs = {name: value for name, value in own.items() if name not in DIRECT}
    arrays = [framework.array(array) if isinstance(array, np.ndarray) else array for array in qkv]
    with module.attention_provider(word):
        return module.attention_dispatch(*arrays, **{"enable_gqa": True, **direct}, attention_kwargs=kwargs or None)


def same(actual: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(as_numpy(one), as_numpy(other), atol=2e-5, rtol=0)


def test_the_signature_is_torchs_plus_a_dropout_key() -> None:
    def signature(function: Any) -> list[tuple[Any, ...]]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]

    ours = signature(attention_dispatch)
    assert ours[:-1] == signature(of_torch.attention_dispatch)
    assert ours[-1] == ("dropout_rng", inspect.Parameter.KEYWORD_ONLY, None)
    assert signature(attention_provider) == signature(of_torch.attention_provider)


SLOPES = np.geomspace(0.5, 0.01, HEADS).astype(np.float32)
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "scale below 0": {"scale": -0.7},
    "scale of 0": {"scale": 0.0},
    "is_causal": {"is_causal": True},
    "keys": {"attn_mask": KEEP4},
    "keys and causal": {"attn_mask": KEEP4, "is_causal": True, "return_lse": True},
    "row of keys": {"attn_mask": KEEP[:1]},
    "table": {"attn_mask": TABLE},
    "table of two axes": {"attn_mask": TABLE[0, 0], "is_causal": True},
    "added": {"attn_mask": ADDED},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 1.5},
    "slopes": {"alibi_slopes": SLOPES},
    "deterministic": {"deterministic": True},
    "return_lse": {"return_lse": True},
}
CALLS = [("native", name) for name in ARGUMENTS] + [
    *(("flash", name) for name in ("is_causal", "keys", "softcap")),
    *(("flash_varlen", name) for name in ("is_causal", "keys", "row of keys", "table", "added")),
    *(("flex", name) for name in ("row of keys", "softcap")),
    *(("_native_math", name) for name in ("slopes", "keys and causal")),
    ("xformers", "plain"),
]


@pytest.mark.parametrize(("word", "name"), CALLS)
def test_both_frameworks_give_the_same_numbers_or_refuse(word: str, name: str) -> None:
    qkv = numbers()
    try:
        right = dispatched(TORCH, word, qkv, ARGUMENTS[name])
    except (SpecError, NoBackendError) as refusal:
        with pytest.raises(type(refusal)):
            dispatched(JAX, word, qkv, ARGUMENTS[name])
        return
    same(dispatched(JAX, word, qkv, ARGUMENTS[name]), right)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["left and holes", "one row nothing", "nothing"])
def test_key_masks_drop_the_hidden_keys(kind: str, causal: bool) -> None:
    """On flash_varlen, where dropped keys may hold any value. A traced causal call passes a mask to the kernel."""
    q, k, v = numbers()
    keep = KEEP & (kind != "nothing")
    keep[0] &= kind != "one row nothing"
    arguments = {"attn_mask": keep, "is_causal": causal, "return_lse": True}
    right = dispatched(TORCH, "flash_varlen", (q, k, v), arguments)
    hidden = np.broadcast_to(~keep[:, None, :, None], k.shape)
    poisoned = np.where(hidden, np.nan, k), np.where(hidden[..., :1], np.nan, v)
    same(dispatched(JAX, "flash_varlen", (q, *poisoned), arguments), right)
    traced = jax.jit(lambda keep, *qkv: dispatched(JAX, "flash_varlen", qkv, {**arguments, "attn_mask": keep}))
    same(traced(jnp.asarray(keep), *map(jnp.asarray, (q, k, v))), right)


def test_gradients_equal_those_of_torch() -> None:
    leaves = [torch.from_numpy(array).requires_grad_() for array in numbers()]
    dispatched(TORCH, "flash_varlen", leaves, {"attn_mask": torch.from_numpy(KEEP)}).square().sum().backward()

    def loss(*qkv: jax.Array) -> jax.Array:
        return (dispatched(JAX, "flash_varlen", qkv, {"attn_mask": KEEP}) ** 2).sum()

    actual = jax.grad(loss, (0, 1, 2))(*map(jnp.asarray, numbers()))
    for one, leaf in zip(actual, leaves, strict=True):
        np.testing.assert_allclose(one, leaf.grad, atol=1e-4, rtol=1e-4)


def test_sage_varlen_gives_masks_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here to a kernel that the CPU has, and that takes them."""
    monkeypatch.setattr(AttentionProvider.SAGE_VARLEN, "kernels", ("math",))
    left = np.arange(7) >= np.array([[2], [0]])
    for arguments in ({"attn_mask": left, "is_causal": True}, {"attn_mask": left}):
        actual, packed = (
            dispatched(JAX, word, numbers(7, 7), {**arguments, "return_lse": True})
            for word in ("sage_varlen", "flash_varlen")
        )
        same(actual, packed)


def test_fewer_axes_are_refused() -> None:
    q, k, v = numbers()
    with pytest.raises(SpecError, match=r"query: expected \[batch, heads, len, head_dim\], got \[6, 5, 11\]"):
        dispatched(JAX, "native", (q[0], k[0], v[0]), {})


def test_dropout_needs_a_key_and_keeps_the_mean() -> None:
    q, k, v = numbers(64, 64)
    arguments = {"dropout_p": 0.25}
    with pytest.raises(SpecError, match=r"dropout=0\.25: expected dropout_rng"):
        dispatched(JAX, "native", (q, k, v), arguments)
    one, again, other = (
        dispatched(JAX, "native", (q, k, np.ones_like(v)), {**arguments, "dropout_rng": jax.random.key(seed)})
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other, atol=1e-3)
    assert float(one.mean()) == pytest.approx(1.0, abs=0.02)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("native", {"sinks": 1}, r"attention_kwargs\['sinks'\]: unknown"),
    "causal window": ("native", {"is_causal": True, "window_size": (2, 0)}, "is_causal with window_size"),
    "heads": ("native", {"enable_gqa": False}, "enable_gqa=False with 6 heads of query and 3 of key"),
    "integers": ("flash", {"attn_mask": KEEP.astype(np.int32)}, "attn_mask: expected bool .*attn_mask != 0"),
    "added": ("flash_varlen", {"attn_mask": ADDED}, "attn_mask: provider flash_varlen takes bool masks of keys"),
    "of queries": ("flash_varlen", {"attn_mask": TABLE}, "flash_varlen takes masks of keys .*another provider"),
    "window and keys": ("flash_varlen", {"attn_mask": KEEP, "window_size": (2, 1)}, "attn_mask with window_size"),
    "documents": ("flash_varlen", {"cu_seqlens_q": KEEP}, r"\['cu_seqlens_q'\]: unknown; .*attention\(seq_info=\)"),
    "dropout": ("flash", {"dropout_p": 0.5, "dropout_rng": jax.random.key(0)}, r"dropout=0\.5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_arguments_are_named(name: str) -> None:
    word, arguments, message = WRONG[name]
    with pytest.raises((SpecError, NoBackendError), match=message):
        dispatched(JAX, word, numbers(), arguments)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_arrays_that_do_not_fit_are_named(place: int) -> None:
    name = ("query", "key", "value")[place]
    for change, error in ((lambda it: it[0], SpecError), (jnp.float16, SpecError), (np.asarray, TypeError)):
        qkv = [jnp.asarray(array) for array in numbers()]
        qkv[place] = change(qkv[place])
        with attention_provider("flash"), pytest.raises(error, match="query|" + name):
            attention_dispatch(*qkv, enable_gqa=True)
    with pytest.raises(TypeError, match=r"attn_mask: expected a jax\.Array"):
        attention_dispatch(*map(jnp.asarray, numbers()), torch.ones(1), enable_gqa=True)


@pytest.mark.usefixtures("torch_first")
def test_jit_traces_again_under_another_provider_of_the_same_kernels() -> None:
    """flash and flash_varlen run the same kernels, and read a mask of two axes differently."""
    q, k, v = map(jnp.asarray, numbers(KV_LEN, KV_LEN))
    mask = jnp.asarray(np.tri(KV_LEN, dtype=bool))[:, ::-1]
    program = jax.jit(lambda q, k, v, mask: attention_dispatch(q, k, v, mask, enable_gqa=True))
    with attention_provider("flash"):
        program(q, k, v, mask)
    with attention_provider("flash_varlen"), pytest.raises(SpecError, match="takes masks of keys"):
        program(q, k, v, mask)
    with spied() as ran:
        for block in (attention_provider("_native_math"), attention_provider("native"), use_backend("math")):
            with block:
                jax.block_until_ready(program(q, k, v, mask))
    assert ran == ["math", "sdpa_flash", "math"]


def test_the_provider_of_the_environment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetrainers, "DEFAULT", "_native_math")
    with spied() as ran:
        jax.block_until_ready(attention_dispatch(*map(jnp.asarray, numbers()), enable_gqa=True))
    assert ran == ["math"]
