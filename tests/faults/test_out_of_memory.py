"""Tests that an error of exhausted memory keeps its type, names the remedy, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_kernels import FROM_XLA, WAYS, X, faulty, raising, text_of

import jax_frontend
import torch_frontend
from attn_core.errors import MEMORY_REMEDY, SHARED_GPU

HOST = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 12 bytes"
GPU = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB"
ERRORS = [(torch.OutOfMemoryError, GPU), (RuntimeError, HOST), (MemoryError, "std::bad_alloc")]
both_directions = pytest.mark.parametrize("direction", ["forward", "backward"])


@pytest.mark.parametrize(("error", "words"), ERRORS, ids=[error.__name__ for error, _ in ERRORS])
@pytest.mark.parametrize("way", WAYS)
@both_directions
def test_memory_that_runs_out_once(way: str, direction: str, error: type[Exception], words: str) -> None:
    run, bridged = WAYS[way]
    expected = run(direction, "math")
    with faulty("math", direction, raising(error, words), runs=(1,)):
        with pytest.raises(FROM_XLA if bridged else error) as caught:
            run(direction, "math")
        text = text_of(caught.value)
        assert bridged or type(caught.value) is error
        assert words in text and f"in the call attn.math {direction}" in text and MEMORY_REMEDY in text
        assert (SHARED_GPU in text) == (error is torch.OutOfMemoryError)  # JAX is imported here
        np.testing.assert_array_equal(run(direction, "math"), expected)


def test_an_error_without_a_word_of_memory_has_no_remedy() -> None:
    with (
        faulty("math", "forward", raising(RuntimeError, "an illegal instruction")),
        pytest.raises(RuntimeError) as caught,
    ):
        WAYS["torch eager"].run("forward", "math")
    assert MEMORY_REMEDY not in text_of(caught.value)


@both_directions
def test_torchs_tensors_are_free_after_the_error(direction: str) -> None:
    alive = []
    with faulty("math", direction, raising(torch.OutOfMemoryError, GPU)):
        for _ in range(3):
            q, k, v = (torch.from_numpy(X).clone().requires_grad_() for _ in range(3))
            with pytest.raises(torch.OutOfMemoryError) as caught:
                torch_frontend.attention(q, k, v, backend="math").sum().backward()
            alive += [weakref.ref(tensor) for tensor in (q, k, v)]
            del q, k, v, caught
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []


@both_directions
def test_the_bridge_keeps_no_tensor_after_the_error(direction: str) -> None:
    alive: list[Any] = []

    def fault(results: Any) -> Any:
        alive.extend(weakref.ref(tensor) for tensor in results if tensor is not None)
        raise torch.OutOfMemoryError(GPU)

    x = jnp.asarray(X)
    jax.block_until_ready(jax_frontend.attention(x, x, x, backend="math"))
    gc.collect()
    before = len(jax.live_arrays())
    with faulty("math", direction, fault):
        for _ in range(3):
            with pytest.raises(FROM_XLA):
                WAYS["jax jit"].run(direction, "math")
    gc.collect()
    assert alive and [ref for ref in alive if ref() is not None] == []
    assert len(jax.live_arrays()) == before


def test_xla_says_itself_that_memory_ran_out() -> None:
    # 2**46 bytes: more than any machine has, and an error of XLA's own allocator on every device.
    def large(results: Any) -> Any:
        out, lse = results
        scratch = jax.lax.broadcasted_iota(jnp.float32, (2**22, 2**22), 0) * out[0, 0, 0, 0]
        return out + jnp.sort(scratch, axis=0)[0, 0], lse

    expected = WAYS["jax jit"].run("forward", "jax_xla")
    with faulty("jax_xla", "forward", large), pytest.raises(FROM_XLA, match=r"RESOURCE_EXHAUSTED|Out of memory"):
        WAYS["jax jit"].run("forward", "jax_xla")
    np.testing.assert_array_equal(WAYS["jax jit"].run("forward", "jax_xla"), expected)
