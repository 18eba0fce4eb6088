"""Tests buffers that a data loader overwrites with the next batch between a call and its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from frameworks import BOTH, Framework, as_numpy
from paged_cases import aligned
from unsloth_rows import attend_as_unsloth

from attn_core import SeqInfo

TOKENS, HEADS, DIM = 12, 2, 8
FIRST, NEXT = (0, 3, 12), (0, 9, 12)


class Loader(SimpleNamespace):
    """Offsets as a data loader stores them: one buffer, overwritten for every batch."""

    buffer: np.ndarray
    given: Callable[[], Any]

    def next(self) -> None:
        self.buffer[:] = NEXT


def loader(kind: str) -> Loader:
    buffer = aligned(np.array(FIRST, np.int32))
    own = np.array(FIRST, np.int32)
    if kind == "keys":
        made = SeqInfo(own, buffer, TOKENS, TOKENS)
    elif kind == "both":
        made = SeqInfo(buffer, buffer, TOKENS, TOKENS)
    elif kind == "shared tensor":
        tensor = torch.from_numpy(buffer)
        made = SeqInfo(tensor, tensor, TOKENS, TOKENS)
    else:
        return Loader(buffer=buffer, given=lambda: (None, buffer, TOKENS))
    return Loader(buffer=buffer, given=lambda: made)


def attention(f: Framework, info: Any, q: Any, k: Any, v: Any) -> Any:
    return f.frontend.attention(q, k, v, causal=True, seq_info=info)


def qkvpacked(f: Framework, info: Any, q: Any, k: Any, v: Any) -> Any:
    stack = torch.stack if f.name == "torch" else jax.numpy.stack
    return f.frontend.attention_qkvpacked(stack((q, k, v), -3), causal=True, seq_info=info)


def run_attention(f: Framework, info: Any, q: Any, k: Any, v: Any) -> Any:
    return attend_as_unsloth(f.frontend, q[None], k[None], v[None], requires_grad=True, seq_info=info)[0]


CALLS = (attention, qkvpacked, run_attention)


def gradients_of(f: Framework, call: Any, info: Any, between: Callable[[], None]) -> list[Any]:
    """The output and the gradients of q, k and v; ``between`` runs between the call and its backward."""
    *qkv, dout = (np.random.default_rng(at).standard_normal((TOKENS, HEADS, DIM)).astype(np.float32) for at in range(4))
    return f.gradients(partial(call, f, info), dict(zip("qkv", qkv, strict=True)), dout, between=between)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["both", "keys", "triple", "shared tensor"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_overwriting_offsets_before_the_backward_changes_nothing(framework: Framework, call: Any, kind: str) -> None:
    if framework.name == "jax" and kind == "shared tensor":
        pytest.skip("JAX takes no tensors of torch")
    kept, written = loader(kind), loader(kind)
    right = gradients_of(framework, call, kept.given(), lambda: None)
    actual = gradients_of(framework, call, written.given(), written.next)
    for name, one, other in zip(("out", "dq", "dk", "dv"), right, actual, strict=True):
        np.testing.assert_array_equal(other, one, err_msg=name)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_seq_info_keeps_its_offsets_when_the_buffer_changes(framework: Framework) -> None:
    written = loader("both")
    info = written.given()
    right = gradients_of(framework, attention, loader("both").given(), lambda: None)
    written.next()
    actual = gradients_of(framework, attention, info, lambda: None)
    for one, other in zip(right, actual, strict=True):
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_overwriting_page_tables_after_the_call_changes_nothing(framework: Framework) -> None:
    pool = np.random.default_rng(0).standard_normal((4, 16, HEADS, DIM)).astype(np.float32)
    q = framework.array(np.random.default_rng(1).standard_normal((2, HEADS, DIM)).astype(np.float32))

    def call(table: np.ndarray, lengths: np.ndarray) -> Any:
        pages = framework.array(pool)
        return framework.frontend.paged_attention(q, pages, pages, block_table=table, seq_lens=lengths)

    table, lengths = np.array([[0, 1], [2, 3]], np.int32), np.array([20, 30], np.int32)
    right = as_numpy(call(table, lengths))
    table, lengths = aligned(table), aligned(lengths)
    actual = call(table, lengths)
    table[:], lengths[:] = 0, 1
    np.testing.assert_array_equal(as_numpy(actual), right)
