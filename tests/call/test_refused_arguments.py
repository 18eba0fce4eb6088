"""Tests arguments that are refused by name, where they used to raise unclear errors or were accepted."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, Framework
from unsloth_rows import attend_as_unsloth

from attn_core import DTypeError, ShapeError, SpecError
from torch_frontend.finetrainers import attention_dispatch

SIZES: dict[str, Any] = {"num_layers": 2, "num_pages": 4, "page_size": 4, "kv_heads": 1, "head_dim": 8}
everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)


@everywhere
@pytest.mark.parametrize("name", [*SIZES, "value_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8"])
def test_a_cache_refuses_sizes_below_1_and_of_wrong_types(framework: Framework, name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"^{name}={value!r}: expected at least 1, as an int"):
        framework.frontend.PagedKVCache(**{**SIZES, name: value})


@everywhere
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_a_cache_refuses_dtypes_that_a_pool_cannot_have(framework: Framework, dtype: str) -> None:
    given = getattr(torch, dtype) if framework.name == "torch" else jnp.dtype(dtype)
    with pytest.raises(DTypeError, match=f"^dtype: expected one of float64.*, got {dtype}"):
        framework.frontend.PagedKVCache(**SIZES, dtype=given)


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_cache_accepts_every_dtype_of_a_pool(framework: Framework, dtype: str) -> None:
    given = getattr(torch, dtype) if framework.name == "torch" else getattr(jnp, dtype)
    assert str(framework.frontend.PagedKVCache(**SIZES, dtype=given).k_pages[0].dtype).endswith(dtype)


@everywhere
@pytest.mark.parametrize("layer", [2, 5, -1, True, 1.0, "a", None])
def test_a_cache_refuses_a_layer_out_of_range(framework: Framework, layer: Any) -> None:
    cache = framework.frontend.PagedKVCache(**SIZES)
    cache.add("a")
    step, k = cache.step(["a"], 2), framework.zeros(2, 1, 8)
    for use in (lambda: cache.update(layer, k, k, step), lambda: cache.attend(layer, k, step)):
        with pytest.raises(SpecError, match=rf"^layer={layer!r}: expected a number from 0 to 1"):
            use()
    cache.update(np.int64(1), k, k, step)


@everywhere
def test_max_len_q_of_0_is_refused(framework: Framework) -> None:
    cache = framework.frontend.PagedKVCache(**SIZES)
    cache.add("a")
    step, q = cache.step(["a"]), framework.zeros(1, 1, 8)
    with pytest.raises(SpecError, match=r"^max_len_q=0: expected 1 or more"):
        framework.frontend.paged_attention(q, cache.k_pages[0], cache.v_pages[0], **step.tables, max_len_q=0)


@everywhere
@pytest.mark.parametrize("bag", ["sdpa_kwargs", "flash_dense_kwargs", "xformers_kwargs"])
@pytest.mark.parametrize("value", [[1], "a", [], 0, (("scale", 1.0),)])
@pytest.mark.parametrize("with_mask", [False, True])
def test_options_that_are_no_dict_are_refused(framework: Framework, bag: str, value: Any, with_mask: bool) -> None:
    mask = framework.array(np.ones((1, 5), np.int32)) if with_mask else None
    q, config = framework.zeros(1, 5, 2, 8), {"backend": "sdpa", bag: value}
    with pytest.raises(SpecError, match=rf"^config\.{bag}=.*: expected a dict of options by name"):
        attend_as_unsloth(framework.frontend, q, q, q, config, attention_mask=mask)


@pytest.mark.parametrize("value", ["yes", 1, 0, None, 1.0])
def test_enable_gqa_must_be_a_bool(value: Any) -> None:
    q = torch.zeros(1, 2, 5, 8)
    for _ in range(2):
        with pytest.raises(SpecError, match=f"^enable_gqa={value!r}: expected True or False"):
            attention_dispatch(q, q, q, enable_gqa=value)
        attention_dispatch(q, q, q, enable_gqa=True)


@everywhere
@pytest.mark.parametrize(
    ("shape", "says", "spelled"),
    [
        ((5, 7), r"both \[batch, kv\] and \[q, kv\]; write mask\[:, None, None, :\] .*\[None, None\]", (5, 1, 1, 7)),
        ((5, 5, 7), r"both \[batch, q, kv\] and \[heads, q, kv\]; write mask\[:, None\] .*\[None\]", (5, 1, 5, 7)),
        ((5, 1, 7), r"both \[batch, q, kv\] and \[heads, q, kv\]; write", (5, 1, 1, 7)),
    ],
    ids=str,
)
def test_an_ambiguous_mask_is_refused(
    framework: Framework, shape: tuple[int, ...], says: str, spelled: tuple[int, ...]
) -> None:
    q, k, attention = framework.zeros(5, 5, 5, 8), framework.zeros(5, 7, 5, 8), framework.frontend.attention
    mask = framework.array(np.ones(shape, bool))
    for _ in range(2):  # no cache hides the second error
        with pytest.raises(ShapeError, match=rf"^mask: expected four axes, got {re.escape(str(list(shape)))}.*{says}"):
            attention(q, k, k, mask=mask)
    attention(q, k, k, mask=mask.reshape(spelled))
    attention(q, k, k, mask=mask.reshape((1,) * (4 - len(shape)) + shape))
    attention(q[:1], k[:1], k[:1], mask=mask)  # a batch of one row leaves one reading
    attention(q, k, k, bias=framework.zeros(*shape))


@everywhere
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(
    ("shape", "spelling"),
    [(s, "[:, None, None, :]") for s in ((2, 7), (2, 7, 1, 1))] + [((2, 5, 7), "[:, None]")],
    ids=str,
)
def test_a_mask_of_batch_rows_names_its_spelling(framework: Framework, name: str, shape: Any, spelling: str) -> None:
    q, k = framework.zeros(2, 5, 3, 8), framework.zeros(2, 7, 3, 8)
    table = framework.array(np.ones(shape, bool if name == "mask" else np.float32))
    with pytest.raises(
        ShapeError, match=rf"^{name}: .* got {re.escape(str(list(shape)))}; .* is {name}{re.escape(spelling)}$"
    ):
        framework.frontend.attention(q, k, k, **{name: table})


@everywhere
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mask", (2, 1, 1, 7), "mask: expected a shape .*"),
        ("bias", (6, 7, 7), "bias: expected a shape .*"),
        ("q_segment_ids", (2, 7), "kv_segment_ids: expected an array, because .*"),
    ],
)
@pytest.mark.parametrize("tables_of_heads_first", [True, False])
def test_a_table_of_heads_first_tensors_names_the_layout(
    framework: Framework, name: str, shape: tuple[int, ...], message: str, tables_of_heads_first: bool
) -> None:
    """Only a table that would fit with heads first: one that fits neither way has no hint."""
    q, k = framework.zeros(2, 6, 7, 8), framework.zeros(2, 3, 7, 8)  # 7 tokens, 6 heads on 3 kv heads, heads first
    shape = shape if tables_of_heads_first else (*shape[:-1], 9)
    kind = {"mask": "bool", "bias": "float32"}.get(name, "int32")
    hint = "; it fits if the axes of heads and sequence are exchanged: .*" if tables_of_heads_first else "[^;]*"
    with pytest.raises((ShapeError, SpecError), match=f"^{message}{hint}$"):
        framework.frontend.attention(q, k, k, **{name: framework.array(np.ones(shape), kind)})
