"""Tests FlashInfer on pages: lowering, refusals, and the code around a stand-in for the package.

The stand-in has the wrapper's signatures and its demands on arguments. It computes by the float64 reference with
FlashInfer's conventions: a log-sum-exp to the base 2, ``[tokens, heads]``, and tables by rows.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from paged_cases import PagedCall, make_paged

from attn_core import AttentionSpec, Target, backends, explain
from attn_core.backends import flashinfer
from attn_core.call.pages import PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.correctness import accuracy, reference
from attn_core.correctness.paged import gather_pages
from attn_core.errors import ShapeError, SpecError
from attn_core.paged.row_tables import PagedRows, table_of_rows

PAGED = PagedKV(num_pages=90, page_size=16, width=64)
SPEC = AttentionSpec(
    **{"batch": 1, "q_len": 40, "kv_len": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "value_dim": 128},
    **{"dtype": "bfloat16", "causal": True, "documents": 3, "max_len_q": 30, "max_len_k": 1024, "paged": PAGED},
)

# Arguments of the plan

LOWERED = {
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim_qk": 128,
    "page_size": 16,
    "causal": True,
    "sm_scale": 1 / 128**0.5,
    "window_left": -1,
    "logits_soft_cap": 0.0,
}


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"causal": False}, {"causal": False}),
        ({"window": (7, 0)}, {"window_left": 7}),
        ({"window": (0, 0)}, {"window_left": 0}),
        ({"window": (7, None)}, {"window_left": 7}),
        ({"window": (1023, 0)}, {"window_left": 1023}),
        ({"window": (1024, 0)}, {}),
        ({"causal": False, "window": (None, 0)}, {}),
        ({"causal": False, "window": (5, None)}, {"causal": False, "window_left": 5}),
        ({"causal": False, "window": (5, 1024)}, {"causal": False, "window_left": 5}),
        ({"softcap": 50}, {"logits_soft_cap": 50.0}),
        ({"scale": 0.5}, {"sm_scale": 0.5}),
    ],
    ids=str,
)
def test_lower(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    assert flashinfer.lower(replace(SPEC, **fields)) == LOWERED | changes
    assert reasons(**fields) == ()


# What is refused


def reasons(device: str = "sm90", **fields: Any) -> tuple[str, ...]:
    return explain(replace(SPEC, **fields), Target("torch", device), "flashinfer").reasons("flashinfer")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"paged": None}, "keys and values not in pages: the FlashInfer kernel reads only pages"),
        ({"head_dim": 80, "value_dim": 80}, "head_dim=80: the FlashInfer kernel takes 64, 128, 256"),
        ({"head_dim": 512, "value_dim": 512}, "head_dim=512: the FlashInfer kernel stops at 256"),
        ({"value_dim": 64}, "value_dim=64"),
        ({"causal": False, "window": (4, 2)}, "window=(4, 2): the FlashInfer kernel has windows without a right side"),
        ({"causal": False, "window": (None, 1023)}, "window=(None, 1023): the FlashInfer kernel has windows without"),
        ({"dtype": "float32"}, "dtype float32: the FlashInfer kernel takes bfloat16, float16"),
        ({"deterministic": True}, "deterministic=True: the FlashInfer kernel has none"),
        ({"device": "sm75"}, "device sm75: the FlashInfer kernel needs sm80 or newer"),
        ({"device": "cpu"}, "device cpu: the FlashInfer kernel needs cuda"),
    ],
    ids=str,
)
def test_refusals_name_the_value(fields: dict[str, Any], words: str) -> None:
    actual = reasons(**fields)
    assert any(why.startswith(words) for why in actual), actual


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_it_runs_only_by_name(framework: str) -> None:
    others = tuple((name, "gone") for name in backends.names() if name != "flashinfer")
    for spec in (SPEC, replace(SPEC, q_len=3, max_len_q=1)):
        actual = explain(spec, Target(framework, "sm90", unavailable=others))
        assert actual.backend is None and "by name only, never run on a GPU by this project: flashinfer" in str(actual)
        assert explain(spec, Target(framework, "sm90"), "flashinfer").backend == "flashinfer"


def test_the_backward_is_refused() -> None:
    assert "backward: the FlashInfer kernel has no gradient" in reasons(paged=None, needs_backward=True)
    with pytest.raises(NotImplementedError, match="the FlashInfer kernel has no gradient"):
        flashinfer.backward(SPEC, None, None, None, None, None)


# The stand-in


class StandIn:
    """``BatchPrefillWithPagedKVCacheWrapper``: the same arguments in the same order."""

    made = 0

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False, backend: str = "auto"
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and len(float_workspace_buffer) == 128 * 2**20
        assert kv_layout == "NHD" and not use_cuda_graph and backend == "fa2"
        StandIn.made += 1

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(t.dtype == torch.int32 and t.device.type == "cpu" and t.is_contiguous() for t in tables)
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and head_dim_vo is None and sm_scale is not None
        assert q_data_type is kv_data_type
        self.planned = SimpleNamespace(
            **{"offsets": qo_indptr, "rows": PagedRows(*(t.numpy() for t in tables[1:])), "dtype": q_data_type},
            **{"heads": (num_qo_heads, num_kv_heads, head_dim_qk), "page_size": page_size, "causal": causal},
            **{"scale": sm_scale, "left": window_left, "softcap": logits_soft_cap},
        )

    def run(self, q: Any, paged_kv_cache: Any, *, out: Any = None, lse: Any = None, return_lse: bool = False) -> Any:
        planned, (k, v) = self.planned, paged_kv_cache
        assert q.shape == (planned.offsets[-1], *planned.heads[::2]) and q.dtype == planned.dtype
        assert k.shape[1:] == (planned.page_size, *planned.heads[1:]) and k.stride() == v.stride() and return_lse
        assert lse is None and (out is None or (out.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype))
        table, lengths = table_of_rows(planned.rows, planned.page_size)
        paged = PagedKV(num_pages=len(k), page_size=planned.page_size, width=table.shape[1])
        spec = AttentionSpec(
            **{"batch": 1, "q_len": len(q), "kv_len": paged.capacity, "num_heads": q.shape[1], "value_dim": v.shape[3]},
            **{"num_kv_heads": k.shape[2], "head_dim": q.shape[2], "dtype": "float64", "causal": planned.causal},
            **{"window": (None if planned.left < 0 else planned.left, None), "softcap": planned.softcap or None},
            **{"scale": planned.scale, "documents": len(lengths), "max_len_k": paged.capacity, "paged": paged},
            max_len_q=int(planned.offsets.diff().max()),
        )
        arrays = (x.double().numpy() for x in (q, k, v))
        made, actual = reference.forward(spec, PagedInputs(*arrays, table, lengths, planned.offsets.numpy()))
        out = torch.empty_like(q) if out is None else out
        return out.copy_(torch.from_numpy(made)), torch.from_numpy(actual.T / np.log(2)).float().contiguous()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package as ``import_module`` finds it; no cache keeps anything from before or within."""
    package = SimpleNamespace(__version__="0.6.3", BatchPrefillWithPagedKVCacheWrapper=StandIn)
    monkeypatch.setattr(flashinfer, "import_module", {"flashinfer": package}.__getitem__)
    monkeypatch.setattr(flashinfer, "_PER_THREAD", threading.local())
    monkeypatch.setattr(StandIn, "made", 0)
    return package


CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "decoding": ((30, 2, 17), None, {}),
    "chunks": ((30, 0, 17, 33), (7, 0, 17, 2), {"page_size": 16}),
    "pages of one": ((30, 2, 17), (7, 2, 3), {"page_size": 1}),
    "window": ((30, 2, 17), (20, 2, 5), {"window": 9}),
    "window to the left": ((30, 2, 17), (20, 2, 5), {"causal": False, "window": (4, None)}),
    "all see all": ((30, 2), (3, 2), {"causal": False, "scale": 0.7}),
    "softcap and sinks": ((30, 2, 17), (3, 1, 5), {"softcap": 2.0, "sinks": True, "window": 3}),
    "sinks": ((30, 17), (3, 5), {"sinks": True}),
    "shared pages": ((30, 22), (3, 5), {"shared": 2}),
    "no group": ((30, 20), (3, 5), {"num_kv_heads": 4}),
}


def random_call(name: str, dtype: str = "bfloat16") -> tuple[PagedCall, PagedInputs]:
    lengths, new, fields = CALLS[name]
    call = make_paged(lengths, new, return_lse=True, dtype=dtype, head_dim=64, value_dim=64, **fields)
    made = [None if array is None else torch.from_numpy(np.array(array)) for array in call.inputs]
    kind = getattr(torch, dtype)
    return call, PagedInputs(*(t.to(kind) if t is not None and t.is_floating_point() else t for t in made))


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CALLS)
def test_results_match_the_reference(installed: Any, name: str, dtype: str, into: bool) -> None:
    call, inputs = random_call(name, dtype)
    buffers = (inputs.q.new_full(call.spec.out_shape, torch.nan), torch.empty(call.spec.lse_shape)) if into else None
    out, lse = flashinfer.forward(call.spec, inputs, buffers)
    assert (out is buffers[0]) if into and not call.spec.sinks else True  # type: ignore[index]
    assert lse.shape == call.spec.lse_shape and lse.dtype == torch.float32
    spec, dense = gather_pages(call.spec, call.inputs)
    verdict = accuracy.expect(spec, dense).judge(out=out.double().numpy(), lse=lse.numpy())
    assert verdict.ok, verdict


@pytest.mark.parametrize("fault", [{"scale": 0.5}, {"window": (9, 0)}, {"window": (7, 0)}, {"softcap": 1.0}], ids=str)
def test_the_comparison_finds_planted_faults(installed: Any, fault: dict[str, Any]) -> None:
    call, inputs = random_call("window")
    out, lse = flashinfer.forward(replace(call.spec, **fault), inputs)
    spec, dense = gather_pages(call.spec, call.inputs)
    assert not accuracy.expect(spec, dense).judge(out=out.double().numpy(), lse=lse.numpy()).ok


def test_wrong_tables_are_refused_by_value(installed: Any) -> None:
    call, inputs = random_call("chunks")
    table = inputs.block_table.clone()
    table[0, 0] = 10**6
    for lie, words in (
        ({"block_table": table}, r"block_table\[0, 0\]=1000000: expected a page of the pool"),
        ({"seq_lens": inputs.seq_lens + 10**6}, r"seq_lens\[0\]=1000030: expected 0 to"),
        ({"seq_lens": inputs.seq_lens - 20}, r"seq_lens\[1\]=-20"),
        ({"cu_seqlens_q": inputs.cu_seqlens_q + 1}, "cu_seqlens_q"),
    ):
        with pytest.raises(SpecError, match=words):
            flashinfer.forward(call.spec, inputs._replace(**lie))


def test_pools_of_different_strides_are_refused(installed: Any) -> None:
    call, inputs = random_call("chunks")
    turned = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ShapeError, match=r"v_pages: expected the strides of k_pages, \[2048, 128, 64, 1\]"):
        flashinfer.forward(call.spec, inputs._replace(v=turned))
    both = inputs._replace(v=turned, k=inputs.k.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(flashinfer.forward(call.spec, both)[0], flashinfer.forward(call.spec, inputs)[0])


def test_a_graph_capture_is_refused(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call, inputs = random_call("decoding")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_a_gpu = inputs._replace(q=SimpleNamespace(is_cuda=True))
    with pytest.raises(RuntimeError, match="backend='flashinfer' while a CUDA graph is captured: it reads the tables"):
        flashinfer.forward(call.spec, on_a_gpu)
    assert StandIn.made == 0


def test_each_thread_has_its_own_wrapper(installed: Any) -> None:
    call, inputs = random_call("decoding")
    flashinfer.forward(call.spec, inputs)
    flashinfer.forward(call.spec, inputs)
    assert StandIn.made == 1
    other = threading.Thread(target=flashinfer.forward, args=(call.spec, inputs))
    other.start()
    other.join()
    assert StandIn.made == 2


def test_probe_returns_the_version_or_raises(installed: Any) -> None:
    assert flashinfer.probe() == "0.6.3"
    del installed.BatchPrefillWithPagedKVCacheWrapper
    with pytest.raises(AttributeError, match="BatchPrefillWithPagedKVCacheWrapper"):
        flashinfer.probe()
