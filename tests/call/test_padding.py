"""Tests unpad and repad: packed documents of a padded batch against the same call with a mask."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, TORCH, Framework, as_numpy
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import jax_frontend
import torch_frontend
from attn_core import CheckWarning, DTypeError, ShapeError, SpecError, checks

BATCH, LENGTH = 3, 5
SHAPES = {"q": (BATCH, LENGTH, 4, 8), "k": (BATCH, LENGTH, 2, 8), "v": (BATCH, LENGTH, 2, 7)}
BESIDES = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]]
"""Padding on the left, on the right and in the middle."""
NOTHING_IN_A_ROW = [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)


def _arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5).standard_normal
    return {name: draw(shape).astype(np.float32) for name, shape in SHAPES.items()}


def _attend(framework: Framework, mask: Any, total: int | None, **options: Any) -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v, padding = framework.frontend.unpad(mask, q, k, v, total=total)
        assert q.shape[:2] == (1, int(as_numpy(mask).sum()) if total is None else total)
        out = framework.frontend.attention(q, k, v, seq_info=padding.seq_info, backend="math", **options)
        return framework.frontend.repad(out, padding)

    return attend


@everywhere
@given(
    dtype=st.sampled_from(["bool", "int32", "uint8"]),
    keep=st.lists(st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH), min_size=BATCH, max_size=BATCH),
    more=st.sampled_from([None, 0, 4]),
    causal=st.booleans(),
)
@example(dtype="bool", keep=BESIDES, more=None, causal=True)
@example(dtype="bool", keep=NOTHING_IN_A_ROW, more=None, causal=True)
@example(dtype="bool", keep=[[0] * LENGTH] * BATCH, more=None, causal=False)
def test_packed_tokens_have_the_results_and_gradients_of_the_masked_call(
    framework: Framework, dtype: str, keep: list[list[int]], more: int | None, causal: bool
) -> None:
    mask = np.array(keep, dtype)
    seen = framework.array(mask != 0)
    cotangent = np.random.default_rng(6).standard_normal((BATCH, LENGTH, 4, 7)).astype(np.float32)

    def masked(q: Any, k: Any, v: Any) -> Any:
        return framework.frontend.attention(q, k, v, causal=causal, mask=seen[:, None, None, :], backend="math")

    total = None if more is None else int(mask.sum()) + more
    actual = framework.gradients(_attend(framework, framework.array(mask), total, causal=causal), _arrays(), cotangent)
    shown = (mask != 0)[:, :, None, None]
    expected = framework.gradients(masked, _arrays(), cotangent * shown)
    expected[0] = expected[0] * shown  # padding has outputs there
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@everywhere
def test_tokens_come_back_to_their_places_in_any_dtype_and_rank(framework: Framework) -> None:
    labels = np.arange(1, 1 + BATCH * LENGTH).reshape(BATCH, LENGTH).astype(np.int32)
    embeddings = np.stack([labels, -labels], -1).astype(np.float32)
    mask = np.array(BESIDES, bool)  # a mask of numpy, as of a loader
    tokens, rows, padding = framework.frontend.unpad(
        mask, framework.array(labels), framework.array(embeddings), total=9
    )
    expected = labels[mask]
    assert as_numpy(tokens).tolist() == [[*expected, 0]]
    assert as_numpy(rows)[0, :, 1].tolist() == [*-expected.astype(float), 0.0]
    assert padding.seq_info.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert padding.seq_info.max_len_q == LENGTH and padding.attention_mask is mask
    for packed, whole in ((tokens, labels), (rows, embeddings)):
        back = as_numpy(framework.frontend.repad(packed, padding))
        assert back.dtype == whole.dtype and back.shape == whole.shape
        assert (back[mask] == whole[mask]).all() and not back[~mask].any()


@everywhere
def test_the_longest_document_is_that_of_the_batch_without_a_total(framework: Framework) -> None:
    (padding,) = framework.frontend.unpad(np.array(BESIDES))
    assert padding.seq_info.max_len_q == padding.seq_info.max_len_k == 3


@everywhere
def test_tensors_may_have_any_strides(framework: Framework) -> None:
    heads_first = framework.array(_arrays()["q"].swapaxes(1, 2).copy())  # [batch, heads, length, head_dim]
    mask = framework.array(np.array(BESIDES))
    rows, _ = framework.frontend.unpad(mask, heads_first.swapaxes(1, 2))
    assert (as_numpy(rows)[0] == _arrays()["q"][np.array(BESIDES, bool)]).all()


def test_one_program_serves_all_batches_of_a_total_in_jax() -> None:
    arrays = [jnp.asarray(each) for each in _arrays().values()]

    @jax.jit
    def program(mask: jax.Array) -> jax.Array:
        return _attend_traced(mask, 10)(*arrays)

    def _attend_traced(mask: jax.Array, total: int) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            q, k, v, padding = jax_frontend.unpad(mask, q, k, v, total=total)
            out = jax_frontend.attention(q, k, v, causal=True, seq_info=padding.seq_info, backend="jax_xla")
            return jax_frontend.repad(out, padding)

        return attend

    for keep in (BESIDES, [[1, 1, 0, 0, 0]] * 3):
        mask = np.array(keep, np.int32)
        eager = _attend_traced(mask, 10)(*arrays)  # type: ignore[arg-type]
        np.testing.assert_allclose(program(mask), eager, rtol=1e-6, atol=1e-6)
    assert program._cache_size() == 1


def test_what_unpad_returns_crosses_the_border_of_a_program_in_jax() -> None:
    rows, padding = jax_frontend.unpad(np.array(BESIDES), jnp.asarray(_arrays()["q"]))
    back = jax.jit(jax_frontend.repad)(rows, padding)
    assert (np.asarray(back) == _arrays()["q"] * np.array(BESIDES)[:, :, None, None]).all()


def test_checks_tell_of_a_total_that_loses_tokens_of_a_traced_mask() -> None:
    q = jnp.asarray(_arrays()["q"])

    @jax.jit
    def program(mask: jax.Array) -> jax.Array:
        rows, padding = jax_frontend.unpad(mask, q, total=7)
        return jax_frontend.attention(rows, rows, rows, seq_info=padding.seq_info, backend="jax_xla")

    with checks(True), pytest.warns(CheckWarning, match="expected to end at the token count 7 or before it, got 8"):
        jax.block_until_ready(program(jnp.array(BESIDES)))
        jax.effects_barrier()


def test_a_compiled_program_takes_what_unpad_returns_in_torch() -> None:
    def attend(rows: torch.Tensor, padding: Any) -> torch.Tensor:
        out = TORCH.frontend.attention(rows, rows, rows, causal=True, seq_info=padding.seq_info)
        return TORCH.frontend.repad(out, padding)

    rows, padding = TORCH.frontend.unpad(torch.tensor(BESIDES), torch.from_numpy(_arrays()["q"]))
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows, padding), attend(rows, padding))


def _message(error: type[Exception], function: Any, *given: Any, **keywords: Any) -> str:
    with pytest.raises(error) as caught:
        function(*given, **keywords)
    return str(caught.value)


@everywhere
def test_errors_name_the_argument_its_value_and_the_way_out(framework: Framework) -> None:
    unpad, array = framework.frontend.unpad, framework.array
    mask, q = array(np.array(BESIDES)), framework.zeros(BATCH, LENGTH, 4, 8)
    assert re.fullmatch(r"attention_mask: .*\[batch, length\].* got \[3\]", _message(ShapeError, unpad, mask[:, 0], q))
    assert "got [0, 5]" in _message(ShapeError, unpad, mask[:0], q[:0])
    message = _message(DTypeError, unpad, array(np.zeros((BATCH, LENGTH), np.float32)), q)
    assert "got float32; write attention_mask == 1" in message
    numbers = np.array([[1] * 5, [1, 1, 2, 2, 2], [1] * 5])
    message = _message(SpecError, unpad, array(numbers), q)
    assert "attention_mask[1, 2]=2: expected 1 for a token, 0 for padding" in message and "q_segment_ids=" in message
    message = _message(ShapeError, unpad, mask, q, q[:, :4])
    assert message.startswith("tensors[1]: expected [batch, length, ...] as in attention_mask, [3, 5]")
    assert message.endswith("got [3, 4, 4, 8]")
    assert "pass it with swapaxes(1, 2)" in _message(ShapeError, unpad, mask, q.swapaxes(1, 2))
    assert "total=7: expected at least the 8 tokens" in _message(SpecError, unpad, mask, q, total=7)
    assert "total=8.0: expected at least 0, as an int" in _message(ShapeError, unpad, mask, q, total=8.0)
    rows, padding = unpad(mask, q)
    repad = framework.frontend.repad
    assert "[1, 8]" in _message(ShapeError, repad, rows[:, :7], padding)
    assert _message(ShapeError, repad, rows[0], padding).endswith("got [8, 4, 8]; pass packed[None]")
    assert "padding=" in _message(SpecError, repad, rows, mask)
    assert "attention_mask: expected a" in _message(TypeError, unpad, BESIDES, q)


def test_masks_without_data_and_the_padding_of_another_framework_are_refused() -> None:
    q, mask = torch.zeros(BATCH, LENGTH, 4, 8), torch.tensor(BESIDES)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(mask)
        assert "a tensor without data" in _message(SpecError, torch_frontend.unpad, fake, q)
    assert "a tensor without data" in _message(SpecError, torch_frontend.unpad, mask.to("meta"), q)
    rows, padding = torch_frontend.unpad(mask, q)
    in_jax, other = jax_frontend.unpad(np.array(BESIDES), jnp.zeros(q.shape))
    assert _message(TypeError, torch_frontend.repad, rows, other).startswith("padding.indices: expected")
    assert _message(TypeError, jax_frontend.repad, in_jax, padding).startswith("padding.indices: expected")


def test_a_traced_mask_without_a_total_names_the_ways_out() -> None:
    program = jax.jit(lambda mask: jax_frontend.unpad(mask, jnp.zeros((BATCH, LENGTH, 4, 8)))[0])
    message = _message(SpecError, program, jnp.array(BESIDES))
    for word in ("attention_mask", "total=", "q_segment_ids=", "kv_lengths=", "alignment='top_left'"):
        assert word in message
