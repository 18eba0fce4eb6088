"""Tests the layers with ``pages=``: decoding equals the layer on rows, in torch, linen and NNX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from page_steps import advance

pytest.importorskip("torch")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import torch
from flax import nnx as flax_nnx
from frameworks import JAX, TORCH

import jax_frontend
import torch_frontend
from attn_core import PageAllocator
from attn_core.errors import ShapeError, SpecError
from attn_core.paged.step import Pages
from jax_frontend import linen, nnx
from torch_frontend import module

pytestmark = pytest.mark.sampled

HEADS, KV_HEADS, DIM, VALUE_DIM, FEATURES, OUT = 6, 3, 4, 8, 13, 11
SIZES = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM, "out_features": OUT}
POOL = {"num_layers": 1, "num_pages": 17, "page_size": 3, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM}
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}

LENGTHS = {"a": 13, "b": 7, "c": 5, "d": 1}
STEPS = (
    {"a": 5, "b": 3},
    {"c": 4, "b": 1, "a": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"b": 2, "a": 4},
    {"a": 2},
)
"""New tokens of each sequence: chunks of prompts, single tokens, and both at once, in changing order."""


def rope(cos: Any, concatenate: Any, q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
    """Rotates halves of the channels by angles that grow with the position; arrays of either framework."""
    assert q.ndim == k.ndim == 4 and tuple(positions.shape) == tuple(q.shape[:2])
    half = q.shape[-1] // 2
    angles = [positions[..., None, None] * 0.3**channel for channel in range(half)]  # each [batch, seq, 1, 1]
    cosine, sine = (concatenate([cos(angle - turn) for angle in angles], -1) for turn in (0.0, np.pi / 2))

    def rotated(array: Any) -> Any:
        first, second = array[..., :half], array[..., half:]
        return concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    return rotated(q), rotated(k)


ROTARY: dict[str, Callable[..., Any]] = {
    "torch": partial(rope, torch.cos, torch.cat),
    "jax": jax.jit(partial(rope, jnp.cos, jnp.concatenate)),
}

OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "window": 3, "use_bias": False},
    {"window": (4, 0), "softcap": 0.7, "sinks": True, "scale": 0.8},
    {"causal": True, "rotary": True},
    {"causal": True, "rotary": True, "window": 5, "sinks": True, "softcap": 2.0},
)
ALL_AT_ONCE: tuple[dict[str, Any], ...] = ({}, {"window": (2, 1), "rotary": True}, {"window": (None, 2), "sinks": True})
"""Options under which a token sees later tokens, so all tokens must be there."""


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parameters(options: dict[str, Any]) -> dict[str, Any]:
    """Numbers for every parameter, in Flax's shapes."""
    shapes = {
        "query": (FEATURES, HEADS, DIM),
        "key": (FEATURES, KV_HEADS, DIM),
        "value": (FEATURES, KV_HEADS, VALUE_DIM),
    }
    shapes["out"] = (HEADS, VALUE_DIM, OUT)
    made: dict[str, Any] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        made[name] = {"kernel": 0.5 * normal(seed, *shape)}
        if options.get("use_bias", True):
            made[name]["bias"] = 0.5 * normal(10 + seed, *(shape[2:] if name == "out" else shape[1:]))
    if options.get("sinks"):
        made["sink_logits"] = normal(20, HEADS)
    return made


class InTorch:
    """A torch layer. ``rows`` and ``paged`` take and return numpy arrays; ``cache`` holds its pages."""

    def __init__(self, options: dict[str, Any], **pool: Any) -> None:
        rotary = ROTARY["torch"] if options.get("rotary") else None
        self.layer = module.Attention(HEADS, FEATURES, **{**SIZES, **options, "rotary": rotary}).eval()
        state = {}
        for name, twin in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("o_proj", "out")):
            given = parameters(options)[twin]
            outputs = OUT if twin == "out" else -1
            inputs = -1 if twin == "out" else FEATURES
            state[f"{name}.weight"] = torch.tensor(given["kernel"].reshape(inputs, outputs).T.copy())
            if "bias" in given:
                state[f"{name}.bias"] = torch.tensor(given["bias"].reshape(-1))
        if options.get("sinks"):
            state["sink_logits"] = torch.tensor(parameters(options)["sink_logits"])
        self.layer.load_state_dict(state)
        self.cache = torch_frontend.PagedKVCache(**POOL, **{n: getattr(torch, kind) for n, kind in pool.items()})

    @torch.no_grad()
    def rows(self, x: np.ndarray) -> np.ndarray:
        return self.layer(torch.from_numpy(x)).numpy()

    @torch.no_grad()
    def paged(self, x: np.ndarray, step: Any, **more: Any) -> np.ndarray:
        pages = Pages(self.cache.k_pages[0], self.cache.v_pages[0], step)
        more = {name: torch.as_tensor(value) for name, value in more.items()}
        out, pool = self.layer(torch.from_numpy(x), pages=pages, **more)
        assert pool[0] is self.cache.k_pages[0] and pool[1] is self.cache.v_pages[0]
        return out.numpy()


class InFlax:
    """The same for a Flax layer; ``apply(x, **keywords)``."""

    apply: Callable[..., Any]

    def __init__(self, options: dict[str, Any], **pool: Any) -> None:
        rotary = ROTARY["jax"] if options.get("rotary") else None
        self.make({**SIZES, **options, "rotary": rotary}, jax.tree.map(jnp.asarray, parameters(options)))
        self.cache = jax_frontend.PagedKVCache(**POOL, **pool)

    def make(self, options: dict[str, Any], params: Any) -> None:
        raise NotImplementedError

    def rows(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.apply(jnp.asarray(x)))

    def paged(self, x: np.ndarray, step: Any, **more: Any) -> np.ndarray:
        pages = Pages(self.cache.k_pages[0], self.cache.v_pages[0], step)
        out, (self.cache.k_pages[0], self.cache.v_pages[0]) = self.apply(jnp.asarray(x), pages=pages, **more)
        return np.asarray(out)


class InLinen(InFlax):
    def make(self, options: dict[str, Any], params: Any) -> None:
        self.layer = linen.Attention(HEADS, **options)
        self.apply = partial(self.layer.apply, {"params": params})


class InNnx(InFlax):
    def make(self, options: dict[str, Any], params: Any) -> None:
        self.apply = self.layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **options)
        state = flax_nnx.state(self.layer, flax_nnx.Param)
        flax_nnx.replace_by_pure_dict(state, params)
        flax_nnx.update(self.layer, state)


LAYERS: dict[str, Any] = {"torch": InTorch, "linen": InLinen, "nnx": InNnx}
every_layer = pytest.mark.parametrize("name", LAYERS)


def id_of(options: dict[str, Any]) -> str:
    return ",".join(options) or "plain"


def sequences() -> dict[str, np.ndarray]:
    return {name: normal(50 + i, length, FEATURES) for i, (name, length) in enumerate(LENGTHS.items())}


def decoded(layer: Any, steps: Any = STEPS, with_positions: bool = False, width: int | None = None) -> dict[str, Any]:
    """The outputs ``[length, OUT]`` of each sequence, with its tokens fed step by step."""
    rows, done = sequences(), dict.fromkeys(LENGTHS, 0)
    actual: dict[str, list[np.ndarray]] = {name: [] for name in LENGTHS}
    for name in LENGTHS:
        layer.cache.add(name)
    for counts in steps:
        step = layer.cache.step(list(counts), list(counts.values()), width=width)
        x = np.concatenate([rows[name][done[name] : done[name] + count] for name, count in counts.items()])
        places = np.concatenate([np.arange(done[name], done[name] + count) for name, count in counts.items()])
        out = layer.paged(x, step, **({"positions": places.astype(np.int32)} if with_positions else {}))
        assert out.shape == (len(x), OUT)
        for name, part in zip(counts, np.split(out, np.cumsum(list(counts.values()))[:-1]), strict=True):
            actual[name].append(part)
            done[name] += counts[name]
    assert done == LENGTHS
    return {name: np.concatenate(parts) for name, parts in actual.items()}


def on_rows(layer: Any) -> dict[str, np.ndarray]:
    return {name: layer.rows(x[None])[0] for name, x in sequences().items()}


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], **(tolerance or TOLERANCE), err_msg=name)


# The same numbers


@every_layer
@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
def test_decoding_equals_the_layer_on_rows(name: str, options: dict[str, Any]) -> None:
    layer = LAYERS[name](options)
    assert_same(decoded(layer), on_rows(layer))


@every_layer
@pytest.mark.parametrize("options", ALL_AT_ONCE, ids=id_of)
def test_prompts_in_one_step_equal_the_layer_on_rows(name: str, options: dict[str, Any]) -> None:
    layer = LAYERS[name](options)
    assert_same(decoded(layer, [LENGTHS]), on_rows(layer))


@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
def test_the_layers_of_all_frameworks_agree(options: dict[str, Any]) -> None:
    in_torch, in_linen, in_nnx = (decoded(make(options)) for make in LAYERS.values())
    assert_same(in_linen, in_torch)
    assert_same(in_nnx, in_linen, rtol=0, atol=0)


@every_layer
def test_positions_count_in_each_sequence_unless_passed(name: str) -> None:
    rotating = OPTIONS[3]
    counted = decoded(LAYERS[name](rotating))
    assert_same(decoded(LAYERS[name](rotating), with_positions=True), counted, rtol=0, atol=0)

    layer = LAYERS[name](rotating)
    layer.cache.add("a")
    x = sequences()["a"][:4]
    with_gap = layer.paged(x, layer.cache.step(["a"], [4]), positions=np.array([[0, 1, 2, 9]], np.int32))
    np.testing.assert_allclose(with_gap[:3], counted["a"][:3], **TOLERANCE)
    assert np.abs(with_gap[3] - counted["a"][3]).max() > 1e-2


@every_layer
def test_a_step_with_numpy_tables(name: str) -> None:
    """A step from ``advance`` without a cache: its tables are still on the host."""
    layer = LAYERS[name](OPTIONS[3])
    allocator = PageAllocator(POOL["num_pages"], POOL["page_size"])
    allocator.allocate("a")
    x, results = sequences()["a"], []
    for start, end in ((0, 5), (5, 6), (6, 13)):
        step, _ = advance(allocator, ["a"], end - start, None)
        assert isinstance(step.seq_lens, np.ndarray)
        results.append(layer.paged(x[start:end], step))
    np.testing.assert_allclose(np.concatenate(results), layer.rows(x[None])[0], **TOLERANCE)


@every_layer
def test_forks_share_their_common_tokens(name: str) -> None:
    layer = LAYERS[name](OPTIONS[0])
    trunk, tails = normal(1, 4, FEATURES), {"x": normal(2, 3, FEATURES), "y": normal(3, 3, FEATURES)}
    layer.cache.add("trunk")
    layer.paged(trunk, layer.cache.step(["trunk"], [4]))
    for fork in tails:
        layer.cache.fork("trunk", fork)
    out = layer.paged(np.concatenate(list(tails.values())), layer.cache.step(list(tails), 3))
    for part, tail in zip(np.split(out, 2), tails.values(), strict=True):
        np.testing.assert_allclose(part, layer.rows(np.concatenate([trunk, tail])[None])[0, 4:], **TOLERANCE)


@every_layer
def test_pools_of_another_dtype(name: str) -> None:
    """A float32 layer on pools of half the size: the result is float32, with the precision of bfloat16."""
    layer = LAYERS[name](OPTIONS[4], dtype="bfloat16")
    actual = decoded(layer)
    assert {str(pool.dtype).removeprefix("torch.") for pool in (*layer.cache.k_pages, *layer.cache.v_pages)} == {
        "bfloat16"
    }
    assert all(out.dtype == np.float32 for out in actual.values())
    expected = on_rows(layer)
    largest = max(np.abs(out).max() for out in expected.values())
    assert_same(actual, expected, rtol=0, atol=0.03 * largest)
    assert max(np.abs(actual[name] - expected[name]).max() for name in expected) > 1e-4 * largest


# Compiled


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_decoding_under_jit_with_donated_pools(name: str) -> None:
    layer, traces = LAYERS[name](OPTIONS[4]), []
    eager = layer.apply

    @partial(jax.jit, donate_argnums=(1, 2))
    def compiled(x: Any, k_pages: Any, v_pages: Any, step: Any) -> Any:
        traces.append(step.max_len_q)
        return eager(x, pages=Pages(k_pages, v_pages, step))

    def apply(x: Any, pages: Pages | None = None) -> Any:
        if pages is None:
            return eager(x)
        result = compiled(x, *pages[:3])
        assert pages.k.is_deleted() and pages.v.is_deleted()
        return result

    layer.apply = apply
    singly = [{"a": 1, "b": 1}] * 7 + [{"a": 1, "c": 1}] * 5 + [{"a": 1, "d": 1}]
    assert_same(decoded(layer, singly, width=5), on_rows(layer))
    assert traces == [1]


def test_decoding_under_torch_compile() -> None:
    layer = InTorch(OPTIONS[4])
    expected = on_rows(layer)
    layer.layer = torch.compile(layer.layer, backend="eager", fullgraph=True, dynamic=True)
    assert_same(decoded(layer, width=5), expected)


# Parameters


def test_parameters_do_not_depend_on_pages() -> None:
    x, cache = jnp.ones((2, FEATURES)), jax_frontend.PagedKVCache(**POOL)
    cache.add("a")
    pages = Pages(cache.k_pages[0], cache.v_pages[0], cache.step(["a"], [2]))
    layer = linen.Attention(HEADS, **SIZES, sinks=True)
    plain = jax.jit(layer.init)(jax.random.key(0), x[None])
    paged = jax.jit(lambda key, x, pages: layer.init(key, x, pages=pages))(jax.random.key(0), x, pages)
    assert jax.tree.structure(plain) == jax.tree.structure(paged)
    assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(paged)))


@every_layer
def test_a_call_with_pages_does_not_change_the_layer(name: str) -> None:
    layer = LAYERS[name](OPTIONS[0])
    before = on_rows(layer)
    decoded(layer)
    assert_same(on_rows(layer), before, rtol=0, atol=0)


# Refusals

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "context": ({}, {"context": normal(0, 2, FEATURES)}, SpecError, "^context: expected None with pages"),
    "mask": ({}, {"mask": np.ones((1, 1, 2, 2), bool)}, SpecError, "^mask: expected None with pages"),
    "bias": ({}, {"bias": normal(0, 1, 1, 2, 2)}, SpecError, "^bias: expected None with pages"),
    "alibi_slopes": ({}, {"alibi_slopes": normal(0, HEADS)}, SpecError, "^alibi_slopes: expected None with pages"),
    "seq_info": ({}, {"seq_info": (None, np.array([0, 2], np.int32), 2)}, SpecError, "^seq_info: expected None"),
    "alignment": ({"alignment": "top_left"}, {}, SpecError, "^alignment='top_left': expected bottom_right with pages"),
    "positions": (
        {},
        {"positions": np.zeros(2, np.int32)},
        SpecError,
        "^positions: expected None, because only a rotary",
    ),
    "positions that are not one each": (
        {"rotary": True},
        {"positions": np.zeros(1, np.int32)},
        ShapeError,
        r"^positions: expected \[seq\] = \[2\]",
    ),
    "three axes": ({}, {"x": normal(0, 1, 2, FEATURES)}, ShapeError, r"^x: expected \[tokens, features\] with pages"),
    "one axis": ({}, {"x": normal(0, FEATURES)}, ShapeError, r"^x: expected \[tokens, features\] with pages"),
    "features": ({}, {"x": normal(0, 2, FEATURES + 1)}, ShapeError, f"^x: expected the layer's {FEATURES} features"),
    "heads of the pool": ({}, {}, ShapeError, rf"^k: expected .* = \[2, {KV_HEADS - 1}, {DIM}\]"),
}


REFUSING = [(name, case) for case in REFUSED for name in LAYERS if (name, case) != ("linen", "features")]
"""Flax itself refuses other features than those of linen's weights."""


@pytest.mark.parametrize(("name", "case"), REFUSING)
def test_refusals_name_the_argument(name: str, case: str) -> None:
    options, more, error, words = REFUSED[case]
    layer = LAYERS[name]({"causal": True, **options})
    if case == "heads of the pool":
        layer.cache = type(layer.cache)(**{**POOL, "kv_heads": KV_HEADS - 1})
    layer.cache.add("a")
    f = TORCH if name == "torch" else JAX
    given = f.arrays({"x": normal(0, 2, FEATURES), **more})
    call = layer.layer if name == "torch" else layer.apply
    pages = Pages(layer.cache.k_pages[0], layer.cache.v_pages[0], layer.cache.step(["a"], [2]))
    with pytest.raises(error, match=words), torch.no_grad():
        call(given.pop("x"), pages=pages, **given)
    assert not np.asarray(layer.cache.k_pages[0]).any(), "a refused call wrote to the pool"


@every_layer
def test_dropout_with_pages_is_refused(name: str) -> None:
    options = {**OPTIONS[0], "dropout_rate": 0.25}
    off = {} if name == "torch" else {"deterministic": True}
    on = {} if name == "torch" else {"deterministic": False}
    if name == "linen":
        on["dropout_rng"] = jax.random.key(0)
    layer, plain = LAYERS[name](options), LAYERS[name](OPTIONS[0])
    x, results = normal(0, 2, FEATURES), []
    for one, keywords in ((layer, off), (plain, {})):
        one.cache.add("a")
        results.append(one.paged(x, one.cache.step(["a"], [2]), **keywords))
    np.testing.assert_array_equal(*results)
    if name == "torch":
        layer.layer.train()
    step = layer.cache.step(["a"], [2])
    with pytest.raises(SpecError, match=r"^dropout_rate=0\.25: expected 0 with pages"):
        layer.paged(x, step, **on)


def test_torch_refuses_gradients_with_pages() -> None:
    layer = InTorch(OPTIONS[2])
    layer.cache.add("a")
    pages = Pages(layer.cache.k_pages[0], layer.cache.v_pages[0], layer.cache.step(["a"], [2]))
    with pytest.raises(SpecError, match=r"^k: expected requires_grad=False.*use torch.no_grad"):
        layer.layer(torch.from_numpy(normal(0, 2, FEATURES)), pages=pages)
    assert not layer.cache.k_pages[0].any()
