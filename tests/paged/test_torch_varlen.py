"""Tests torch's varlen flash attention on pages: lowering, refusals, and the code around a stand-in for the op.

The stand-in reads its arguments by the op's own schema and behaves like the kernel: +inf for rows that see nothing,
unwritten rows, and distances of ``max_k`` or more as unbounded. Its numbers are the float64 reference's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from callers_view import callers_results
from paged_cases import make_paged

from attn_core import AttentionSpec, Target, backends, explain
from attn_core.backends import torch_varlen
from attn_core.call.pages import PagedKV
from attn_core.call.tensors import Inputs, PagedInputs
from attn_core.correctness import accuracy, reference
from attn_core.correctness.paged import gather_pages

TYPES = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
PAGES = ", Tensor? block_table=None, int? num_splits=None)"
PLAIN = f"aten::_flash_attention_forward{TYPES}{PAGES} -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
IN_PLACE = PLAIN.replace("forward(", "forward_no_dropout_inplace(Tensor(a!) out, ").split(" -> ")[0] + " -> Tensor"
"""The schemas of torch 2.13."""

PAGED = PagedKV(num_pages=9, page_size=256, width=4)
SPEC = AttentionSpec(
    **{"batch": 1, "q_len": 40, "kv_len": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "value_dim": 128},
    **{"dtype": "bfloat16", "causal": True, "documents": 3, "max_len_q": 30, "max_len_k": 1024, "paged": PAGED},
)

# The op's arguments

LOWERED = {
    "max_q": 30,
    "max_k": 1024,
    "is_causal": True,
    "scale": 1 / 128**0.5,
    "window_size_left": None,
    "window_size_right": None,
    "num_splits": 1,
}


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"causal": False}, {"is_causal": False}),
        ({"window": (7, 0)}, {"window_size_left": 7, "window_size_right": 0}),
        ({"window": (7, None)}, {"window_size_left": 7, "window_size_right": 0}),
        ({"causal": False, "window": (None, 0)}, {}),
        ({"causal": False, "window": (5, None)}, {"is_causal": False, "window_size_left": 5}),
        ({"causal": False, "window": (None, 2)}, {"is_causal": False, "window_size_right": 2}),
        ({"causal": False, "window": (1024, 1023)}, {"is_causal": False, "window_size_right": 1023}),
        ({"window": (1023, 0)}, {"window_size_left": 1023, "window_size_right": 0}),
        ({"scale": 0.5}, {"scale": 0.5}),
        ({"max_len_q": 1, "q_len": 3}, {"max_q": 2}),
        ({"max_len_q": 1100, "q_len": 1100}, {"max_q": 1100, "max_k": 1099}),
    ],
    ids=str,
)
def test_lower(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    assert torch_varlen.lower(replace(SPEC, **fields)) == LOWERED | changes


# What is refused


def reasons(device: str = "sm90", **fields: Any) -> tuple[str, ...]:
    return explain(replace(SPEC, **fields), Target("torch", device), "torch_varlen").reasons("torch_varlen")


def test_a_plain_call_is_accepted_on_every_device() -> None:
    for device in ("sm80", "sm89", "sm90", "sm100"):
        assert reasons(device) == reasons(device, sinks=True, return_lse=True, window=(3, 0)) == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"paged": None}, "keys and values not in pages: the aten CUDA flash kernel on pages reads only pages"),
        (
            {"paged": replace(PAGED, page_size=128, width=8)},
            "page_size=128: the aten CUDA flash kernel on pages takes pages of",
        ),
        ({"head_dim": 60, "value_dim": 60}, "head_dim=60: the aten CUDA flash kernel on pages takes multiples of 8"),
        ({"head_dim": 264, "value_dim": 264}, "head_dim=264: the aten CUDA flash kernel on pages stops at 256"),
        ({"value_dim": 64}, "value_dim=64"),
        ({"softcap": 3.0}, "softcap=3.0: the aten CUDA flash kernel on pages has none"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"documents": 65536}, "65536 batch rows or documents"),
        ({"device": "sm75"}, "device sm75: the aten CUDA flash kernel on pages needs sm80 or newer"),
        ({"device": "cpu"}, "device cpu: the aten CUDA flash kernel on pages needs cuda"),
    ],
    ids=str,
)
def test_refusals_name_the_value(fields: dict[str, Any], words: str) -> None:
    actual = reasons(**fields)
    assert any(why.startswith(words) for why in actual), actual


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_it_runs_only_by_name(framework: str) -> None:
    gone = tuple((name, "gone") for name in backends.PAGED_PREFERENCE[framework, "cuda"])
    where = Target(framework, "sm90", unavailable=gone)
    assert explain(SPEC, where).backend is None
    assert explain(SPEC, where, "torch_varlen").backend == "torch_varlen"


# The stand-in


class StandIn:
    """An op that computes by the reference and records its arguments."""

    def __init__(self, text: str) -> None:
        self._schema = torch._C.parse_schema(text)
        self.seen: dict[str, Any] = {}

    def __call__(self, *places: Any, **keywords: Any) -> Any:
        arguments = self._schema.arguments
        names = [argument.name for argument in arguments if not argument.kwarg_only]
        assert len(places) == len(names) and set(keywords) <= {a.name for a in arguments if a.kwarg_only}
        given = self.seen = {a.name: a.default_value for a in arguments} | dict(zip(names, places)) | keywords
        check(given)
        place = given["out"] if "out" in given else torch.full_like(given["query"], torch.nan)
        lse = attend(given, place)
        return lse if "out" in given else (place, lse, None, None, None)


def check(given: dict[str, Any]) -> None:
    """Checks the kernel's demands on its arguments, and the conditions that would show its bugs."""
    q, k, table = given["query"], given["key"], given["block_table"]
    for name in ("cum_seq_q", "cum_seq_k", "seqused_k"):
        assert given[name].dtype == torch.int32 and given[name].is_contiguous(), name
    assert len(given["cum_seq_q"]) == len(given["cum_seq_k"]) == len(given["seqused_k"]) + 1 == len(table) + 1
    assert table.dtype == torch.int32 and table.stride(-1) == 1
    assert q.dtype in (torch.bfloat16, torch.float16) and k.shape[1] % 256 == 0 and q.shape[-1] % 8 == 0
    assert ((table >= 0) & (table < len(k))).all(), "the kernel would read outside the pool"
    assert ((given["seqused_k"] >= 0) & (given["seqused_k"] <= table.shape[1] * k.shape[1])).all()
    assert given["num_splits"] == 1 and given["max_q"] > 1 and given["dropout_p"] == 0.0 and not q.requires_grad
    assert given["alibi_slopes"] is None and given["return_debug_mask"] is False


def attend(given: dict[str, Any], out: Any) -> Any:
    """Writes out, and returns lse [heads, tokens] as the kernel does."""
    q, k, v = (given[name].double().numpy() for name in ("query", "key", "value"))
    far = given["max_k"]
    sides = [-1 if given[n] is None else given[n] for n in ("window_size_left", "window_size_right")]
    left, right = (-1 if side >= far else side for side in sides)
    right = 0 if given["is_causal"] else right
    left, right = (far if left < 0 <= right else left), (far if right < 0 <= left else right)
    tokens, heads = q.shape[:2]
    lse = torch.full((heads, tokens), torch.nan)
    offsets = given["cum_seq_q"].tolist()
    for row, keys, start, stop in zip(given["block_table"], given["seqused_k"].tolist(), offsets, offsets[1:]):
        pages = row.numpy()
        parts = (pool[pages].reshape(-1, *pool.shape[2:])[:keys] for pool in (k, v))
        spec = AttentionSpec(
            **{"batch": 1, "q_len": stop - start, "kv_len": keys, "num_heads": heads, "num_kv_heads": k.shape[2]},
            **{"head_dim": q.shape[2], "value_dim": v.shape[3], "dtype": "float64", "scale": given["scale"]},
            window=(None if left < 0 else left, None if right < 0 else right),
        )
        made, actual = reference.forward(spec, Inputs(q[start:stop][None], *(part[None] for part in parts)))
        out[start:stop] = torch.from_numpy(made[0]).to(out.dtype)
        lse[:, start:stop] = torch.from_numpy(actual[0]).float()
    return lse.masked_fill_(lse == -torch.inf, torch.inf)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> tuple[StandIn, StandIn]:
    made = StandIn(PLAIN), StandIn(IN_PLACE)
    monkeypatch.setattr(torch_varlen, "_kernels", lambda: made)
    return made


CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "decoding": ((300, 2, 17), None, {}),
    "chunks": ((300, 0, 17, 513), (7, 0, 17, 2), {}),
    "window": ((300, 2, 17), (40, 2, 5), {"window": 9}),
    "window of both sides": ((300, 2, 17), (40, 2, 5), {"causal": False, "window": (4, 2)}),
    "window to the left": ((300, 2, 17), (40, 2, 5), {"causal": False, "window": (4, None)}),
    "window to the right": ((300, 2, 17), (40, 2, 5), {"causal": False, "window": (None, 3)}),
    "all see all": ((300, 2), (3, 2), {"causal": False, "scale": 0.7}),
    "sinks": ((300, 2, 17), (3, 1, 5), {"sinks": True, "window": 3}),
    "shared pages": ((600, 520), (3, 5), {"shared": 2}),
    "no group": ((30, 20), (3, 5), {"num_kv_heads": 4}),
}


def tensors_of(inputs: PagedInputs, dtype: str) -> PagedInputs:
    made = [None if array is None else torch.from_numpy(np.array(array)) for array in inputs]
    return PagedInputs(*(t.to(getattr(torch, dtype)) if t is not None and t.is_floating_point() else t for t in made))


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CALLS)
def test_results_match_the_reference(ops: Any, name: str, dtype: str, into: bool) -> None:
    lengths, new, fields = CALLS[name]
    call = make_paged(lengths, new, page_size=256, return_lse=True, dtype=dtype, **fields)
    inputs = tensors_of(call.inputs, dtype)
    buffers = (inputs.q.new_full(call.spec.out_shape, torch.nan), torch.empty(call.spec.lse_shape)) if into else None
    out, lse = torch_varlen.forward(call.spec, inputs, buffers)
    assert (out is buffers[0]) if into and not call.spec.sinks else True  # type: ignore[index]
    assert lse.shape == call.spec.lse_shape and lse.dtype == torch.float32
    expected, expected_lse = reference.forward(call.spec, call.inputs)
    np.testing.assert_allclose(out.double().numpy(), expected, atol=2e-2 if dtype == "bfloat16" else 2e-3)
    np.testing.assert_allclose(callers_results(call.spec, call.inputs, lse)[0], expected_lse, atol=1e-4)
    assert bool(ops[1].seen) is (into and not call.spec.sinks)


def test_results_are_within_the_bounds_of_the_dtype(ops: Any) -> None:
    call = make_paged((300, 2, 17), (40, 2, 5), page_size=256, return_lse=True, dtype="bfloat16", window=6)
    out, lse = torch_varlen.forward(call.spec, tensors_of(call.inputs, "bfloat16"))
    spec, inputs = gather_pages(call.spec, call.inputs)
    verdict = accuracy.expect(spec, inputs).judge(out=out.double().numpy(), lse=lse.numpy())
    assert verdict.ok, verdict
    wider = replace(call.spec, window=(6, 0))
    out, lse = torch_varlen.forward(wider, tensors_of(call.inputs, "bfloat16"))
    assert not accuracy.expect(spec, inputs).judge(out=out.double().numpy(), lse=lse.numpy()).ok


def test_wrong_tables_stay_in_the_pool(ops: Any) -> None:
    call = make_paged((300, 2), (3, 2), page_size=256, dtype="bfloat16")
    inputs = tensors_of(call.inputs, "bfloat16")
    table, lengths = inputs.block_table.clone(), torch.tensor([10**6, -3], dtype=torch.int32)
    table[0, 0], table[1, 0] = 10**6, -7
    out, lse = torch_varlen.forward(call.spec, inputs._replace(block_table=table, seq_lens=lengths))
    assert out.shape == call.spec.out_shape and (out[3:] == 0).all() and (lse[:, 3:] == -torch.inf).all()


def test_tables_of_any_strides_are_accepted(ops: Any) -> None:
    call = make_paged((300, 520), (3, 2), page_size=256, dtype="bfloat16")
    inputs = tensors_of(call.inputs, "bfloat16")
    plain = torch_varlen.forward(call.spec, inputs)
    turned = inputs._replace(
        block_table=inputs.block_table.T.contiguous().T, seq_lens=inputs.seq_lens.repeat_interleave(2)[::2]
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, torch_varlen.forward(call.spec, turned)))


def test_another_active_implementation_is_an_error(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_paged((30, 2), (3, 2), page_size=256, dtype="bfloat16")
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    with pytest.raises(RuntimeError, match="torch_varlen: the flash attention implementation 'FA4' is active"):
        torch_varlen.forward(call.spec, tensors_of(call.inputs, "bfloat16"))


def test_the_backward_is_refused() -> None:
    packed = reasons(paged=None, needs_backward=True)
    assert "backward: the aten CUDA flash kernel on pages has no gradient" in packed
    with pytest.raises(NotImplementedError, match="the aten CUDA flash kernel on pages has no gradient"):
        torch_varlen.backward(SPEC, None, None, None, None, None)


# The installation


def test_an_older_torch_is_recognised_by_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    old = StandIn(PLAIN.replace(PAGES, ")")), StandIn(IN_PLACE.replace(PAGES, ")"))
    monkeypatch.setattr(torch_varlen, "_kernels", lambda: old)
    with pytest.raises(ImportError, match=r"aten::_flash_attention_forward takes no block_table, num_splits"):
        torch_varlen.probe()


def test_a_build_without_the_kernel_is_unavailable(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ImportError, match="was built without flash attention"):
        torch_varlen.probe()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert torch_varlen.probe() == torch.__version__


def test_the_arguments_fit_the_installed_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed schema equals the stand-in's; or it has no block table, and then the probe says so."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < (2, 13):
        with pytest.raises(ImportError, match=f"torch {torch.__version__}".replace("+", r"\+")):
            torch_varlen.probe()
        return
    assert torch_varlen.probe() == torch.__version__
    for op, text in zip(torch_varlen._kernels(), (PLAIN, IN_PLACE), strict=True):
        expected = [(a.name, a.kwarg_only) for a in torch._C.parse_schema(text).arguments]
        actual = [(a.name, a.kwarg_only) for a in op._schema.arguments]
        assert actual[: len(expected)] == expected, op
        assert all(a.has_default_value() for a in op._schema.arguments[len(expected) :]), op
