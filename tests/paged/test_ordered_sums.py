"""The Triton kernels that add in one order, in Triton's interpreter: equal bits in every chunk, batch and page.

``test_same_bits`` repeats the draws on a GPU, and ``test_ordered_launches`` compiles the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
import same_bits_calls
from both_frontends import _numpy
from callers_view import callers_results
from direct_launches import launch_by_address
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreted_calls import amid_nan
from paged_cases import LIES, judge, lying, make_paged
from same_bits_calls import Kind
from triton_interpreter import ALL, NONE, SMALL, make_small, slow_draws

from attn_core.backends import triton_splitkv
from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.in_order.order import Tiles
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("interpreter")]

OPTIONS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (),
    (("window", 20),),
    (("softcap", 5.0), ("sinks", True)),
    (("alibi_slopes", True),),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Small tiles and shares, and products as a GPU has them."""
    return make_small(monkeypatch)


def run(spec: AttentionSpec, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """The results, written into memory that was NaN."""
    assert triton_splitkv.refuses(spec, "sm90", None) == ()
    into = (
        torch.full(spec.out_shape, torch.nan, dtype=getattr(torch, spec.dtype)),
        torch.full(spec.lse_shape, torch.nan),
    )
    order.how.cache_clear()
    out, lse = triton_splitkv.forward(spec, same_bits_calls.as_tensors(spec, inputs, "cpu"), into)
    assert out is into[0] and lse is into[1]
    return _numpy(out), _numpy(lse)


def check_bits(patch: pytest.MonkeyPatch, examples: int, lengths: tuple[int, ...], **how: Any) -> None:
    @settings(max_examples=examples, **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        heads, options = data.draw(st.sampled_from(((1, 1), (2, 1), (3, 1)))), data.draw(st.sampled_from(OPTIONS))
        patch.setattr(order, "FEW_PROGRAMS", data.draw(st.sampled_from((NONE, ALL, 4))))
        kind = Kind("torch", "triton_splitkv", "prefix", heads, "float16", options)
        same_bits_calls.check(kind, run, data.draw, lengths, (1, 3, 16, 64))

    draws()


def test_a_query_has_the_same_bits_in_every_chunk_batch_and_page(small: pytest.MonkeyPatch) -> None:
    check_bits(small, slow_draws(6), (2, 15, 40))


FAULTS = {
    "share": SMALL._replace(share=48),
    "tile": SMALL._replace(launches=(Tiles(16, 32, 1, 2), Tiles(32, 32, 2, 2))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_order_that_the_shapes_choose_is_caught(fault: str, small: pytest.MonkeyPatch) -> None:
    """Planted: the declared maximum of queries chooses the keys of a share or of a tile, as a heuristic would."""
    small.setattr(order, "order", lambda spec: FAULTS[fault] if spec.max_len_q > 9 else SMALL)
    with pytest.raises(AssertionError, match=r"(queries|token) \d+ .*of"):
        check_bits(small, 20, (70,), phases=[Phase.generate])


HALF: dict[str, Any] = {"dtype": "float16", "head_dim": 16, "value_dim": 16, "return_lse": True}
CASES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": (5, 70, 1)},
    "chunks": {"lengths": (70, 0, 33, 9), "new": (5, 0, 1, 9), "page_size": 3},
    "window both sides": {"lengths": (90, 9), "new": (4, 9), "window": (6, 3), "causal": False},
    "no causal": {"lengths": (70, 8), "new": (5, 3), "causal": False},
    "sinks and softcap": {"lengths": (70, 9, 0), "new": (4, 9, 0), "sinks": True, "softcap": 0.7},
    "wide values": {"lengths": (70, 9), "new": (2, 3), "value_dim": 32},
    "heads outside": {"lengths": (40, 23), "new": (2, 3), "layout": "heads_outside"},
    "slopes by sequence": {"lengths": (40, 23, 5), "alibi": 2, "num_heads": 6, "sinks": True},
    "starts": {"lengths": (70, 33, 9), "new": (4, 7, 9), "starts": True, "seed": 3},
}


@pytest.mark.parametrize("few", [ALL, NONE])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_right(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "NARROW", SMALL)
    monkeypatch.setattr(order, "FEW_PROGRAMS", few)
    fields = {**HALF, **CASES[name]}
    call = make_paged(fields.pop("lengths"), fields.pop("new", None), **fields)
    call = replace(call, spec=replace(call.spec, invariant="prefix" if call.spec.causal else "batch"))
    out, lse = run(call.spec, call.inputs._replace(**{n: np.float32(getattr(call.inputs, n)) for n in "qkv"}))
    verdict = judge(call, {"out": out, "lse": callers_results(call.spec, call.inputs, lse)[0]})
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("few", [ALL, NONE])
@pytest.mark.parametrize("lie", LIES)
def test_tables_that_lie_lead_nowhere_outside_the_pool(lie: str, few: int, small: pytest.MonkeyPatch) -> None:
    """The pools lie between pages of NaN, and are finite."""
    small.setattr(order, "FEW_PROGRAMS", few)
    call = lying(lie, **HALF)
    spec = replace(call.spec, invariant="prefix")
    inputs = same_bits_calls.as_tensors(spec, call.inputs, "cpu")
    k, v = map(amid_nan, inputs[1:3])
    order.how.cache_clear()
    into = torch.full(spec.out_shape, 0.0, dtype=torch.float16), torch.full(spec.lse_shape, 0.0)
    out, lse = triton_splitkv.forward(spec, inputs._replace(k=k, v=v), into)
    assert out.isfinite().all() and not lse.isnan().any()
    if lie == "negative lengths":
        assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("few", [ALL, NONE])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_seen_call_gives_the_bits_of_a_new_one(return_lse: bool, few: int, small: pytest.MonkeyPatch) -> None:
    small.setattr(order, "FEW_PROGRAMS", few)
    kind = Kind("torch", "triton_splitkv", "prefix", (2, 1), "float16", (("sinks", True),))
    scene = same_bits_calls.Scene(((1, 40),), offsets=False)
    calls = [same_bits_calls.call(kind, same_bits_calls.document(kind, seed, 1, 70), scene)[:2] for seed in (1, 2)]
    spec = replace(calls[0][0], return_lse=return_lse)
    one, other = (same_bits_calls.as_tensors(spec, inputs, "cpu") for _, inputs in calls)
    order.how.cache_clear()
    expected = [triton_splitkv.forward(spec, inputs) for inputs in (one, other)]
    direct = launch_by_address(small)
    repeat = triton_splitkv.paged_shortcut(spec)
    for at, inputs in enumerate((one, other, one)):
        before = len(direct)
        out, lse = repeat(*inputs[:5], inputs.sinks)
        right = expected[inputs is other]
        assert torch.equal(out, right[0])
        assert not return_lse or torch.equal(lse, right[1])
        assert len(direct) - before == (0 if at == 0 else 2 if few else 1)
