"""The caller's buffer for the output of a paged call, in torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from paged_cases import make_paged, torch_arguments

import jax_frontend
import torch_frontend
from attn_core import DeviceError, DTypeError, ShapeError, SpecError
from torch_frontend import PagedKVCache, paged_attention
from torch_frontend.paged import plan

CALLS = {
    "decode": make_paged((5, 9, 1), None),
    "decode with sinks": make_paged((5, 9, 1), None, sinks=True, return_lse=True),
    "prefill": make_paged((5, 9, 7), (5, 2, 0), return_lse=True),
    "narrow values": make_paged((5, 9, 7), (5, 2, 0), value_dim=5),
}


def arguments(call: Any) -> tuple[Any, dict[str, Any]]:
    """The positional arguments of a call and its keywords."""
    arrays, tables = torch_arguments(call)
    return arrays, {**tables, **call.options}


def buffers(call: Any) -> dict[str, Any]:
    """Buffers of several strides, full of NaN."""
    tokens, heads, dim = call.spec.out_shape
    nan = torch.full((tokens + 3, 2, heads, dim + 2), torch.nan)
    return {
        "contiguous": torch.full((tokens, heads, dim), torch.nan),
        "a part of rows": nan[2 : tokens + 2, 1, :, :dim],
        "heads outside": torch.full((heads, tokens, dim), torch.nan).transpose(0, 1),
    }


RUNS = [(name, backend) for name in CALLS for backend in (None, "math", "sdpa_flash")]


@pytest.mark.parametrize(
    ("name", "backend"), [run for run in RUNS if run[1] != "sdpa_flash" or run[0] in ("decode", "prefill")]
)
def test_the_result_is_in_the_buffer(name: str, backend: str | None) -> None:
    call = CALLS[name]
    arrays, options = arguments(call)
    plain = paged_attention(*arrays, **options, backend=backend)
    for layout, out in buffers(call).items():
        results = paged_attention(*arrays, **options, backend=backend, out=out)
        actual, expected = (results, plain) if not call.spec.return_lse else (results[0], plain[0])
        assert actual is out and torch.equal(out, expected), layout
        if call.spec.return_lse:
            assert torch.equal(results[1], plain[1])
        if out._base is not None and layout == "a part of rows":
            assert out._base[:, 0].isnan().all() and out._base[:, :, :, -2:].isnan().all(), "beside the buffer"


@pytest.mark.parametrize("strided", [False, True])
def test_a_backend_that_can_writes_into_it(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer with strides goes to a backend that says so; the others get a copy."""
    call, into = CALLS["decode"], []
    arrays, options = arguments(call)
    expected, original = paged_attention(*arrays, **options), plan.plan_call

    def planned(*request: Any) -> Any:
        result = original(*request)

        def forward(spec: Any, inputs: Any, into_: Any = None, **keywords: Any) -> Any:
            into.append(keywords.get("into", into_))
            out, lse = result.forward(spec, inputs)
            return (out if into[-1] is None else into[-1][0].copy_(out)), lse

        return result._replace(
            forward=lambda spec, inputs, into=None: forward(spec, inputs, into), writes=(True, strided)
        )

    monkeypatch.setattr(plan, "plan_call", planned)
    for layout, out in buffers(call).items():
        assert paged_attention(*arrays, **options, out=out) is out and torch.equal(out, expected)
        passed = into.pop()
        assert (passed is not None and passed[0] is out) == (strided or layout == "contiguous")


def test_compiled_calls_and_caches_have_it() -> None:
    call = CALLS["prefill"]
    arrays, options = arguments(call)
    plain = paged_attention(*arrays, **options)
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    for out in buffers(call).values():
        actual, lse = compiled(*arrays, **options, out=out)
        assert actual is out and torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    cache = PagedKVCache(num_layers=1, num_pages=4, page_size=4, kv_heads=2, head_dim=8)
    cache.add("a")
    step = cache.step(["a"], 3)
    cache.update(0, torch.randn(3, 2, 8), torch.randn(3, 2, 8), step)
    q, out = torch.randn(3, 4, 8), torch.full((3, 4, 8), torch.nan)
    assert cache.attend(0, q, step, out=out) is out and torch.equal(out, cache.attend(0, q, step))


def test_calls_without_keys_and_without_queries() -> None:
    for lengths, new in (((0, 0), (2, 1)), ((3, 2), (0, 0))):
        arrays, options = arguments(make_paged(lengths, new))
        out = torch.full((sum(new), 4, 8), torch.nan)
        assert paged_attention(*arrays, **options, out=out) is out and not out.any()


def bad(name: str, arrays: Any) -> Any:
    return {
        "numpy": lambda: torch.zeros(3, 4, 8).numpy(),
        "shape": lambda: torch.zeros(3, 8, 4),
        "one more token": lambda: torch.zeros(4, 4, 8),
        "one token": lambda: torch.zeros(1, 4, 8),
        "dtype": lambda: torch.zeros(3, 4, 8, dtype=torch.float64),
        "device": lambda: torch.zeros(3, 4, 8, device="meta"),
        "channels outside": lambda: torch.zeros(8, 3, 4).permute(1, 2, 0),
        "one token for all": lambda: torch.zeros(1, 4, 8).expand(3, 4, 8),
        "q itself": lambda: arrays[0],
        "the pool": lambda: arrays[1].view(-1)[: 3 * 4 * 8].view(3, 4, 8),
        "gradient": lambda: torch.zeros(3, 4, 8, requires_grad=True),
    }[name]()


BAD = {
    "numpy": (TypeError, "^out: expected a torch.Tensor, got numpy.ndarray"),
    "shape": (ShapeError, r"^out: expected \[tokens, heads, value_dim\] = \[3, 4, 8\], got \[3, 8, 4\]"),
    "one more token": (ShapeError, r"^out: expected .*, got \[4, 4, 8\]"),
    "one token": (ShapeError, r"^out: expected .*, got \[1, 4, 8\]"),
    "dtype": (DTypeError, "^out: expected the dtype of q, float32, got float64"),
    "device": (DeviceError, r"^out: expected the device of q \(cpu\), got meta; move it there"),
    "channels outside": (ShapeError, r"^out: expected dense channels \(a last stride of 1\), got \[4, 1, 12\]"),
    "one token for all": (SpecError, r"^out: expected memory of its own for each element, got the strides \[0, 8, 1\]"),
    "q itself": (SpecError, "^out: expected memory apart from q, which the kernel reads while it writes"),
    "the pool": (SpecError, "^out: expected memory apart from k_pages"),
    "gradient": (SpecError, "^out: expected requires_grad=False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_buffers(name: str) -> None:
    arrays, options = arguments(CALLS["decode"])
    error, says = BAD[name]
    with pytest.raises(error, match=says):
        paged_attention(*arrays, **options, out=bad(name, arrays))


def test_jax_has_no_buffers() -> None:
    with pytest.raises(
        TypeError, match=r"^out: paged_attention\(\) has no such argument; only .* torch_frontend writes"
    ):
        jax_frontend.paged_attention(None, None, None, block_table=None, seq_lens=None, out=1)
    assert torch_frontend.paged_attention is paged_attention
