"""Tests that an error of a kernel reaches the caller with its words and its backend, and that the next call is good."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_kernels import FROM_XLA, WAYS, X, faulty, raising, text_of
from torch_first import torch_first  # noqa: F401 (a fixture)

import jax_frontend
import torch_frontend
from attn_core import SeqInfo

WORDS = "planted: the kernel failed with code 7"
DIRECTIONS = ("forward", "backward")
everywhere = pytest.mark.parametrize("way", WAYS)
both_directions = pytest.mark.parametrize("direction", DIRECTIONS)


def assert_names_the_call(error: BaseException, backend: str, direction: str) -> None:
    text = text_of(error)
    assert WORDS in text
    assert text.count(f"in the call attn.{backend} {direction} b2 q5 kv5 h3:3 d8 f32 causal") == 1


@pytest.mark.sampled
@everywhere
@both_directions
@pytest.mark.parametrize("backend", ["math", "sdpa_flash"])
def test_a_kernel_that_raises_once(way: str, direction: str, backend: str) -> None:
    run, bridged = WAYS[way]
    expected = run(direction, backend)
    with faulty(backend, direction, raising(RuntimeError, WORDS), runs=(2,)) as kernel:
        np.testing.assert_array_equal(run(direction, backend), expected)
        with pytest.raises(FROM_XLA if bridged else RuntimeError) as caught:
            run(direction, backend)
        assert_names_the_call(caught.value, backend, direction)
        assert kernel.count == 2  # nobody tried again, or another way
        np.testing.assert_array_equal(run(direction, backend), expected)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, NotImplementedError, KeyError, AttributeError])
@pytest.mark.parametrize("shortcut", [False, True])
def test_eager_torch_raises_the_error_itself(error: type[Exception], shortcut: bool) -> None:
    # Planning catches some of these types; an error of a kernel must not pass for an error of planning.
    with faulty("sdpa_flash", "forward", raising(error, WORDS), shortcut=shortcut) as kernel:
        x = torch.from_numpy(X)
        for options in ({}, {"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, {"layout": "bhsd"}):
            given = x.transpose(1, 2) if "layout" in options else x
            with pytest.raises(error) as caught:
                torch_frontend.attention(given, given, given, causal=True, **options, backend="sdpa_flash")
            assert type(caught.value) is error
            assert_names_the_call(caught.value, "sdpa_flash", "forward")
        assert kernel.count == 3


@everywhere
@both_directions
@pytest.mark.usefixtures("torch_first")
def test_automatic_choice_does_not_run_another_kernel(way: str, direction: str) -> None:
    # The choice falls back on what is known before the call. A kernel that fails is an error, not a reason to compute
    # with other rounding.
    run, bridged = WAYS[way]
    x = jnp.asarray(X) if bridged else torch.from_numpy(X)
    frontend = jax_frontend if bridged else torch_frontend
    chosen = frontend.explain(x, x, x, causal=True, needs_backward=direction == "backward").backend
    assert chosen == "sdpa_flash"
    with faulty(chosen, direction, raising(RuntimeError, WORDS)) as kernel:
        with pytest.raises(FROM_XLA if bridged else RuntimeError) as caught:
            run(direction, None)
        assert_names_the_call(caught.value, chosen, direction)
        assert kernel.count == 1


@both_directions
def test_a_backend_of_jax_that_raises_while_it_is_traced(direction: str) -> None:
    for way in ("jax eager", "jax jit"):
        run = WAYS[way].run
        expected = run(direction, "jax_xla")
        with faulty("jax_xla", direction, raising(RuntimeError, WORDS), runs=(1,)):
            with pytest.raises(RuntimeError) as caught:
                run(direction, "jax_xla")
            assert_names_the_call(caught.value, "jax_xla", direction)
            np.testing.assert_array_equal(run(direction, "jax_xla"), expected)


def test_a_compiled_program_runs_again_after_its_callback_raised() -> None:
    program = jax.jit(lambda x: jax_frontend.attention(x, x, x, causal=True, backend="math"))
    x = jnp.asarray(X)
    expected = np.asarray(program(x))
    with faulty("math", "forward", raising(RuntimeError, WORDS), runs=(1, 3)):
        for good in (False, True, False, True):
            if good:
                np.testing.assert_array_equal(program(x), expected)
            else:
                with pytest.raises(FROM_XLA, match=WORDS):
                    jax.block_until_ready(program(x))


def test_a_failing_callback_leaves_other_calls_of_the_program_alone() -> None:
    def two_calls(x: jax.Array) -> jax.Array:
        return jax_frontend.attention(x, x, x, backend="math") + jax_frontend.attention(x, x, x, backend="sdpa_flash")

    expected = np.asarray(jax.jit(two_calls)(jnp.asarray(X)))
    with faulty("sdpa_flash", "forward", raising(RuntimeError, WORDS), runs=(1,)):
        program = jax.jit(two_calls)
        with pytest.raises(FROM_XLA, match=r"in the call attn\.sdpa_flash forward"):
            jax.block_until_ready(program(jnp.asarray(X)))
        np.testing.assert_array_equal(program(jnp.asarray(X)), expected)


def test_packed_calls_and_pages_name_their_call() -> None:
    x = torch.from_numpy(X.reshape(10, 3, 8))
    info = SeqInfo.from_lengths([4, 6])
    with faulty("math", "forward", raising(RuntimeError, WORDS)):
        with pytest.raises(RuntimeError) as caught:
            torch_frontend.attention(x, x, x, seq_info=info, backend="math")
        assert "in the call attn.math forward" in text_of(caught.value) and "docs2" in text_of(caught.value)
        pages = torch.zeros(2, 4, 3, 8)
        table, lengths = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
        for offsets in (None, torch.tensor([0, 1, 2], dtype=torch.int32)):
            with pytest.raises(RuntimeError) as caught:
                torch_frontend.paged_attention(
                    x[:2], pages, pages, block_table=table, seq_lens=lengths, cu_seqlens_q=offsets, backend="math"
                )
            assert WORDS in text_of(caught.value) and "pages4" in text_of(caught.value)
