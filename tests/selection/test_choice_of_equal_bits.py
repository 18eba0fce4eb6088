"""Automatic choice with ``invariant``: another backend for another form or length of a row would round differently."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec, backends
from attn_core.call.spec import PagedKV
from attn_core.selection import explain
from attn_core.selection.target import Target
from benchmarks.fit.calls import as_called

SPEC = AttentionSpec(
    **{"batch": 4, "q_len": 4096, "kv_len": 4096, "num_heads": 32, "num_kv_heads": 8},
    **{"head_dim": 128, "value_dim": 128, "dtype": "bfloat16", "causal": True},
)


@pytest.mark.parametrize(
    ("framework", "device"), [("torch", "sm90"), ("jax", "sm90"), ("torch", "cpu"), ("jax", "cpu")]
)
@pytest.mark.parametrize("invariant", ["batch", "prefix"])
def test_the_choice_depends_on_no_shape(framework: str, device: str, invariant: str) -> None:
    target, chosen, free = Target(framework, device), set(), set()
    for batch, length, backward in product((1, 2, 32), (1, 16, 512, 4096), (False, True)):
        shape = {"batch": batch, "q_len": length, "kv_len": length, "needs_backward": backward}
        total = {"batch": 1, "q_len": batch * length, "kv_len": batch * length}
        packed = {"documents": batch, "max_len_q": length, "max_len_k": length}
        for fields in (shape, shape | total | packed):
            spec = replace(SPEC, **fields)
            free.add(explain(spec, target).backend)
            chosen.add(explain(replace(spec, invariant=invariant), target).backend)
    assert len(chosen) == 1 and None not in chosen
    assert (len(free) > 1) == ((framework, device) != ("torch", "cpu")), "without a promise shapes count"


LACKS = ((), ("flash4",), ("flash4", "flash2"), ("triton_ordered", "triton_splitkv"))
"""Kernels that a machine may lack."""
LENGTHS = st.sampled_from((1, 2, 5, 64, 129, 300, 4096, 70000))
FEATURES: tuple[dict[str, Any], ...] = (
    *({}, {"window": (40, None)}, {"window": (40, 0)}, {"softcap": 5.0}, {"sinks": True}, {"alibi_shape": (8,)}),
    *({"head_dim": 96, "value_dim": 96}, {"dtype": "float32"}, {"value_dim": 64}, {"num_kv_heads": 8}),
)


@st.composite
def lives(draw: Any) -> tuple[Target, list[AttentionSpec]]:
    """A machine, and calls with one row: of other lengths, forms and neighbours."""
    device = draw(st.sampled_from(("cpu", "sm80", "sm90")))
    lacks = tuple((name, "not installed") for name in draw(st.sampled_from(LACKS)) if device != "cpu")
    target = Target(draw(st.sampled_from(("torch", "jax"))), device, lacks)
    invariant = draw(st.sampled_from(("batch", "prefix")))
    alignment = draw(st.sampled_from(("bottom_right", "top_left")))
    features = {"num_kv_heads": 2, **draw(st.sampled_from(FEATURES)), "alignment": alignment, "invariant": invariant}
    row = replace(SPEC, batch=1, num_heads=8, **features)
    return target, [draw(calls(row)) for _ in range(draw(st.integers(2, 6)))]


@st.composite
def calls(draw: Any, row: AttentionSpec) -> AttentionSpec:
    queries, more, batch = draw(LENGTHS), draw(st.sampled_from((0, 0, 7, 500))), draw(st.sampled_from((1, 3, 64)))
    keys = queries + more
    forms = [
        "dense",
        "dense",
        "packed",
        "masked",
        *(["pages"] * 2 if row.invariant == "prefix" and row.alignment == "bottom_right" else []),
    ]
    form = draw(st.sampled_from(forms))
    fields: dict[str, Any] = {"batch": batch, "q_len": queries, "kv_len": keys, "return_lse": draw(st.booleans())}
    if form == "masked":
        fields["mask_shape"] = (batch, 1, 1, keys)
    if form in ("packed", "pages"):
        totals = {"batch": 1, "q_len": batch * queries, "kv_len": batch * keys}
        fields |= {**totals, "documents": batch, "max_len_q": queries, "max_len_k": keys}
    if form == "pages":
        width = -(-keys // 16)
        fields |= {"paged": PagedKV(num_pages=batch * width, page_size=16, width=width)}
        fields |= {"kv_len": width * 16, "max_len_k": width * 16}
    else:
        fields["needs_backward"] = draw(st.booleans())
    return as_called(replace(row, **fields))


@given(lives())
def test_one_backend_has_all_calls_with_a_row(life: tuple[Target, list[AttentionSpec]]) -> None:
    """Some forms no backend may have; but two backends never share a row."""
    target, specs = life
    records = {name: backends.load(name, "cuda") for name in backends.names()}
    twins = {record.in_pages: name for name, record in records.items() if record.in_pages}
    chosen = [explain(spec, target).backend for spec in specs]
    named = {twins.get(name, name) for name in chosen if name is not None}
    assert len(named) <= 1, dict(zip(map(str, specs), chosen, strict=True))
    if target.device == "cpu":
        assert named == {"math"} and None not in chosen


@pytest.mark.parametrize("framework", ["torch", "jax"])
@given(data=st.data())
def test_a_window_that_hides_nothing_changes_no_choice(framework: str, data: st.DataObject) -> None:
    """In the frontends' own explain: rows shorter and longer than the window, packed, and decoding from pages."""
    frontend = pytest.importorskip(f"{framework}_frontend")
    to = __import__("torch").from_numpy if framework == "torch" else __import__("jax").numpy.asarray
    window = data.draw(st.sampled_from((None, 4, 64, (7, 0), (3, 2))))
    invariant = data.draw(st.sampled_from(("batch", "prefix")))
    how: dict[str, Any] = {"causal": True, "window": window, "invariant": invariant}
    chosen, bands = set(), set()
    for _ in range(3):
        queries, keys = (data.draw(st.sampled_from((1, 3, 65, 200))) for _ in "qk")
        keys = max(queries, keys)
        q, k = (to(np.zeros((1, length, heads, 8), np.float32)) for length, heads in ((queries, 4), (keys, 2)))
        dense = frontend.explain(q, k, k, **how)
        info = frontend.SeqInfo.from_lengths([queries], [keys])
        packed = frontend.explain(q[0], k[0], k[0], seq_info=info, **how)
        chosen |= {dense.backend, packed.backend}
        bands |= {(each.spec.causal, each.spec.window) for each in (dense, packed)}
        lengths, table = (to(np.full(shape, keys, np.int32)) for shape in ((1,), (1, 1)))
        pool = to(np.zeros((1, 256, 2, 8), np.float32))
        right = window if isinstance(window, int | None) else (window[0], 0)
        paged = {"block_table": table * 0, "seq_lens": lengths, "window": right, "invariant": invariant}
        chosen.add(frontend.explain_paged(q[0, :1], pool, pool, **paged).backend)
    assert len(chosen) == len(bands) == 1


def test_the_explanation_says_why() -> None:
    said = " ".join(str(explain(replace(SPEC, invariant="batch"), Target("torch", "sm90"))).split())
    assert "runs a row's calls of every length" in said
