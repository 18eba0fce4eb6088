"""Calls with ``invariant`` that are filled up, as on a processor whose bits depend on the alignment of memory.

The trials decide on this processor. Here they find what they find on an AMD EPYC, so that every processor tests it.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from attn_core.backends.sdpa_flash import cpu_rows, cpu_same_bits, cpu_tiles
from torch_frontend import SeqInfo, attention

CALLS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "a lone query": ((1, 40, 16), {}),
    "few queries": ((5, 40, 16), {"causal": True}),
    "few queries of odd heads": ((31, 33, 7), {"causal": True}),
    "odd heads": ((67, 67, 11), {"causal": True, "alignment": "top_left"}),
    "a window": ((40, 40, 20), {"causal": True, "window": 9}),
    "one head": ((3, 50, 16), {"heads": (1, 1)}),
    "groups": ((1, 130, 7), {"heads": (4, 2)}),
}


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["as tried", "filled"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "filled":
        monkeypatch.setattr(cpu_same_bits, "keeps_few_queries", lambda shape: False)
        monkeypatch.setattr(cpu_same_bits, "keeps_heads", lambda shape: shape.head_dim % cpu_same_bits.WIDTHS == 0)
        monkeypatch.setattr(cpu_tiles, "keeps_heights", lambda shape: False)
    return request.param


def operands(sizes: tuple[int, int, int], heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    queries, keys, dim = sizes
    rows = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]), (queries, heads[0]))
    return [torch.randn(3, tokens, number, dim).to(dtype) for tokens, number in rows]


def results(tensors: list[torch.Tensor], backend: str, options: dict[str, Any]) -> list[torch.Tensor]:
    q, k, v = (each.clone().requires_grad_() for each in tensors[:3])
    out = attention(q, k, v, backend=backend, **options)
    without = attention(*tensors[:3], backend=backend, **options)
    assert torch.equal(without, out.detach()), "without gradients"
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_its_own_bits_in_a_batch(processor: str, name: str, dtype: torch.dtype) -> None:
    sizes, options = CALLS[name]
    options = {"invariant": "batch", **options}
    tensors = operands(sizes, options.pop("heads", (4, 2)), dtype)
    together = results(tensors, "sdpa_flash", options)
    for row in range(3):
        alone = results([each[row : row + 1] for each in tensors], "sdpa_flash", options)
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[row])
    moved = results([each.flip(0) for each in tensors], "sdpa_flash", options)
    assert all(torch.equal(one.flip(0), other) for one, other in zip(moved, together, strict=True))
    right = results([each.double() for each in tensors], "math", {**options, "invariant": None})
    bound = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
    for one, other in zip(together, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [7, 16])
def test_a_chunk_has_the_bits_of_its_prompt(processor: str, dim: int, dtype: torch.dtype) -> None:
    q, k, v, _ = operands((167, 167, dim), (4, 2), dtype)
    how: dict[str, Any] = {"causal": True, "invariant": "prefix", "backend": "sdpa_flash"}
    whole = attention(q, k, v, **how)
    for start, stop in ((0, 1), (0, 33), (8, 31), (100, 140), (130, 131), (129, 167)):
        part = attention(q[:, start:stop], k[:, :stop], v[:, :stop], **how)
        assert torch.equal(part, whole[:, start:stop]), (start, stop)
    packed = SeqInfo.from_lengths([67, 100], array=torch.from_numpy)
    rows = [each[0] for each in (q, k, v)]
    assert torch.equal(attention(*rows, seq_info=packed, **how)[:67], whole[0, :67])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_document_shorter_than_its_window_has_the_bits_of_a_row(processor: str, dtype: torch.dtype) -> None:
    """Alone, its window hides nothing, so the call is only causal."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, 1, 24).to(dtype) for tokens in (69, 29, 29))
    how: dict[str, Any] = {"backend": "sdpa_flash", "invariant": "batch", "window": (17, 0), "alignment": "top_left"}
    info = SeqInfo.from_lengths([2, 67], [19, 10], array=torch.from_numpy)
    packed = attention(q, k, v, seq_info=info, **how)
    assert torch.equal(packed[:2], attention(q[None, :2], k[None, :19], v[None, :19], **how)[0])
    assert torch.equal(packed[2:], attention(q[None, 2:], k[None, 19:], v[None, 19:], **how)[0])


def test_the_trials_notice_a_kernel_whose_bits_depend_on_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the second half of the heads of a call differs in its last bit."""
    forward, backward = cpu_same_bits.kernels()

    def faulty(q: Any, *more: Any, **options: Any) -> Any:
        out, lse = forward(q, *more, **options)
        flat = out.reshape(-1, *out.shape[2:]).clone()
        flat[len(flat) // 2 :] *= 1 + torch.finfo(out.dtype).eps
        return flat.view(out.shape), lse

    shape = cpu_rows.Shape("float32", 4, 2, 7, 2)
    monkeypatch.setattr(cpu_same_bits, "ignores_alignment", lambda: True)
    for trial in (cpu_same_bits.keeps_few_queries, cpu_same_bits.keeps_heads):
        trial.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(cpu_same_bits, "kernels", lambda: (faulty, backward))
            assert not trial(shape)
        trial.cache_clear()
