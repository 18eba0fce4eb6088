"""Tests that torch's choice among its own kernels, by ``sdpa_kernel`` or a switch, limits ``attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from frameworks import spied
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_core import SeqInfo
from torch_frontend import NoBackendError, attention, attention_qkvpacked, explain, use_backend
from torch_frontend.module import Attention

Q = torch.randn(1, 5, 2, 8)
LAYER = Attention(num_heads=2, in_features=16)
MASK = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
EXCLUDED = "sdpa_kernel(...) around the call switches it off"


def _compiled() -> Callable[[], Any]:
    run = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="eager")
    return lambda: run(Q)


ENTRIES: dict[str, Callable[[], Callable[[], Any]]] = {
    "plain": lambda: lambda: attention(Q, Q, Q),
    "mask": lambda: lambda: attention(Q, Q, Q, mask=MASK),
    "documents": lambda: lambda: attention(Q, Q, Q, seq_info=SeqInfo.from_lengths([2, 3])),
    "layout": lambda: lambda: attention(*[Q.transpose(1, 2)] * 3, layout="bhsd"),
    "one tensor": lambda: lambda: attention_qkvpacked(Q.unsqueeze(2).expand(-1, -1, 3, -1, -1)),
    "one tensor that trains": lambda: lambda: attention_qkvpacked(torch.randn(1, 5, 3, 2, 8, requires_grad=True)),
    "layer": lambda: lambda: LAYER(torch.randn(1, 5, 16)),
    "layer without gradients": lambda: torch.no_grad()(lambda: LAYER(torch.randn(1, 5, 16))),
    "vmap": lambda: lambda: torch.func.vmap(lambda q: attention(q, q, q))(Q[None]),
    "compiled": _compiled,
}
"""A function for each entry point, the same in both blocks of a test, so that nothing is planned anew."""


@contextmanager
def switched_off(kind: str) -> Iterator[None]:
    """One of the switches of ``torch.backends.cuda`` off."""
    switch = getattr(torch.backends.cuda, f"enable_{kind}_sdp")
    switch(False)
    try:
        yield
    finally:
        switch(True)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_heeds_a_block_and_forgets_it_after(entry: str) -> None:
    with spied() as ran:
        call = ENTRIES[entry]()
        call()
        usual = ran.copy()
        assert "math" not in usual
        ran.clear()
        with sdpa_kernel(SDPBackend.MATH):
            call()
            call()
        assert ran == ["math", "math"]
        call()
        assert ran[2:] == usual


def test_a_block_inside_a_compiled_function_counts() -> None:
    def step(q: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            inside = attention(q, q, q)
        return inside + attention(q, q, q)

    with spied() as ran:
        q = Q.clone().requires_grad_()
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
        out.sum().backward()
    assert ran == ["math", "sdpa_flash"]
    torch.testing.assert_close(out, 2 * attention(Q, Q, Q))


def test_a_backward_after_the_block_is_that_of_its_forward() -> None:
    q = Q.clone().requires_grad_()
    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        with sdpa_kernel(SDPBackend.MATH):
            out = run(q, q, q)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out.sum().backward()
    assert q.grad is not None


def test_only_the_listed_kernels_remain() -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        selection = explain(Q, Q, Q)
        with pytest.raises(NoBackendError, match=r"(?s)softcap=3.0.*sdpa_kernel") as caught:
            attention(Q, Q, Q, softcap=3.0)
    assert selection.backend == "sdpa_flash"
    for name in ("math", "flex", "sdpa_efficient", "flash4"):
        assert EXCLUDED in selection.reasons(name), name
    for name in ("sdpa_flash", "sdpa_cudnn", "jax_xla"):
        assert EXCLUDED not in selection.reasons(name), name
    assert caught.value.selection.reasons("math") == (EXCLUDED,)
    assert attention(Q, Q, Q, softcap=3.0).shape == Q.shape


def test_a_backend_by_name_contradicts_the_block() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.raises(NoBackendError) as caught:
            attention(Q, Q, Q, backend="sdpa_flash")
        assert str(caught.value).splitlines()[:2] == [
            "backend='sdpa_flash' cannot run this call:",
            f"  {EXCLUDED}",
        ]
        with use_backend("flex"), pytest.raises(NoBackendError, match="sdpa_kernel"):
            attention(Q, Q, Q)
        assert attention(Q, Q, Q, backend=("sdpa_flash", "math")).shape == Q.shape  # the first that can


def test_priority_orders_the_listed_kernels() -> None:
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with spied() as ran:
        for order in (kernels, kernels[::-1]):
            with sdpa_kernel(order, set_priority=True):
                attention(Q, Q, Q)
        with sdpa_kernel(kernels):
            attention(Q, Q, Q)
    assert ran == ["math", "sdpa_flash", "sdpa_flash"]


def test_a_switch_excludes_its_own_kernel_alone() -> None:
    with spied() as ran:
        with switched_off("flash"):
            attention(Q, Q, Q)
            selection = explain(Q, Q, Q)
        with switched_off("cudnn"):
            attention(Q, Q, Q)
    assert ran[0] != "sdpa_flash"
    assert ran[1] == "sdpa_flash"
    assert [name for name, why in selection.refusals if any("switches it off" in each for each in why)] == [
        "sdpa_flash"
    ]
    assert selection.reasons("sdpa_flash") == ("enable_flash_sdp(False) switches it off",)
