"""Tests examples/hosts/easydel_attention.py against float64, and against EasyDeL's own operation and a model.

EasyDeL is not installed in CI; without it a stand-in of its registry shows what ``register`` adds.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from reference_calls import attended

from attn_core.errors import ShapeError, SpecError
from examples.hosts import easydel_attention as easydel

pytestmark = pytest.mark.sampled

BATCH, LENGTH, HEADS, KV_HEADS, DIM, WIDE = 2, 7, 4, 2, 8, 5
IDS = np.array([[0, 0, 0, 4, 4, -1, -1], [3, 3, 0, 0, 0, 0, -2]], np.int32)
MASK = np.random.default_rng(3).random((BATCH, KV_HEADS, LENGTH, LENGTH)) < 0.6
MASK[0, :, 2] = False  # a query without keys


def info(mask=None, q_ids=None, kv_ids=None, **baked) -> Any:
    """Returns a MaskInfo of ejkernel, or its fields if ejkernel is not installed."""
    fields = {"_attention_mask": mask, "_q_segment_ids": q_ids, "_kv_segment_ids": q_ids if kv_ids is None else kv_ids}
    fields = {name: None if value is None else jnp.asarray(value) for name, value in fields.items()}
    if find_spec("ejkernel") is None:
        return SimpleNamespace(**fields, **baked)
    from ejkernel.types import MaskInfo

    return MaskInfo(**fields, **baked)


def rows(length=LENGTH, kv_length=LENGTH, seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = ((length, HEADS, DIM), (kv_length, KV_HEADS, DIM), (kv_length, KV_HEADS, WIDE))
    return tuple(draw(size=(BATCH, *shape)).astype(np.float32) for shape in shapes)


def seen_by(call, q_len, kv_len):
    """Returns the visible pairs of a call, bool [batch, heads, q_len, kv_len], by loops."""
    mask_info, window = call.get("mask_info"), call.get("sliding_window")
    left, right = (window, window) if isinstance(window, int) else window or (99, 99)
    seen = np.zeros((BATCH, HEADS, q_len, kv_len), bool)
    for b, h, i, j in np.ndindex(*seen.shape):
        ok = i - left <= j <= i + right and (j <= i or not call.get("causal"))
        if mask_info is not None and mask_info._attention_mask is not None:
            mask = np.asarray(mask_info._attention_mask)
            ok = ok and bool(mask[b, h * mask.shape[1] // HEADS, i, j])
        elif mask_info is not None:
            q_id, kv_id = mask_info._q_segment_ids[b, i], mask_info._kv_segment_ids[b, j]
            ok = ok and bool(q_id == kv_id) and bool(kv_id >= 0)
        seen[b, h, i, j] = ok
    return seen


def reference(q, k, v, call):
    """Returns the attention of float64; several sinks of a head are one, their log-sum-exp."""
    bias, sinks = call.get("bias"), None
    if "softmax_aux" in call:
        aux = np.asarray(call["softmax_aux"], np.float64)
        of_heads = aux.ndim == 1 and len(aux) in (HEADS, KV_HEADS)
        aux = aux[:, None] if of_heads else np.atleast_2d(aux)
        sinks = np.log(np.exp(np.repeat(aux, HEADS // len(aux), 0)).sum(1))
    return attended(
        *(q, k, v),
        mask=seen_by(call, q.shape[1], k.shape[1]),
        bias=None if bias is None else np.repeat(bias, HEADS // bias.shape[1], 1),
        sinks=sinks,
        scale=call.get("softmax_scale"),
        softcap=call.get("logits_soft_cap"),
    )


NORMAL = np.random.default_rng(5).normal
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"sliding_window": 2, "causal": True},
    "window of both sides": {"sliding_window": (1, 3)},
    "cap and bias": {"logits_soft_cap": 1.5, "bias": NORMAL(size=(BATCH, HEADS, LENGTH, LENGTH)), "causal": True},
    "bias of kv heads": {"bias": NORMAL(size=(BATCH, KV_HEADS, LENGTH, LENGTH))},
    "mask of kv heads": {"mask_info": info(MASK), "causal": True},
    "mask of ints": {"mask_info": info(MASK[:, :1].astype(np.int32)), "sliding_window": 2},
    "segment ids": {"mask_info": info(q_ids=IDS), "causal": True},
    "other ids of keys": {"mask_info": info(q_ids=IDS, kv_ids=IDS[:, ::-1])},
    "a sink of each head": {"softmax_aux": NORMAL(size=HEADS), "causal": True},
    "a sink of each kv head": {"softmax_aux": NORMAL(size=KV_HEADS)},
    "sinks of all heads": {"softmax_aux": NORMAL(size=3)},
    "sinks of each head": {"softmax_aux": NORMAL(size=(HEADS, 3)), "mask_info": info(q_ids=IDS)},
}


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_float64(name):
    out = easydel.attend(jnp.float32, *map(jnp.asarray, rows()), **CALLS[name])
    np.testing.assert_allclose(out, reference(*rows(), CALLS[name]), rtol=1e-4, atol=1e-5)


def test_a_longer_cache_is_read_up_to_its_mask():
    """A prefill whose keys are a cache: places behind the prompt are hidden by causal, and the mask may be longer."""
    arrays, mask = rows(4), np.random.default_rng(7).random((BATCH, 1, 9, 9)) < 0.7
    call = {"causal": True, "mask_info": info(mask)}
    out = easydel.attend(jnp.float32, *map(jnp.asarray, arrays), **call)
    np.testing.assert_allclose(out, reference(*arrays, call), rtol=1e-4, atol=1e-5)


def test_a_single_query_sees_every_key_of_its_mask():
    arrays, mask = rows(1), MASK[:, :1, :1]
    out = easydel.attend(jnp.float32, *map(jnp.asarray, arrays), mask_info=info(mask), causal=True)
    np.testing.assert_allclose(out, reference(*arrays, {"mask_info": info(mask)}), rtol=1e-4, atol=1e-5)


def test_a_mask_that_contains_the_window_is_enough():
    """EasyDeL cuts keys that the window hides, so that places no longer count from the first key."""
    call = {"mask_info": info(MASK, causal_mask_baked_in=True, sliding_window_baked_in=True)}
    out = easydel.attend(jnp.float32, *map(jnp.asarray, rows()), **call, causal=True, sliding_window=1)
    np.testing.assert_allclose(out, reference(*rows(), call), rtol=1e-4, atol=1e-5)


def test_a_bias_may_come_from_a_function_under_jit_with_gradients():
    bias = NORMAL(size=(BATCH, 1, LENGTH, LENGTH)).astype(np.float32)

    def loss(q, k, v, bias):
        return jnp.sum(easydel.attend(jnp.float32, q, k, v, init_bias=lambda: bias) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(loss, argnums=3))(*rows(), bias)
    np.testing.assert_allclose(value, np.sum(reference(*rows(), {"bias": bias}) ** 2), rtol=1e-4)
    step = np.zeros_like(bias)
    step[1, 0, 2, 3] = 1e-3
    high, low = (np.sum(reference(*rows(), {"bias": bias + sign * step}) ** 2) for sign in (1, -1))
    np.testing.assert_allclose(gradient[1, 0, 2, 3], (high - low) / 2e-3, rtol=1e-3)


def test_the_result_has_the_dtype_of_the_metadata():
    assert easydel.attend(jnp.bfloat16, *map(jnp.asarray, rows())).dtype == jnp.bfloat16


def test_dropout_needs_a_key_and_drops():
    arrays = tuple(map(jnp.asarray, rows()))
    dropping = {"deterministic": False, "dropout_prob": 0.5}
    with pytest.raises(SpecError, match="dropout_rng"):
        easydel.attend(jnp.float32, *arrays, **dropping)
    plain = easydel.attend(jnp.float32, *arrays, dropout_prob=0.5)  # deterministic
    assert np.any(plain != easydel.attend(jnp.float32, *arrays, **dropping, dropout_rng=jax.random.key(0)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"normalize_output": False}, "normalize_output"),
        ({"compute_dtype": jnp.float16}, "compute_dtype"),
        ({"cum_seqlens_q": jnp.zeros(3, jnp.int32)}, "cum_seqlens_q"),
        ({"chunks": 3}, "chunks"),
        ({"mask_info": info()}, "mask_info"),
        ({"mask_info": info(np.ones((BATCH, 3, LENGTH, LENGTH), bool))}, "mask_info"),
        ({"mask_info": info(q_ids=IDS[:, :3])}, "segment_ids"),
        ({"bias": jnp.zeros((BATCH, 3, LENGTH, LENGTH))}, "bias"),
        ({"softmax_aux": jnp.zeros((3, 1))}, "softmax_aux"),
        ({"causal": 1}, "causal"),
    ],
)
def test_refusals_name_the_argument(options, named):
    with pytest.raises((SpecError, ShapeError), match=named):
        easydel.attend(jnp.float32, *map(jnp.asarray, rows()), **options)


def test_a_window_of_a_single_query_needs_a_mask_that_contains_it():
    with pytest.raises(SpecError, match="sliding_window"):
        easydel.attend(jnp.float32, *map(jnp.asarray, rows(1)), sliding_window=2)


def test_register_adds_one_operation(monkeypatch):
    """By the stand-in: a class of the name "attn_core" with vanilla's requirements, whose output is attend's."""
    if find_spec("easydel") is not None:
        pytest.skip("EasyDeL itself is tested below")
    registered: dict[str, Any] = {}

    @dataclass
    class Requirements:
        name: str = "vanilla"
        cache: str = "dense"

    class Operation:
        def __init__(self, metadata):
            self.metadata = metadata

        @classmethod
        def get_requirements(cls, mode="mixed"):
            return Requirements()

    registered["vanilla"] = Operation
    host = ModuleType("easydel.operations")
    host.AttentionOutput, host.OperationImpl = SimpleNamespace, Operation
    host.OperationRegistry = SimpleNamespace(
        list_implementations=lambda: list(registered),
        get=registered.get,
        register=lambda cls: registered.setdefault(cls.get_impl_name(), cls),
    )
    monkeypatch.setitem(sys.modules, "easydel", ModuleType("easydel"))
    monkeypatch.setitem(sys.modules, "easydel.operations", host)
    easydel.register()
    ours = registered["attn_core"]
    easydel.register()
    assert registered["attn_core"] is ours and set(registered) == {"vanilla", "attn_core"}
    assert ours.get_requirements("decode") == Requirements("attn_core")
    q, k, v = map(jnp.asarray, rows())
    output = ours(SimpleNamespace(runtime_dtype=jnp.float32)).forward_native(query=q, key=k, value=v, causal=True)
    assert output.attention_weights is None
    np.testing.assert_allclose(output.attention_outputs, reference(*rows(), {"causal": True}), rtol=1e-4, atol=1e-5)


def operations():
    """Returns EasyDeL's own operation and ours, in float32."""
    easydel_package = pytest.importorskip("easydel")
    from easydel.operations import OperationMetadata, OperationRegistry

    easydel.register()
    config = easydel_package.EasyDeLBaseConfig()
    kinds = {"runtime_dtype": jnp.float32, "runtime_softmax_dtype": jnp.float32, "base_config": config}
    return tuple(OperationRegistry.create(name, OperationMetadata(**kinds)) for name in ("vanilla", "attn_core"))


THEIRS = [name for name in CALLS if name not in ("bias of kv heads", "sinks of each head")]
"""Calls that EasyDeL runs: the types of ejkernel 0.0.78 refuse the others."""


@pytest.mark.parametrize("name", THEIRS)
def test_easydel_itself_computes_the_same(name):
    vanilla, ours = operations()
    assert set(inspect.signature(vanilla.forward_native).parameters) - {"self", "ignore"} <= set(
        inspect.signature(easydel.attend).parameters
    )
    q, k, v = map(jnp.asarray, rows())
    call = {key: jnp.asarray(x, jnp.float32) if isinstance(x, np.ndarray) else x for key, x in CALLS[name].items()}
    theirs, out = (op(query=q, key=k, value=v, **call).attention_outputs for op in (vanilla, ours))
    sees = seen_by(CALLS[name], LENGTH, LENGTH).any(-1).all(1)  # a query without keys is a mean of values there
    np.testing.assert_allclose(out[sees], theirs[sees], rtol=1e-4, atol=1e-5)


def test_a_model_of_easydel_runs_on_ours():
    pytest.importorskip("easydel")
    from easydel import LlamaConfig, LlamaForCausalLM
    from flax import nnx

    easydel.register()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    logits = []
    for mechanism, operation in {"vanilla": "VanillaAttn", "attn_core": "AttnCore"}.items():
        config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=60, attn_mechanism=mechanism)
        config.attn_dtype = jnp.float32
        model = LlamaForCausalLM(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        ids = jax.random.randint(jax.random.key(1), (2, 11), 0, 60)
        mask = jnp.arange(11) < jnp.array([[11], [8]])
        with config.mesh:
            logits.append(model(input_ids=ids, attention_mask=mask).logits)
        assert type(model.model.layers[0].self_attn.attention_performer.impl).__name__ == operation
    np.testing.assert_allclose(logits[1][0], logits[0][0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[1][1, :8], logits[0][1, :8], rtol=1e-4, atol=1e-4)
