"""Tests the attention layers of torch, linen and NNX: one contract for all of them, on the same weights.

What one framework alone promises is at the end: the rules of Flax, and compiled layers of torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import torch
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from frameworks import JAX, JAX_ON_GPU, TORCH, TORCH_ON_GPU, Framework, as_numpy, jax_on
from rotary import rope_in_jax, rope_in_torch

from attn_core import masks
from attn_core.call.key_ranges import visible_in_ranges
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged.step import Step
from jax_frontend import linen, nnx
from jax_frontend.flax import layer as flax_layer
from torch_frontend import module
from torch_frontend.module import Attention, token_places

pytestmark = pytest.mark.sampled

BATCH, SEQ, KV_SEQ, HEADS, KV_HEADS, DIM, VALUE_DIM, FEATURES, OUT = 2, 7, 5, 6, 3, 4, 8, 13, 11
SIZES = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM, "out_features": OUT}
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}
LAYERS = ("torch", "linen", "nnx")
ROPE = "the rotary embedding of the layer's framework"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window": 3},
    {"window": (2, 1), "softcap": 0.7},
    {"causal": True, "alignment": "top_left", "scale": 0.8},
    {"sinks": True, "use_bias": False},
    {"rotary": ROPE, "causal": True},
]
every_layer = pytest.mark.parametrize("kind", LAYERS)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
torchs_on_gpus = pytest.mark.on_gpus(only=lambda kind, **_: kind == "torch")  # flax's are around the same calls
nowhere_on_gpus = pytest.mark.on_gpus(only=lambda **_: False)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, CONTEXT = normal(0, BATCH, SEQ, FEATURES), normal(1, BATCH, KV_SEQ, FEATURES)
RANGES = masks.prefix_lm([3], SEQ)


def close(actual: Any, expected: Any, **tolerance: float) -> None:
    np.testing.assert_allclose(as_numpy(actual), as_numpy(expected), **(TOLERANCE | tolerance))


def weights(in_kv_features: int = FEATURES, use_bias: bool = True, sinks: bool = False) -> dict[str, np.ndarray]:
    """Random parameters, under the names of torch's layer."""
    options = {"in_kv_features": in_kv_features, "use_bias": use_bias, "sinks": sinks}
    parameters = Attention(HEADS, FEATURES, **SIZES, **options).named_parameters()
    return {name: 0.5 * normal(100 + seed, *each.shape) for seed, (name, each) in enumerate(parameters)}


def flax_tree(named: dict[str, np.ndarray]) -> dict[str, Any]:
    """Torch's parameters (or their gradients) by name, in the tree of the Flax layers."""
    tree: dict[str, Any] = {"out": {"kernel": named["o_proj.weight"].T.reshape(HEADS, VALUE_DIM, OUT)}}
    for theirs, ours, shape in (
        ("query", "q_proj", (HEADS, DIM)),
        ("key", "k_proj", (KV_HEADS, DIM)),
        ("value", "v_proj", (KV_HEADS, VALUE_DIM)),
    ):
        tree[theirs] = {"kernel": named[f"{ours}.weight"].T.reshape(-1, *shape)}  # [out, in] -> [in, heads, dim]
        if f"{ours}.bias" in named:
            tree[theirs]["bias"] = named[f"{ours}.bias"].reshape(shape)
    if "o_proj.bias" in named:
        tree["out"]["bias"] = named["o_proj.bias"]
    if "sink_logits" in named:
        tree["sink_logits"] = named["sink_logits"]
    return tree


class Layer(NamedTuple):
    """A layer of any kind.

    Attributes:
        call: takes x, perhaps a context, and the arguments of a call.
        framework: that of its arrays.
        module: what was made.
        params: the parameters of a layer of Flax, as a tree.
    """

    call: Callable[..., Any]
    framework: Framework
    module: Any
    params: Any = None

    def __call__(self, *inputs: np.ndarray, **call: Any) -> Any:
        """Calls it with arrays of numpy."""
        return self.call(*map(self.framework.array, inputs), **self.arguments(call))

    def arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        """The arguments with arrays of the framework. torch gets key ranges in numpy, JAX as an array."""
        kept = {"key_ranges": call["key_ranges"]} if "key_ranges" in call and self.framework.name == "torch" else {}
        return self.framework.arrays(call) | kept


def layer_of(kind: str, device: str = "cpu", **options: Any) -> Layer:
    """A layer with the parameters of ``weights``."""
    shared = weights(**{name: options[name] for name in ("in_kv_features", "use_bias", "sinks") if name in options})
    options = {**SIZES, **options}
    if options.get("rotary") == ROPE:
        options["rotary"] = rope_in_torch if kind == "torch" else rope_in_jax
    if kind == "torch":
        made = Attention(HEADS, FEATURES, **options, device=device)
        made.load_state_dict({name: torch.from_numpy(each) for name, each in shared.items()})
        return Layer(made, TORCH if device == "cpu" else TORCH_ON_GPU, made)
    framework, params = JAX if device == "cpu" else JAX_ON_GPU, jax.tree.map(jnp.asarray, flax_tree(shared))
    if kind == "linen":
        options.pop("in_kv_features", None)
        made = linen.Attention(HEADS, **options)
        return Layer(partial(made.apply, {"params": params}), framework, made, params)
    made = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **options)
    state = flax_nnx.state(made, flax_nnx.Param)
    flax_nnx.replace_by_pure_dict(state, params)
    flax_nnx.update(made, state)
    return Layer(made, framework, made, params)


def on(kind: str, device: str) -> Any:
    """The device as the default one of JAX, for its layers."""
    return nullcontext() if kind == "torch" else jax_on(device)


@pytest.fixture
def make(kind: str, device: str) -> Iterator[Callable[..., Layer]]:
    """``layer_of`` for a kind on a device."""
    with on(kind, device):
        yield partial(layer_of, kind, device)


def trained(kind: str, device: str, options: dict[str, Any], x: np.ndarray, lengths: Any) -> tuple[Any, Any]:
    """The output for packed documents, or for whole rows, and the gradients as a tree of Flax."""
    with on(kind, device):
        layer = layer_of(kind, device, **options)
        array = layer.framework.array
        info = None if lengths is None else SeqInfo.from_lengths(lengths, array=array)
        if kind == "torch":
            out = layer(x, seq_info=info)
            out.sin().sum().backward()
            return as_numpy(out), flax_tree({name: as_numpy(p.grad) for name, p in layer.module.named_parameters()})
        if kind == "linen":

            def loss(params: Any, x: Any, info: Any) -> Any:
                out = layer.module.apply({"params": params}, x, seq_info=info)
                return jnp.sum(jnp.sin(out)), out

            return jax.jit(jax.grad(loss, has_aux=True))(layer.params, array(x), info)[::-1]

        def loss_of(layer: Any, x: Any, info: Any) -> Any:
            out = layer(x, seq_info=info)
            return jnp.sum(jnp.sin(out)), out

        gradients, out = flax_nnx.jit(flax_nnx.grad(loss_of, has_aux=True))(layer.module, array(x), info)
        return out, flax_nnx.to_pure_dict(gradients)


@pytest.mark.on_gpus(only=lambda options, packed, **_: (packed and "softcap" in options) or "sinks" in options)
@every_option
@pytest.mark.parametrize("packed", [False, True])
def test_the_layers_agree_forward_and_backward(options: dict[str, Any], packed: bool, device: str) -> None:
    x, lengths = (X[0], [4, 0, 3]) if packed else (X, None)
    out, gradients = trained("linen", device, options, x, lengths)
    for kind, bound in (
        ("torch", {"rtol": 1e-4, "atol": 3e-5 if device == "cpu" else 1e-4}),
        ("nnx", TOLERANCE),
    ):
        actual, of_kind = trained(kind, device, options, x, lengths)
        close(actual, out)
        assert jax.tree.structure(of_kind) == jax.tree.structure(gradients)
        for (path, one), other in zip(jax.tree.leaves_with_path(of_kind), jax.tree.leaves(gradients), strict=True):
            close(one, other, **bound, err_msg=f"{kind} {jax.tree_util.keystr(path)}")
    assert ("sink_logits" in gradients) == options.get("sinks", False)
    assert np.abs(gradients.get("sink_logits", 1.0)).min() > 0


@pytest.mark.on_gpus(only=lambda kind, options, **_: kind == "torch" or "softcap" in options)
@every_layer
@every_option
def test_packed_documents_equal_separate_rows(make: Any, options: dict[str, Any]) -> None:
    lengths, layer = [3, 0, 5, 1], make(**options)
    packed = normal(2, 1, sum(lengths), FEATURES)
    rows = [row for row in np.split(packed, np.cumsum(lengths)[:-1], axis=1) if row.size]
    apart = np.concatenate([as_numpy(layer(row)) for row in rows], axis=1)
    array = layer.framework.array
    with_arrays = SeqInfo.from_lengths(lengths, array=array)
    run = (
        layer.call if layer.framework.name == "torch" else jax.jit(lambda x, seq_info: layer.call(x, seq_info=seq_info))
    )
    close(run(array(packed), seq_info=with_arrays), apart)
    close(run(array(packed[0]), seq_info=with_arrays), apart[0])
    close(layer(packed[0], seq_info=SeqInfo.from_lengths(lengths)), apart[0])
    close(layer(packed, seq_info=(None, with_arrays.cu_seqlens_q, with_arrays.max_len_q)), apart)


@torchs_on_gpus
@every_layer
def test_packed_cross_attention_equals_separate_rows(make: Any) -> None:
    layer, x, context = make(in_kv_features=17), normal(0, 5, FEATURES), normal(1, 9, 17)
    pairs = [(x[None, :2], context[None, :5]), (x[None, 2:], context[None, 5:])]
    apart = np.concatenate([as_numpy(layer(*pair))[0] for pair in pairs])
    close(layer(x, context, seq_info=SeqInfo.from_lengths([2, 3], [5, 4])), apart)


@torchs_on_gpus
@every_layer
def test_rotary_receives_positions_and_is_applied(make: Any, kind: str) -> None:
    calls: list[Any] = []

    def recording(q: Any, k: Any, positions: Any) -> Any:
        calls.append((tuple(q.shape), tuple(k.shape), as_numpy(positions).tolist()))
        return (rope_in_torch if kind == "torch" else rope_in_jax)(q, k, positions)

    layer = make(rotary=recording)
    counted = layer(X)
    assert calls[-1] == ((BATCH, SEQ, HEADS, DIM), (BATCH, SEQ, KV_HEADS, DIM), [list(range(SEQ))] * BATCH)
    layer(X.reshape(-1, FEATURES), seq_info=SeqInfo.from_lengths([3, 0, 10, 1]))
    assert calls[-1][2] == [[*range(3), *range(10), 0]]
    assert not np.allclose(as_numpy(counted), as_numpy(make()(X)), atol=1e-3)
    shifted = layer(X, positions=np.arange(SEQ) + 40)  # only differences of positions matter
    close(shifted, counted, rtol=1e-3, atol=1e-4)
    stretched = layer(X, positions=np.stack([np.arange(SEQ), 2 * np.arange(SEQ)]))
    close(stretched[0], counted[0])
    assert not np.allclose(as_numpy(stretched[1]), as_numpy(counted[1]), atol=1e-3)


@torchs_on_gpus
@every_layer
def test_rotary_in_float32_keeps_a_bfloat16_layer_bfloat16(make: Any) -> None:
    layer = make(rotary=ROPE)
    half = make(rotary=ROPE, dtype=torch.bfloat16 if layer.framework.name == "torch" else jnp.bfloat16)
    assert str(half.call(layer.framework.array(X, "bfloat16")).dtype).endswith("bfloat16")


PASSED = {
    "causal": True,
    "alignment": "top_left",
    "window": (4, 2),
    "softcap": 3.5,
    "scale": 0.125,
    "bitwise_deterministic": True,
    "backend": ("math", "sdpa_flash"),
}
CALLED: dict[str, Any] = {
    "mask": np.ones((SEQ, SEQ), bool),
    "key_ranges": RANGES,
    "mask_mod": lambda b, h, q, k: k <= q,
    "score_mod": lambda score, b, h, q, k: score * 2,
    "bias": normal(3, SEQ, SEQ),
    "alibi_slopes": normal(4, HEADS),
}


ON_CALL = {"deterministic": "bitwise_deterministic", "dropout": "dropout_rate"}


@pytest.mark.parametrize(
    ("kind", "name"), [("torch", "dropout_rate"), *((kind, name) for kind in LAYERS for name in (*PASSED, *CALLED))]
)
def test_every_option_reaches_attention(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    option = {name: (PASSED | {"dropout_rate": 0.25})[name]} if name not in CALLED else {}
    layer = layer_of(kind, **option)

    def recorder(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        seen.update({ON_CALL.get(keyword, keyword): value for keyword, value in keywords.items()})
        return layer.framework.zeros(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(module if kind == "torch" else flax_layer, "attention", recorder)
    call = layer.arguments({name: CALLED[name]} if name in CALLED else {})
    layer(X, **call)
    given = {**option, **call}[name]
    same = np.array_equal if isinstance(given, jax.Array) else operator.eq if kind == "linen" else operator.is_
    assert same(seen[name], given)


@torchs_on_gpus
@every_layer
@pytest.mark.parametrize("mode", ["training", "training without gradients", "inference"])
def test_key_ranges_hide_what_their_mask_hides(make: Any, kind: str, mode: str) -> None:
    if kind != "torch" and mode != "inference":
        pytest.skip("no modes; for gradients see below")
    layer, seen = make(), visible_in_ranges(RANGES, SEQ, HEADS)
    assert not seen.all()
    if kind == "torch":
        layer.module.train(mode != "inference")
    with torch.set_grad_enabled(mode == "training"):
        results = [layer(X, key_ranges=RANGES), layer(X, mask=seen)]
    close(*results)
    assert not np.allclose(as_numpy(results[0]), as_numpy(layer(X)), atol=1e-3)
    if mode == "training":
        gradients = [torch.autograd.grad(out.square().sum(), [*layer.module.parameters()]) for out in results]
        # The gradient of the keys' bias is 0 without rounding: it adds to all scores of a row.
        rounding = 1e-6 * max(float(each.abs().max()) for each in gradients[1])
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=rounding)


def test_gradients_of_key_ranges_are_those_of_their_mask_in_linen() -> None:
    layer, seen = layer_of("linen"), jnp.asarray(visible_in_ranges(RANGES, SEQ, HEADS))

    def gradients(**call: Any) -> Any:
        return jax.grad(lambda params: (layer.module.apply({"params": params}, X, **call) ** 2).sum())(layer.params)

    both = gradients(key_ranges=jnp.asarray(RANGES)), gradients(mask=seen)
    jax.tree.map(lambda one, other: close(one, other, rtol=1e-3, atol=1e-3), *both)


@torchs_on_gpus
@every_layer
def test_functions_and_their_arrays(make: Any) -> None:
    layer, of = make(), np.arange(SEQ, dtype=np.int32) // 3
    by_function = layer(X, mask_mod=lambda b, h, q, k, of: of[q] == of[k], aux=(layer.framework.array(of),))
    close(by_function, layer(X, mask=of[:, None] == of))


def options_of(layer: Any) -> set[str]:
    return set(inspect.signature(layer).parameters) - {"self"}


def test_the_layers_have_the_same_options() -> None:
    of_linen = {field.name for field in dataclasses.fields(linen.Attention)} - {"parent", "name"}
    of_nnx, of_torch = options_of(nnx.Attention.__init__), options_of(Attention.__init__)
    assert of_linen == of_nnx - {"in_features", "in_kv_features", "rngs", "keep_rngs"}
    initialisers = {name for name in of_nnx if name.endswith("_init")}
    flax_only = {"deterministic", "param_dtype", "rngs", "keep_rngs"} | initialisers
    # torch has use_context_parallel
    flax_only |= {"decode", "normalize_qk", "precision"}  # options of Flax's own layers
    flax_only |= {"context_axis", "context_strategy", "context_layout", "context_length"}
    assert of_torch - {"device"} == of_nnx - flax_only
    of_calls = [options_of(call) for call in (linen.Attention.__call__, nnx.Attention.__call__, Attention.forward)]
    assert of_calls[0] - {"dropout_rng"} == of_calls[1] - {"rngs", "decode"}  # as in Flax
    assert of_calls[2] == of_calls[1] - {"deterministic", "rngs", "decode"}


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"num_kv_heads": 4}, {}, ShapeError, "num_kv_heads=4"),
    ({"head_dim": None}, {}, ShapeError, "needs head_dim="),
    ({"head_dim": 0}, {}, ShapeError, "head_dim=0"),
    ({"window": 3}, {}, SpecError, "window=3"),
    ({"softcap": -1.0}, {}, SpecError, "softcap=-1.0"),
    ({"dropout_rate": -0.5}, {}, SpecError, "dropout=-0.5"),
    ({"backend": "sdpa"}, {}, SpecError, "backend='sdpa'"),
    ({}, {"positions": np.arange(SEQ)}, SpecError, "positions: expected None"),
    ({"rotary": rope_in_torch}, {"positions": np.arange(SEQ + 1)}, ShapeError, "positions: expected"),
    ({"rotary": rope_in_torch}, {"context": CONTEXT}, SpecError, "rotary: expected self-"),
    ({}, {"context": normal(1, BATCH + 1, KV_SEQ, FEATURES)}, ShapeError, "context: expected"),
    ({}, {"seq_info": SeqInfo.from_lengths([SEQ])}, ShapeError, "one row of packed documents"),
]
REFUSED_BY_TORCH: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *REFUSED,
    (
        {},
        {"context": normal(1, BATCH, KV_SEQ, FEATURES + 1)},
        ShapeError,
        "context: expected the layer's 13 features",
    ),
    ({"in_kv_features": 17}, {}, ShapeError, "context: expected an input with the layer's 17 key features"),
    ({}, {"mask": np.ones((SEQ, SEQ), np.float32)}, DTypeError, "mask: expected dtype bool"),  # Flax's masks are floats
]


@pytest.mark.parametrize(
    ("kind", "options", "call", "error", "says"),
    [
        *(("torch", *row) for row in REFUSED_BY_TORCH),
        *((kind, *row) for kind in ("linen", "nnx") for row in REFUSED),
    ],
)
def test_refusals_name_the_argument(kind: str, options: Any, call: Any, error: type[Exception], says: str) -> None:
    options = {**SIZES, **options}
    if kind != "torch" and "dropout_rate" in options:
        options["deterministic"] = False
    given = layer_of(kind).arguments(call)
    x = (TORCH if kind == "torch" else JAX).array(X)
    with pytest.raises(error, match=says):
        if kind == "torch":
            Attention(HEADS, FEATURES, **options)(x, **given)
        elif kind == "nnx":
            nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **options)(x, **given)
        else:
            rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            linen.Attention(HEADS, **options).init_with_output(rngs, x, **given)


def test_inputs_of_a_wrong_shape_are_named() -> None:
    for kind in ("torch", "nnx"):
        with pytest.raises(ShapeError, match="x: expected the layer's 13 features"):
            layer_of(kind)(normal(0, BATCH, SEQ, FEATURES + 1))
    with pytest.raises(ShapeError, match="need seq_info="):
        layer_of("torch")(normal(0, SEQ, FEATURES))
    with pytest.raises(ShapeError, match=r"x: expected \[..., seq, features\]"):
        linen.Attention(HEADS, **SIZES).init(jax.random.key(0), normal(0, FEATURES))
    x, layer = normal(0, 3, BATCH, SEQ, FEATURES), layer_of("nnx", rotary=ROPE)
    with pytest.raises(ShapeError, match="with seq_info"):
        layer_of("nnx")(x, seq_info=SeqInfo.from_lengths([SEQ]))
    for call, says in (
        ({"context": x[0]}, "context: expected the layout and batch of x"),
        ({"mask": np.ones((BATCH, 3, 1, SEQ, SEQ), bool)}, r"mask: expected batch axes broadcastable to \[3, 2\]"),
        ({"bias": np.ones((1, 1, 1, 1, SEQ, SEQ))}, "bias: expected at most 5 axes"),
        ({"alibi_slopes": np.ones((BATCH, HEADS))}, r"alibi_slopes: expected \[heads\] or \[batch..., heads\]"),
        ({"key_ranges": np.zeros((6, 1, SEQ, 1, 2), np.int32)}, r"key_ranges: expected \[batch..., kv_heads or 1"),
        ({"positions": np.zeros((BATCH, 1, SEQ), int)}, r"positions: expected \[batch..., length\] = \[3, 2, 7\]"),
    ):
        with pytest.raises(ShapeError, match=says):
            layer(x, **call)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_what_a_masked_array_hides_is_not_dropped(name: str) -> None:
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **SIZES)
    hidden = np.ma.masked_array(np.ones((SEQ, SEQ), np.float32), True)
    with pytest.raises(TypeError, match=rf"^{name}: expected an? .*[aA]rray, got numpy.ma.*MaskedArray"):
        layer(JAX.array(X), **{name: hidden})


# Flax alone


@pytest.fixture
def on_device(device: str) -> Iterator[None]:
    with jax_on(device):
        yield


everywhere = pytest.mark.usefixtures("on_device")


@everywhere
@pytest.mark.words
@pytest.mark.parametrize("cross", [False, True])
def test_parameters_and_results_equal_those_of_flax(cross: bool) -> None:
    x, context = normal(0, BATCH, SEQ, HEADS * DIM), CONTEXT if cross else None
    theirs = flax_linen.MultiHeadDotProductAttention(HEADS)
    mask = jax.random.bernoulli(jax.random.key(2), 0.6, (BATCH, 1, SEQ, KV_SEQ if cross else SEQ)).at[..., 0].set(True)
    expected, params = theirs.init_with_output(jax.random.key(0), x, context, mask=mask)
    ours = linen.Attention(HEADS)
    fresh = ours.init(jax.random.key(0), x, context)
    for actual, desired in zip(jax.tree.leaves_with_path(fresh), jax.tree.leaves_with_path(params), strict=True):
        assert actual[0] == desired[0]
        np.testing.assert_array_equal(actual[1], desired[1])
    close(ours.apply(params, x, context, mask=mask), expected)

    in_kv = {"in_kv_features": FEATURES} if cross else {}
    nnx_theirs = flax_nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=False, rngs=flax_nnx.Rngs(0), **in_kv)
    nnx_ours = nnx.Attention(HEADS, HEADS * DIM, rngs=flax_nnx.Rngs(0), **in_kv)
    for name in ("query", "key", "value", "out"):
        np.testing.assert_array_equal(getattr(nnx_ours, name).kernel[...], getattr(nnx_theirs, name).kernel[...])
    close(nnx_ours(x, context, mask=mask), nnx_theirs(x, context, mask=mask))


@everywhere
@pytest.mark.words
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_masks_from_flaxs_helpers_work(kind: str) -> None:
    mask = flax_linen.make_causal_mask(jnp.ones((BATCH, SEQ)))
    assert mask.dtype == jnp.float32
    layer = layer_of(kind)
    expected = layer(X, mask=mask.astype(bool))
    np.testing.assert_array_equal(layer(X, mask=mask), expected)
    assert np.abs(expected - layer(X)).max() > 0.01


@everywhere
@nowhere_on_gpus
@pytest.mark.parametrize("batch", [(), (2, 3), (1, 2)], ids=str)
def test_any_number_of_batch_axes_equals_one(batch: tuple[int, ...]) -> None:
    """Each call runs on rows that are folded into one batch axis, with each of its tables."""
    rows, x = int(np.prod(batch)), normal(0, *batch, SEQ, FEATURES)
    layer, twin = (layer_of(kind, rotary=ROPE, causal=True) for kind in ("linen", "nnx"))
    ranges = masks.prefix_lm([1 + row for row in range(rows)], SEQ)
    tables = {
        "mask": normal(1, *batch, 1, SEQ, SEQ) > -1,
        "bias": normal(2, *batch, HEADS, 1, SEQ),
        "alibi_slopes": normal(3, *batch, HEADS),
        "key_ranges": ranges.reshape(*batch, *ranges.shape[1:]),
        "positions": np.random.default_rng(4).integers(0, 20, (*batch, SEQ), np.int32),
    }

    def folded(array: Any) -> Any:
        return array.reshape(rows, *array.shape[len(batch) :])

    expected = layer(folded(x), **{name: folded(table) for name, table in tables.items()})
    actual = layer(x, **tables)
    assert actual.shape == (*batch, SEQ, OUT)
    close(folded(actual), expected)
    close(twin(x, **tables), actual)
    shared = {"mask": tables["mask"][(0,) * len(batch)], "bias": tables["bias"][(0,) * len(batch)]}
    shared |= {"key_ranges": ranges[:1], "alibi_slopes": normal(3, HEADS), "positions": np.arange(SEQ)}
    close(folded(layer(x, **shared)), layer(folded(x), **shared))


@everywhere
@nowhere_on_gpus
def test_cross_attention_without_a_batch_and_with_normalised_heads() -> None:
    x, context = normal(0, SEQ, HEADS * DIM), normal(1, KV_SEQ, FEATURES)
    theirs = flax_linen.MultiHeadDotProductAttention(HEADS, normalize_qk=True)
    fresh = theirs.init(jax.random.key(0), x, context)
    leaves, tree = jax.tree.flatten(fresh)
    params = tree.unflatten([0.5 * normal(9 + seed, *leaf.shape) for seed, leaf in enumerate(leaves)])
    expected = theirs.apply(params, x, context)
    close(linen.Attention(HEADS, normalize_qk=True).apply(params, x, context), expected)
    assert not np.allclose(linen.Attention(HEADS).apply(params, x, context), expected, atol=1e-3)


@everywhere
@pytest.mark.words
def test_dropout_follows_the_rules_of_flax() -> None:
    expected, layer = layer_of("linen")(X), layer_of("linen", dropout_rate=0.4)
    with pytest.raises(ValueError, match="deterministic"):
        layer(X)
    close(layer(X, deterministic=True), expected)
    first, again, other = (layer(X, deterministic=False, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, expected, atol=1e-3) and not np.allclose(first, other, atol=1e-3)
    given = layer(X, deterministic=False, dropout_rng=jax.random.key(7))
    assert not np.allclose(given, first, atol=1e-3)

    twin = layer_of("nnx", dropout_rate=0.4)
    with pytest.raises(SpecError, match="deterministic=None"):
        twin(X)
    twin.module.eval()
    close(twin(X), expected)
    twin.module.train()
    assert not np.allclose(twin(X), twin(X), atol=1e-3)  # the layer's own stream of random numbers advances
    first, again = (twin(X, rngs=flax_nnx.Rngs(dropout=3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    with pytest.raises(SpecError, match="keep_rngs=False"):
        layer_of("nnx", dropout_rate=0.4, deterministic=False, keep_rngs=False)(X)


@everywhere
@nowhere_on_gpus
def test_vmap_over_layers_and_remat() -> None:
    layer = layer_of("linen", causal=True)
    params = {"params": layer.params}
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    close(jax.vmap(layer.module.apply, in_axes=(0, None))(stacked, X)[0], layer(X))
    remat = flax_linen.remat(linen.Attention)(HEADS, causal=True, **SIZES)
    desired, again = (jax.grad(lambda p, m=m: jnp.sum(m.apply(p, X) ** 2))(params) for m in (layer.module, remat))
    # The gradient of the key projection's bias is 0 but for rounding, which is relative to the largest gradient.
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(desired))
    jax.tree.map(partial(close, atol=TOLERANCE["atol"] * max(largest, 1.0)), desired, again)


def test_two_nnx_layers_differ_in_their_parameters_alone() -> None:
    """Whatever functions initialised them: they have one structure, and a layer can be pickled."""
    normal = flax_nnx.initializers.normal
    one, other = (
        nnx.Attention(2, 8, kernel_init=normal(0.02), sinks=True, sinks_init=normal(1.0), rngs=flax_nnx.Rngs(seed))
        for seed in (0, 1)
    )
    assert flax_nnx.graphdef(one) == flax_nnx.graphdef(other)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, flax_nnx.state(one), flax_nnx.state(other))
    assert jax.tree.structure(mean) == jax.tree.structure(flax_nnx.state(one))
    again = pickle.loads(pickle.dumps(one))
    x = jnp.ones((1, 3, 8))
    np.testing.assert_array_equal(again(x), one(x))


# torch alone


def test_dropout_only_while_training(device: str) -> None:
    layer = layer_of("torch", device, dropout_rate=0.4)
    assert not torch.allclose(layer(X), layer(X), atol=1e-3)
    layer.module.eval()
    close(layer(X), layer_of("torch", device)(X))


def test_sinks_are_learned(device: str) -> None:
    layer = layer_of("torch", device, sinks=True)
    layer(X).sum().backward()
    assert layer.module.sink_logits.grad.abs().min() > 0
    assert "sink_logits" in layer.module.state_dict() and "sink_logits" not in layer_of("torch").module.state_dict()


def test_compiles_in_one_graph(device: str) -> None:
    layer = layer_of("torch", device, rotary=ROPE, causal=True, window=3)
    torch._dynamo.reset()
    compiled = torch.compile(layer.module, fullgraph=True, backend="aot_eager")
    close(layer._replace(call=compiled)(X), layer(X))


@pytest.mark.usefixtures("scalar_inductor")
def test_compiled_positions_of_packed_tokens(device: str) -> None:
    """With a compiler that generates kernels: on a GPU, some compile searchsorted so that it ignores a view's start."""
    offsets = torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32, device=device)  # token 9 belongs to no document
    lengths = torch.tensor([5, 0, 8, 2], dtype=torch.int32, device=device)

    def both(x: Any, offsets: Any, lengths: Any) -> Any:
        info = SeqInfo.unchecked(offsets, offsets, 4, 4)
        step = Step(lengths[:, None], lengths, offsets, 4)
        return module.token_positions(None, info, x), token_places(step, x[0, :, 0])

    x = torch.zeros(1, 10, HEADS, DIM, device=device)
    torch._dynamo.reset()
    for function in (both, torch.compile(both, fullgraph=True)):
        positions, places = function(x, offsets, lengths)
        assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]]
        assert places.tolist() == [2, 3, 4, 4, 5, 6, 7, 0, 1, 2]


def test_its_text_names_its_options() -> None:
    layer = layer_of("torch", causal=True, window=3).module
    assert layer.extra_repr() == "heads=6/3, head_dim=4/8, causal, window=3"
