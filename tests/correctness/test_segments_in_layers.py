"""Tests segment ids and positions in attention_qkvpacked and in the layers: the same numbers as with a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")
pytest.importorskip("equinox")
import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from flax import linen, nnx
from frameworks import BOTH, TORCH, Framework

import jax_frontend
import jax_frontend.equinox
import jax_frontend.linen
import jax_frontend.nnx
import torch_frontend
from attn_core import DTypeError, ShapeError, SpecError
from attn_core.paged.step import Pages
from torch_frontend.module import Attention

BATCH, LENGTH, FEATURES = 2, 11, 8
X = np.random.default_rng(0).normal(size=(BATCH, LENGTH, FEATURES)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 3, (BATCH, LENGTH), np.int32)
POSITIONS = np.random.default_rng(2).integers(0, 7, (BATCH, LENGTH), np.int32)
SAME = IDS[:, :, None] == IDS[:, None]
CASES: dict[str, tuple[dict[str, Any], bool, np.ndarray]] = {
    "ids": ({"q_segment_ids": IDS}, False, SAME),
    "ids of keys": ({"q_segment_ids": IDS, "kv_segment_ids": IDS.copy()}, True, SAME & np.tri(LENGTH, dtype=bool)),
    "positions": (
        {"q_segment_ids": IDS, "q_positions": POSITIONS},
        True,
        SAME & (POSITIONS[:, :, None] >= POSITIONS[:, None]),
    ),
}
"""Arguments of a call, causal, and what they show."""


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_tensor_has_the_numbers_and_the_gradient_of_the_mask(case: str, framework: Framework) -> None:
    said, causal, visible = CASES[case]
    qkv = np.random.default_rng(3).normal(size=(BATCH, LENGTH, 3, 2, 8)).astype(np.float32)

    out = np.ones((BATCH, LENGTH, 2, 8), np.float32)

    def run(**keywords: Any) -> list[np.ndarray]:
        def squared(qkv: Any) -> Any:
            return framework.frontend.attention_qkvpacked(qkv, **framework.arrays(keywords)) ** 2

        return framework.gradients(squared if framework is TORCH else jax.jit(squared), {"qkv": qkv}, out)

    for one, other in zip(run(causal=causal, **said), run(mask=visible[:, None]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_one_array_takes_a_traced_window_and_scale() -> None:
    qkv = jnp.asarray(np.random.default_rng(3).normal(size=(BATCH, LENGTH, 3, 2, 8)).astype(np.float32))
    call = lambda window, scale: jax_frontend.attention_qkvpacked(qkv, causal=True, window=window, scale=scale)  # noqa: E731
    np.testing.assert_allclose(jax.jit(call)(3, 0.5), call(3, 0.5), rtol=2e-5, atol=2e-6)


def torch_layer(causal: bool, **call: Any) -> np.ndarray:
    torch.manual_seed(0)
    rotary = call.pop("rotary", None)
    layer = Attention(4, FEATURES, num_kv_heads=2, head_dim=8, causal=causal, rotary=rotary)
    trains = call.pop("trains", False)
    call = {name: torch.from_numpy(array) if isinstance(array, np.ndarray) else array for name, array in call.items()}
    with torch.no_grad():
        return layer.train(trains)(torch.from_numpy(X), **call).numpy()


def linen_layer(causal: bool, **call: Any) -> np.ndarray:
    layer = jax_frontend.linen.Attention(4, num_kv_heads=2, head_dim=8, causal=causal, rotary=call.pop("rotary", None))
    parameters = layer.init(jax.random.key(0), jnp.asarray(X))
    return np.asarray(jax.jit(layer.apply)(parameters, jnp.asarray(X), **call))


def nnx_layer(causal: bool, **call: Any) -> np.ndarray:
    options: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 8, "causal": causal, "rotary": call.pop("rotary", None)}
    layer = jax_frontend.nnx.Attention(4, FEATURES, **options, rngs=nnx.Rngs(0))
    return np.asarray(layer(jnp.asarray(X), **call))


def equinox_layer(causal: bool, **call: Any) -> np.ndarray:
    layer = eqx.nn.MultiheadAttention(2, FEATURES, key=jax.random.key(0))
    if "mask" in call:
        call["mask"] = call["mask"][:, 0]
    rows = jax.vmap(lambda x, said: jax_frontend.equinox.attend(layer, x, x, x, causal=causal, **said))
    return np.asarray(rows(jnp.asarray(X), call))


LAYERS = {"torch": torch_layer, "linen": linen_layer, "nnx": nnx_layer, "equinox": equinox_layer}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_has_the_numbers_of_the_mask(layer: str, case: str) -> None:
    said, causal, visible = CASES[case]
    run = LAYERS[layer]
    expected = run(False, mask=visible[:, None])
    np.testing.assert_allclose(run(causal, **said), expected, rtol=2e-4, atol=2e-5)
    if layer == "torch":  # without gradients, as re-entrant checkpointing calls a layer that trains
        np.testing.assert_allclose(run(causal, **said, trains=True), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("layer", ["torch", "linen", "nnx"])
def test_rotary_reads_the_positions_of_queries(layer: str) -> None:
    seen: list[Any] = []

    def rotary(q: Any, k: Any, positions: Any) -> Any:
        seen.append(positions)
        angles = positions[:, :, None, None]
        return q * angles, k * angles

    run, said = LAYERS[layer], {"q_segment_ids": IDS, "q_positions": POSITIONS}
    implied = run(True, rotary=rotary, **said)
    np.testing.assert_array_equal(implied, run(True, rotary=rotary, **said, positions=POSITIONS))
    plain = run(True, rotary=rotary, q_segment_ids=IDS)
    assert not np.allclose(plain, implied)
    assert len(seen) >= 3
    with pytest.raises(SpecError, match="positions: expected an array with kv_positions"):
        run(True, rotary=rotary, **said, kv_positions=POSITIONS[:, ::-1].copy())


def test_a_flax_layer_folds_the_ids_of_several_batch_axes() -> None:
    layer = jax_frontend.linen.Attention(2, head_dim=8, causal=True)
    x, ids = jnp.asarray(X), jnp.asarray(IDS)
    parameters = layer.init(jax.random.key(0), x)
    expected = layer.apply(parameters, x, q_segment_ids=ids)
    folded = layer.apply(parameters, x[:, None], q_segment_ids=ids[:, None])
    np.testing.assert_array_equal(folded[:, 0], expected)
    for row in range(BATCH):
        one = layer.apply(parameters, x[row], q_segment_ids=ids[row])
        np.testing.assert_allclose(one, expected[row], rtol=2e-5, atol=2e-6)
    with pytest.raises(ShapeError, match=r"q_segment_ids: expected \[batch..., length\] with the batch \[2, 1\]"):
        layer.apply(parameters, x[:, None], q_segment_ids=ids)


def test_decode_hides_cached_tokens_of_other_segments() -> None:
    layer = jax_frontend.linen.Attention(2, head_dim=8, causal=True, decode=True)
    whole = jax_frontend.linen.Attention(2, head_dim=8, causal=True)
    x, ids = jnp.asarray(X), jnp.asarray(IDS)
    variables = layer.init(jax.random.key(0), x)
    expected = whole.apply({"params": variables["params"]}, x, q_segment_ids=ids)
    parts = []
    for part in (slice(0, 5), slice(5, 6), slice(6, LENGTH)):
        said = {"q_segment_ids": ids[:, part], "kv_segment_ids": ids}
        out, changed = layer.apply(variables, x[:, part], **said, mutable=["cache"])
        variables = {**variables, **changed}
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=2e-5, atol=2e-6)
    with pytest.raises(SpecError, match="q_positions: expected None with decode=True"):
        layer.apply(variables, x[:, :1], q_positions=ids[:, :1], mutable=["cache"])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_names_a_bad_argument(layer: str) -> None:
    run = LAYERS[layer]
    with pytest.raises(DTypeError, match="q_segment_ids: expected dtype int32"):
        run(False, q_segment_ids=IDS.astype(np.int16))
    with pytest.raises(ShapeError, match="q_segment_ids: expected"):
        run(False, q_segment_ids=IDS[:, :-1])
    with pytest.raises(SpecError, match="q_segment_ids: expected an array with kv_segment_ids"):
        run(False, kv_segment_ids=IDS)


def test_pages_and_context_parallelism_refuse_ids_by_name() -> None:
    layer = Attention(2, FEATURES, head_dim=8, causal=True)
    cache = torch_frontend.PagedKVCache(num_layers=1, num_pages=8, page_size=2, kv_heads=2, head_dim=8)
    cache.add("a")
    pages = Pages(cache.k_pages[0], cache.v_pages[0], cache.step(["a"], [LENGTH]))
    with pytest.raises(SpecError, match="q_segment_ids: expected None with pages"):
        layer(torch.from_numpy(X[0]), q_segment_ids=torch.from_numpy(IDS[0]), pages=pages)
    flax_layer = jax_frontend.linen.Attention(2, head_dim=8, causal=True, context_axis="rows")
    parameters = linen.meta.unbox(flax_layer.init(jax.random.key(0), jnp.asarray(X)))
    with pytest.raises(SpecError, match="q_segment_ids: expected None in context parallelism"):
        flax_layer.apply(parameters, jnp.asarray(X), q_segment_ids=jnp.asarray(IDS))
