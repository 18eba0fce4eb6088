"""Tests torch's autograd against misuse: an input that changed since the forward, and a graph that is gone."""

from __future__ import annotations

import pytest
import torch
from faulty_kernels import X, faulty, raising

import torch_frontend

BACKENDS = ("math", "sdpa_flash")  # an autograd function of ours, and torch's own op by a shortcut
everywhere = pytest.mark.parametrize("backend", BACKENDS)
both_graphs = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def output(backend: str, compiled: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v that a graph computed, and the output."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch_frontend.attention(q, k, v, causal=True, backend=backend)

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager")
    qkv = [torch.from_numpy(X).clone().requires_grad_() * 2 for _ in range(3)]
    return qkv, attend(*qkv)


@pytest.mark.sampled
@everywhere
@both_graphs
@pytest.mark.parametrize("changed", ["q", "k", "v"])
def test_an_input_changed_in_place_before_the_backward(backend: str, compiled: bool, changed: str) -> None:
    qkv, out = output(backend, compiled)
    with torch.no_grad():
        qkv["qkv".index(changed)].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@everywhere
def test_an_output_changed_in_place_before_the_backward(backend: str) -> None:
    _, out = output(backend)
    loss = out.sum()
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@everywhere
@both_graphs
def test_a_second_backward_through_a_freed_graph(backend: str, compiled: bool) -> None:
    _, out = output(backend, compiled)
    loss = out.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@everywhere
def test_a_second_backward_through_a_kept_graph(backend: str) -> None:
    qkv, out = output(backend)
    first, second = (torch.autograd.grad(out.sum(), qkv, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_backward_that_failed_can_run_again() -> None:
    qkv, out = output("math")
    expected = torch.autograd.grad(out.sum(), qkv)
    with faulty("math", "backward", raising(RuntimeError, "planted"), runs=(1,)):
        qkv, out = output("math")
        with pytest.raises(RuntimeError, match="planted"):
            torch.autograd.grad(out.sum(), qkv, retain_graph=True)
        assert all(tensor.grad is None for tensor in qkv if tensor.is_leaf)
        actual = torch.autograd.grad(out.sum(), qkv)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
