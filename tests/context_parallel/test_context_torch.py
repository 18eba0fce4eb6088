"""Tests context parallelism in torch on gloo ranks: every strategy, layout and mask against the float64 reference.

This module draws the cases and judges the results. ``context_torch_worker`` runs them in worlds of 2, 3 and 4 ranks.
``context_torch_scenes`` holds jobs other than a call with its gradients.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import AXES, Case, Failed, World, once, ranges_of, values

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.options import normalise_window
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.layout import LAYOUTS, Layout, build_layout
from attn_core.correctness import reference

pytestmark = pytest.mark.sampled

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
TOLERANCE = 1e-9
KINDS = (*LAYOUTS, "window:5")
WAYS = (
    *((axes, strategy) for axes in ((2,), (3,), (4,)) for strategy in ("ring", "all_gather", "ulysses")),
    *(((2, 2), strategy) for strategy in ("ring", "all_gather")),
)
HEADS = {1: (4, 2), 2: (4, 1), 3: (6, 2), 4: (8, 2)}
"""By how many ranks share heads: numbers of query and kv heads. From 2 ranks on kv heads are fewer and must be
copied."""
FEW_KEYS = (8, 1)
"""So few kv heads that the gathered keys are kept for the backward."""
CAUSAL = ("causal", True)
DOCUMENTS = (3, 0, 11, 1, 8)
IMAGES = ("blocks", ((0, 6, 11, 19), (True, False, True, False), 23))
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"options": (CAUSAL,)},
    "window": {"options": (CAUSAL, ("window", 5), ("scale", 0.4))},
    "window, softcap, sinks": {"options": (CAUSAL, ("window", 4), ("softcap", 1.5)), "sinks": True},
    "window both sides": {"options": (("window", (3, 2)),)},
    "fewer queries": {"options": (CAUSAL,), "length": (11, 23)},
    "rows without keys": {"options": (CAUSAL, ("window", 6)), "length": (23, 11), "sinks": True},
    "top left": {"options": (CAUSAL, ("alignment", "top_left")), "length": (17, 23)},
    "documents": {"options": (CAUSAL,), "documents": DOCUMENTS},
    "shared prefix": {"options": (("key_ranges", ("shared_prefix", (9, (5, 4, 5)))), ("softcap", 1.5)), "batch": 1},
    "image blocks, window, sinks": {
        **{
            "options": (
                ("key_ranges", ("blocks", ((0, 6, 11, 19), (True, False, True, False), 23))),
                ("window", (7, 5)),
            )
        },
        "sinks": True,
    },
    "global tokens": {"options": (CAUSAL, ("key_ranges", ("global_and_window", (3, (4, 2), 23)))), "batch": 1},
    "documents, window, softcap, sinks": {
        **{"options": (("window", (4, 1)), ("softcap", 2.0)), "documents": (2, 19, 0, 2), "sinks": True}
    },
}


def ranks_sharing_heads(axes: tuple[int, ...], strategy: str | None) -> int:
    return axes[1] if len(axes) == 2 else axes[0] if strategy == "ulysses" else 1


def grid() -> list[Case]:
    """Every strategy on every mask in every layout. A third of the cases runs heads in two groups, if the heads
    allow it."""
    cases = []
    for at, ((axes, strategy), kind, mask) in enumerate(product(WAYS, KINDS, MASKS)):
        if kind == "documents" and "documents" not in MASKS[mask]:
            continue  # it deals documents
        shared = ranks_sharing_heads(axes, strategy)
        groups = 2 if at % 3 == 0 and shared in (1,) else None
        heads = HEADS[shared]
        if at % 3 == 0 and shared > 1:  # as many kv heads as query heads, in two groups
            heads, groups = (2 * shared, 2 * shared), 2
        if at % 3 == 1 and strategy == "all_gather":
            heads = FEW_KEYS
        fields = {"length": (23, 23), **MASKS[mask]}
        cases.append(Case(axes, strategy, kind, **{**fields, "heads": heads, "head_groups": groups, "seed": at}))
    return cases


def of_way(axes: tuple[int, ...], strategy: str, kind: str) -> list[Case]:
    return [case for case in grid() if (case.axes, case.strategy, case.layout) == (axes, strategy, kind)]


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    axes, kind = draw(st.sampled_from(((2,), (3,), (4,), (2, 2), (1, 3), (2, 1)))), draw(st.sampled_from(KINDS))
    strategy = draw(st.sampled_from(("ring", "all_gather", "ulysses", None)[: 4 if len(axes) == 1 else 2]))
    shared = ranks_sharing_heads(axes, strategy)
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 8))) * shared
    documents, length = None, (draw(st.integers(1, 40)),) * 2
    if kind == "documents" or draw(st.booleans()):
        documents = tuple(draw(st.lists(st.integers(0, 17), min_size=1, max_size=6).filter(any)))
        if kind == "documents":  # it needs a token for each rank
            documents = (*documents, 4)
        length = (sum(documents),) * 2
    elif draw(st.booleans()):
        length = (length[0], draw(st.integers(1, 40)))
    window = draw(st.sampled_from((None, 1, 5, (3, None), (0, 0), (2, 4), (None, 3))))
    options = {"causal": draw(st.booleans()), "window": window, "softcap": draw(st.sampled_from((None, 1.5)))}
    options["alignment"] = draw(st.sampled_from(("bottom_right", "top_left")))
    if options["causal"] and isinstance(window, tuple):
        options["window"] = (window[0], None)
    elif isinstance(window, int) and not options["causal"]:
        options["window"] = (window, window)
    return Case(
        *(axes, strategy, kind, length, (heads, kv_heads), documents),
        **{"options": tuple(options.items()), "sinks": draw(st.booleans()), "batch": draw(st.sampled_from((1, 2)))},
        seed=draw(st.integers(0, 999)),
    )


def drawn_cases() -> list[Case]:
    """The cases that hypothesis draws in the current profile."""
    cases: list[Case] = []

    @settings(max_examples=settings.default.max_examples)
    @given(any_case())
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def special() -> list[Case]:
    """Compiled, recomputed and twice differentiated calls, and rows shorter than the number of places."""
    base = Case((2,), "ring", "zigzag", (23, 23), (4, 2), None, (CAUSAL,), True)
    compiled = base._replace(how="compile")
    dealt = base._replace(layout="documents", documents=(9, 2, 20, 6, 8), length=(45, 45))
    window = base._replace(layout="contiguous", options=(CAUSAL, ("window", 4)))  # whose border is kept
    return [
        dealt._replace(how="compile in parts"),
        *(each._replace(how=how) for each in (dealt, window) for how in ("checkpoint", "kept")),
        compiled,
        compiled._replace(options=(CAUSAL, ("window", 6)), length=(23, 11)),  # rows without keys, places without rows
        compiled._replace(strategy="ulysses", heads=(4, 1), head_groups=1),
        compiled._replace(strategy="all_gather", documents=DOCUMENTS, head_groups=2, how="compile in parts"),
        base._replace(how="checkpoint"),
        base._replace(how="checkpoint", strategy="ulysses"),
        *(base._replace(how="kept", strategy=strategy) for strategy in ("all_gather", "ring", "ulysses")),
        *(base._replace(axes=axes, strategy=strategy, heads=(8, 2), length=(2, 2)) for axes, strategy in WAYS[6:]),
        *(base._replace(axes=axes, strategy=strategy, heads=(8, 2), length=(1, 9)) for axes, strategy in WAYS[6:]),
    ]


def cases_of(test: pytest.Item) -> list[Case]:
    """The cases that a test judges."""
    given = test.callspec.params if hasattr(test, "callspec") else {}
    if "case" in given:
        return [given["case"]]
    if "strategy" in given:
        return of_way(**given)
    return drawn_cases() if test.name == test_drawn_calls.__name__ else []


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Any]]:
    """The results of every rank for each case that a test of this run judges."""
    here = [test for test in request.session.items if test.path == request.path]
    cases = list(dict.fromkeys(case for test in here for case in cases_of(test)))
    worlds = [
        World(
            *(str(ranks), ranks),
            {case.name: ("context_torch_worker", "run", (case,)) for case in cases if np.prod(case.axes) == ranks},
        )
        for ranks in (2, 3, 4)
    ]
    requested, actual = once(worlds, "cases", tmp_path_factory, seconds=550)
    return {
        case: [rank.get(name) for rank in actual[world.name]]
        for world in requested
        for name, (_, _, (case,)) in world.jobs.items()
    }


def spec_of(case: Case) -> AttentionSpec:
    options = {name: value for name, value in case.options if name not in ("backend", "key_ranges")}
    key_ranges = ranges_of(case)
    window = normalise_window(options.pop("window", None), options.get("causal", False))
    documents = case.documents
    longest = max(documents) if documents else None
    return AttentionSpec(
        **{"batch": 1 if documents else case.batch, "q_len": case.length[0], "kv_len": case.length[1]},
        **{"num_heads": case.heads[0], "num_kv_heads": case.heads[1], "dtype": case.dtype, "sinks": case.sinks},
        **{"head_dim": case.dims[0], "value_dim": case.dims[1], "window": window, **options},
        **{"documents": len(documents) if documents else None, "max_len_q": longest, "max_len_k": longest},
        key_ranges_shape=None if key_ranges is None else key_ranges.shape,
        needs_backward=True,
    )


@cache
def expected(case: Case) -> dict[str, np.ndarray]:
    """out, lse and the gradients of whole rows, with a batch axis."""
    spec, whole = spec_of(case), values(case)
    q, k, v, dout, dlse = (each[0] if case.documents else each for each in whole[:5])
    cu = SeqInfo.from_lengths(case.documents).cu_seqlens_q if case.documents else None
    inputs = Inputs(q, k, v, sinks=whole.sinks if case.sinks else None, cu_seqlens_q=cu, cu_seqlens_k=cu)
    inputs = inputs._replace(key_ranges=ranges_of(case))
    out, lse = reference.forward(spec, inputs)
    dlse = dlse if case.lse_gradient else None
    gradients = reference.backward(spec, inputs, out, lse, dout, dlse)
    actual = [out, lse, gradients.dq, gradients.dk, gradients.dv]
    actual = [each[None] if case.documents else each for each in actual] + [gradients.dsinks]
    return {name: each for name, each in zip(NAMES, actual, strict=True) if each is not None}


def layout_of(case: Case, length: int) -> Layout:
    outer, inner = (*case.axes, 1)[:2]
    documents = None
    if case.documents and case.layout in ("zigzag", "documents"):
        documents = SeqInfo.from_lengths(case.documents).cu_seqlens_q.tolist()
    return build_layout(case.layout, length, outer, inner, documents)


def assembled(made: Layout, shards: list[np.ndarray], axis: int, nothing: float) -> np.ndarray:
    """The row assembled from its shards; a place without a position must hold ``nothing``."""
    shape = list(shards[0].shape)
    shape[axis] = made.length
    whole = np.full(shape, np.nan)
    for shard, runs in zip(shards, made.runs, strict=True):
        assert shard.shape[axis] == made.shard
        held = [run.start + at * run.stride for run in runs for at in range(run.count)]
        values = np.moveaxis(np.asarray(shard, np.float64), axis, 0)
        np.moveaxis(whole, axis, 0)[held] = values[: len(held)]
        assert (values[len(held) :] == nothing).all()
    return whole


def whole_rows(case: Case, ranks: list[Any]) -> dict[str, np.ndarray]:
    for rank, actual in enumerate(ranks):
        assert not isinstance(actual, Failed), f"rank {rank}: {actual.text}"
        assert actual is not None, f"rank {rank} did not come to this case: an earlier one failed"
    q_layout, k_layout = (layout_of(case, length) for length in case.length)
    rows = {}
    for name in NAMES[: 6 if case.sinks else 5]:
        shards = [actual[name] for actual in ranks]
        if name == "dsinks":
            rows[name] = np.sum(shards, 0)
            continue
        made = k_layout if name in ("dk", "dv") else q_layout
        axis, nothing = (2, -np.inf) if name == "lse" else (1, 0.0)
        rows[name] = assembled(made, shards, axis, nothing)
    return rows


def faults(case: Case, ranks: list[Any]) -> list[str]:
    """The results that differ from the reference by more than float64's rounding."""
    actual, right = whole_rows(case, ranks), expected(case)
    assert actual.keys() == right.keys()
    said = []
    for name, array in right.items():
        finite = np.isfinite(array)
        if not np.array_equal(finite, np.isfinite(actual[name])):
            said.append(f"{name}: finite at other places")
            continue
        error = np.abs(np.where(finite, actual[name] - np.where(finite, array, 0), 0)).max(initial=0)
        if error > TOLERANCE:
            said.append(f"{name}: off by {error:.1e}")
    return said


def assert_right(results: dict[Case, list[Any]], cases: list[Case]) -> None:
    assert cases
    wrong = {case.name: said for case in cases if (said := faults(case, results[case]))}
    assert not wrong, f"{len(wrong)} of {len(cases)} cases: {dict(list(wrong.items())[:5])}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axes", "strategy"), WAYS, ids=lambda each: str(each))
def test_strategies_layouts_and_masks(results: Any, axes: tuple[int, ...], strategy: str, kind: str) -> None:
    assert_right(results, of_way(axes, strategy, kind))


def test_drawn_calls(results: Any) -> None:
    named = {*grid(), *special()}
    assert_right(results, [case for case in results if case not in named])


@pytest.mark.parametrize("case", special(), ids=lambda case: case.name)
def test_compiled_recomputed_and_short_rows(results: Any, case: Case) -> None:
    assert_right(results, [case])


def test_the_cases_cover_every_special_situation() -> None:
    """Copied kv heads, groups of heads, rows that do not divide, and documents that are empty or longer than a
    shard."""
    cases = grid()
    assert any(case.heads[1] < ranks_sharing_heads(case.axes, case.strategy) for case in cases)
    assert any(case.head_groups == 2 and ranks_sharing_heads(case.axes, case.strategy) > 1 for case in cases)
    assert any(case.documents and max(case.documents) > layout_of(case, 23).shard for case in cases)
    assert any(case.documents and 0 in case.documents for case in cases)
    assert all(case.length[0] % np.prod(case.axes) for case in cases)
    assert set(AXES) == {len(case.axes) for case in cases}
