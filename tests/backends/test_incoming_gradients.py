"""Tests that kernels get gradients that they can read when torch's own autograd runs their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn_core.backends.shared.autograd import copy_other_layouts, copy_unaligned


def unaligned(tensor: Any) -> Any:
    return torch.cat((tensor.new_zeros(1), tensor.reshape(-1)))[1:].view(tensor.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda dout: dout,
    "transposed": lambda dout: dout.mT.contiguous().mT,
    "unaligned": unaligned,
    "stepped": lambda dout: torch.stack((dout, dout), -1)[..., 0],
    "expanded": lambda dout: dout[:1, :1].expand_as(dout),
}


class Doubled(torch.autograd.Function):
    """An op that notes the gradient with which its backward runs."""

    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> tuple[Any, Any]:
        ctx.set_materialize_grads(False)
        return tensor * 2, tensor.sum()

    @staticmethod
    def backward(ctx: Any, dout: Any, dsum: Any) -> Any:
        Doubled.seen.append(dout)
        return dout * 2 if dout is not None else torch.zeros(4, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prepare", [copy_unaligned, copy_other_layouts])
def test_the_backward_gets_a_gradient_that_it_can_read(prepare: Callable[[Any], None], layout: str) -> None:
    leaf, dout = torch.ones(4, 16, requires_grad=True), LAYOUTS[layout](torch.arange(64.0).view(4, 16))
    Doubled.seen = []
    out, _ = Doubled.apply(leaf)
    prepare(out)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    assert torch.equal(gradient, dout * 2)
    (read,) = Doubled.seen
    assert read.data_ptr() % 16 == 0
    assert prepare is copy_unaligned or read.stride() == out.stride()
    readable = layout == "contiguous" or (prepare is copy_unaligned and layout != "unaligned")
    assert (read.data_ptr() == dout.data_ptr()) is readable, "a copy that is not needed, or none"


def test_another_result_alone_has_a_gradient() -> None:
    leaf, Doubled.seen = torch.ones(4, 16, requires_grad=True), []
    out, total = Doubled.apply(leaf)
    copy_other_layouts(out)
    assert torch.autograd.grad(total, leaf)[0].shape == (4, 16) and Doubled.seen == [None]


@pytest.mark.parametrize("prepare", [copy_unaligned, copy_other_layouts])
def test_nothing_happens_without_autograd(prepare: Callable[[Any], None]) -> None:
    prepare(torch.ones(4, 16))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
def test_a_kernel_takes_a_gradient_of_any_layout(backend: str, layout: str) -> None:
    from torch_frontend import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 131, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = LAYOUTS[layout](torch.randn(2, 131, 4, 64, device="cuda", dtype=torch.bfloat16))
    for _ in range(2):
        # The plain layout first, so that cuDNN's plan is the one for it.
        plain, other = (
            torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), gradient)
            for gradient in (dout.contiguous().clone(), dout)
        )
        for one, two in zip(plain, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


@pytest.mark.cuda
def test_cudnn_takes_an_unaligned_bias() -> None:
    from torch_frontend import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 65, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 65, 65, device="cuda", dtype=torch.bfloat16)
    out, other = (attention(q, k, v, bias=each, backend="sdpa_cudnn") for each in (bias, unaligned(bias)))
    torch.testing.assert_close(out, other)
    gradients = [torch.autograd.grad(each.float().sum(), (q, k, v)) for each in (out, other)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)
