"""Tests context parallelism on gloo ranks: number of messages, DTensors, layers, refusals, and lost ranks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

import context_torch_scenes as scenes
from context_torch_worker import Case, World, in_ranks, values
from test_context_torch import CAUSAL, FEW_KEYS, NAMES, expected, layout_of, spec_of, whole_rows

from attn_core.call.masks import band
from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.bands import VisibleBand
from attn_core.context_parallel.layout import build_layout
from attn_core.context_parallel.plan import ContextPlan, build_plan
from torch_frontend import attention

pytestmark = pytest.mark.sampled

TIMEOUT = 10.0
LENGTH = scenes.LENGTH
SQUARE = {"dims": (5, 5)}  # k and v of one width, which may share a message
COUNTED = [
    Case((4,), "ring", "zigzag", (LENGTH, LENGTH), (4, 2), None, (CAUSAL,), **SQUARE),
    Case((4,), "ring", "contiguous", (40, 40), (4, 2), None, (CAUSAL, ("window", 3)), **SQUARE),
    Case((4,), "all_gather", "zigzag", (LENGTH, LENGTH), (4, 2), None, (CAUSAL,), **SQUARE),
    Case((4,), "all_gather", "zigzag", (LENGTH, LENGTH), FEW_KEYS, None, (CAUSAL,), **SQUARE),
    Case((4,), "ulysses", "contiguous", (LENGTH, LENGTH), (4, 4), None, (CAUSAL,), **SQUARE),
    Case((4,), "ulysses", "contiguous", (LENGTH, LENGTH), (8, 8), None, (CAUSAL,), head_groups=2, **SQUARE),
    Case((2, 2), "ring", "zigzag", (LENGTH, LENGTH), (4, 2), None, (CAUSAL,), **SQUARE),
]
ROUNDED = [
    Case(
        *((2,), strategy, "zigzag", (67, 67), (4, 2), None, (CAUSAL, ("backend", backend))),
        **{"dims": (16, 16), "dtype": "bfloat16", "lse_gradient": backend == "math"},
    )
    for backend in ("sdpa_flash", "math")
    for strategy in ("ring", "all_gather", "ulysses")
]
ROUNDED.append(ROUNDED[1]._replace(heads=FEW_KEYS))
SUMMED = [
    ROUNDED[0]._replace(axes=(4,), strategy=strategy, layout=kind)
    for strategy in ("ring", "all_gather")
    for kind in ("zigzag", "striped")
]
"""More than two results for each query and key."""
SCENES = "context_torch_scenes"


PACKED = (3, 0, 11, 1, 8)
LAYERS = {
    "layers kept": (None, False),
    "layers recomputed": (None, True),
    "layers kept, packed": (PACKED, False),
    "layers recomputed, packed": (PACKED, True),
    "layers dealt": (PACKED, False, "documents"),
    "layers of a window": (None, False, "window:7"),
}
LOST = ("dies", "does not come")


def diffusers_job(*degrees: tuple[int, int]) -> dict[str, Any]:
    """A job on diffusers, if it is installed."""
    return {} if find_spec("diffusers") is None else {"diffusers": (SCENES, "diffusers_calls", (degrees,))}


WORLDS = [
    World(
        "two",
        2,
        {
            "refusals": (SCENES, "refusals", ()),
            "trips": (SCENES, "round_trips", ((2,),)),
            "explained": (SCENES, "explained", ()),
            "scopes": (SCENES, "scopes", ()),
            "compiled layer": (SCENES, "compiled_layer", ()),
            "finetrainers": (SCENES, "finetrainers_rows", ()),
            **diffusers_job((2, 1), (1, 2)),
            **{name: (SCENES, "layers", given) for name, given in LAYERS.items()},
            **{case.name: ("context_torch_worker", "run", (case,)) for case in ROUNDED},
        },
    ),
    World(
        "three",
        3,
        {"trips": (SCENES, "round_trips", ((3,),)), "disagreeing": (SCENES, "disagreeing", ((3,),))},
    ),
    World(
        "four",
        4,
        {
            "trips": (SCENES, "round_trips", ((2, 2),)),
            "disagreeing": (SCENES, "disagreeing", ((2, 2),)),
            "two axes": (SCENES, "dtensors_on_two_axes", ()),
            **diffusers_job((2, 2)),
            **{f"dtensors {way}": (SCENES, "dtensors", (way, LENGTH)) for way in ("ring", "all_gather", "ulysses")},
            **{case.name: (SCENES, "counted", (case,)) for case in COUNTED},
            **{case.name: ("context_torch_worker", "run", (case,)) for case in SUMMED},
        },
    ),
    *(World(how, 3, {how: (SCENES, "without_one", (how,))}, TIMEOUT) for how in LOST),
]


def results_of(*jobs: tuple[str, str]) -> Any:
    """Runs a test for each (world, job) with ``found``, what every rank returned."""
    return pytest.mark.parametrize("found", jobs, indirect=True, ids=map(" ".join, jobs))


def results_of_cases(world: str, cases: list[Case]) -> Any:
    """Runs a test for each case with ``found``."""
    each = [(case, (world, case.name)) for case in cases]
    return pytest.mark.parametrize(("case", "found"), each, indirect=["found"], ids=[case.name for case in cases])


# The number of messages


def plan_of(case: Case) -> ContextPlan:
    outer, inner = (
        case.axes if len(case.axes) == 2 else (1, *case.axes) if case.strategy == "ulysses" else (*case.axes, 1)
    )
    edge = band(spec_of(case))
    return build_plan(
        case.strategy, case.layout, outer, inner, *case.length, VisibleBand(edge.left, edge.right, edge.offset, None)
    )


def expected_messages(case: Case) -> dict[str, int]:
    """For a forward and a backward with gradients of out and lse, by the plan."""
    made, groups = plan_of(case), case.head_groups or 1
    actual = {"all_to_all_single": 0, "all_gather_into_tensor_coalesced": 0}
    if made.inner > 1:  # q, k and v; out and lse, here of one dtype; then dout, dlse; then dq, dk and dv
        actual["all_to_all_single"] += groups * (1 + 1 + 2 + 1)
    if made.outer > 1 and made.strategy == "ring":
        shifts = [step.shift for step in made.steps]
        assert shifts[0] == 0
        # keys twice, from step to step, and those of a border once; their gradients start at the second step and return
        hops = len(shifts) - 1
        once = any(step.border for step in made.steps)
        actual["all_to_all_single"] += groups * ((1 if once else 2) * hops + hops)
    elif made.outer > 1:
        once = case.heads == FEW_KEYS  # kept for the backward
        actual["all_gather_into_tensor_coalesced"] = (1 if once else 2) * groups  # k and v
        actual["all_to_all_single"] += groups  # their gradients
    return {kind: number for kind, number in actual.items() if number}


@results_of_cases("four", COUNTED)
def test_ranks_send_as_many_messages_as_the_plan_has(found: Any, case: Case) -> None:
    assert found == [expected_messages(case)] * 4


def test_a_window_drops_hops() -> None:
    assert len(plan_of(COUNTED[1]).steps) == 2 < len(plan_of(COUNTED[0]).steps) == 4


# Precision


def assert_as_near_as_alone(case: Case, actual: list[Any]) -> None:
    """Checks for a mean error of at most 1.5 times, and a largest error of at most 3 times, that of the kernel on
    whole rows."""
    whole, right = values(case), expected(case)
    kind, device = torch.bfloat16, case.device
    q, k, v = (torch.from_numpy(each).to(device, kind).requires_grad_() for each in whole[:3])
    with torch.set_grad_enabled(case.lse_gradient):
        out, lse = attention(q, k, v, **dict(case.options), return_lse=True)
    results, cotangents = [out, lse], [torch.from_numpy(whole.dout).to(device, kind)]
    if case.lse_gradient:
        cotangents.append(torch.from_numpy(whole.dlse).to(device, lse.dtype))
    else:
        results = [attention(q, k, v, **dict(case.options))]
    alone = [out, lse, *torch.autograd.grad(results, [q, k, v], cotangents)]
    rows = whole_rows(case, actual)
    for name, one in zip(NAMES, alone):
        before, now = (np.abs(each - right[name]) for each in (one.detach().cpu().double().numpy(), rows[name]))
        assert now.mean() <= 1.5 * before.mean() + 1e-5, name
        assert now.max() <= 3 * before.max() + 1e-5, name


@results_of_cases("two", ROUNDED)
def test_bfloat16_is_as_precise_as_on_one_device(found: Any, case: Case) -> None:
    assert_as_near_as_alone(case, found)


@results_of_cases("four", SUMMED)
def test_sums_of_many_bfloat16_parts_are_as_precise(found: Any, case: Case) -> None:
    assert_as_near_as_alone(case, found)


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_bfloat16_on_two_gpus(tmp_path: Any) -> None:
    """Over NCCL, on the kernels of automatic choice, with a row that the ranks do not divide."""
    base = ROUNDED[0]._replace(device="cuda", options=(CAUSAL,), length=(517, 517), heads=(8, 2), dims=(64, 64))
    cases = [
        one._replace(strategy=strategy, layout=kind)
        for one in (base, base._replace(options=(CAUSAL, ("window", 100))))
        for strategy in ("ring", "all_gather", "ulysses")
        for kind in ("zigzag", "striped")
    ]
    jobs = {case.name: ("context_torch_worker", "run", (case,)) for case in cases}
    (actual,) = in_ranks([World("gpus", 2, jobs, 120.0, "cuda")], tmp_path, 500).values()
    for case in cases:
        assert_as_near_as_alone(case, [rank.get(case.name) for rank in actual])


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_a_captured_forward_has_the_bits_of_an_eager_one(tmp_path: Any) -> None:
    base = ROUNDED[0]._replace(device="cuda", options=(CAUSAL,), length=(1030, 1030), heads=(8, 2), dims=(64, 64))
    window = (CAUSAL, ("window", 100))
    cases = [base._replace(strategy=strategy) for strategy in ("ring", "all_gather", "ulysses")]
    cases += [base._replace(strategy="ring", layout=kind, options=window) for kind in ("contiguous", "window:100")]
    jobs = {case.name: ("context_torch_worker", "captured", (case,)) for case in cases}
    (actual,) = in_ranks([World("gpus", 2, jobs, 120.0, "cuda")], tmp_path, 300).values()
    assert [[rank.get(case.name) for rank in actual] for case in cases] == [[True, True]] * len(cases)


# DTensor


def dense(length: int = LENGTH) -> dict[str, np.ndarray]:
    """out, dq, dk and dv of the scenes' whole rows."""
    q, k, v, dout = scenes.row(length=length)
    out = attention(*(each.requires_grad_() for each in (q, k, v)), causal=True)
    actual = [out, *torch.autograd.grad(out, [q, k, v], dout)]
    return {name: each.detach().numpy() for name, each in zip(("out", "dq", "dk", "dv"), actual)}


@results_of(*(("four", f"dtensors {way}") for way in ("ring", "all_gather", "ulysses")))
def test_dtensors_in_give_dtensors_out(found: Any) -> None:
    right = dense()
    for actual in found:
        assert actual["alike"] and actual["same shape"]
        for name, array in right.items():
            np.testing.assert_allclose(actual[name], array, rtol=0, atol=1e-9, err_msg=name)
        refusals = actual["refusals"]
        assert "q: expected Shard(1), the positions, over mesh axis 'cp', got R" in refusals["replicated"]
        assert "q: expected positions that are not split, over mesh axis 'dp', got S" in refusals["other axis"]
        assert "q: expected whole numbers over mesh axis 'dp', got P" in refusals["partial"]
        assert "k: expected a DTensor, as the others of q, k and v are" in refusals["mixed"]


@results_of(("four", "two axes"))
def test_dtensors_over_two_axes_without_names(found: Any) -> None:
    for actual in found:
        np.testing.assert_allclose(actual["out"], dense()["out"], rtol=0, atol=1e-9)


# Shards


@results_of(*((world, "trips") for world in ("two", "three", "four")))
def test_unsharding_restores_every_row(found: Any) -> None:
    assert all(wrong == [] for wrong in found)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_zigzag_equals_torchs_head_tail_balancing(world: int) -> None:
    balancing = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    balancer = balancing._HeadTailLoadBalancer(12 * world, world, "cpu")
    theirs = balancer._generate_indices(restore=False).numpy().ravel()
    made = build_layout("zigzag", 12 * world, world)
    np.testing.assert_array_equal(index_arrays.positions_by_shard(made).ravel(), theirs)
    theirs = balancer._generate_indices(restore=True).numpy().ravel()
    np.testing.assert_array_equal(index_arrays.places_by_position(made), theirs)
    assert layout_of(COUNTED[0], 8).shard == 2


# Ranks that call differently, and ranks that die


@results_of(("three", "disagreeing"), ("four", "disagreeing"))
def test_every_rank_raises_if_ranks_call_differently(found: Any) -> None:
    size, shard = len(found), {3: 8, 4: 6}[len(found)]
    for actual in found:
        for text in actual["same"].values():
            assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank")
        for rank in range(size):
            assert f"rank {rank}: q [2, {shard}, 4, {3 if rank == 1 else 5}]" in actual["same"]["shapes"]
            assert f"documents {(0, 11, 12, 23) if rank == 1 else (0, 11, 22, 23)}" in actual["same"]["documents"]
            assert f"rank {rank}: " in actual["same"]["window"] and f"rank {rank}: " in actual["same"]["ranges"]
        for name, text in actual["alone"].items():  # only rank 1 refuses its call, and the others do not wait for it
            argument = {"dtype": "k", "device": "k", "seq_info": "length"}.get(name, name)
            lines = text.split("\n")
            assert lines[0] == "SpecError: context_parallel_attention: expected the same call on every rank, got", text
            refusing = [line for line in lines[1:] if re.match(rf"  rank \d: \w*Error: {argument}\b", line)]
            assert refusing == [lines[2]] and lines[2].startswith("  rank 1: "), text
        assert actual["fine"]


@results_of(*((how, how) for how in LOST))
def test_a_lost_rank_is_an_error(found: Any) -> None:
    for text, seconds in found[:2]:
        assert text and not text.startswith(("AttributeError", "TypeError", "NameError")), text
        assert seconds < TIMEOUT + 8, "within the timeout of the process group, and what a busy machine adds"


# What is refused

CHOOSES = "explain_context_parallel(..., layout=None) chooses one for whole rows"
WITHOUT = "SpecError: layout='documents': expected seq_info with the row's packed documents, got None"
FEW_TOKENS = "ShapeError: seq_info: expected at least 2 tokens, one for each rank of layout='documents', got 1"
SAYS = {
    "dropout": "SpecError: dropout=0.1: expected 0 in context parallelism",
    "mask": "SpecError: mask: expected None in context parallelism",
    "bias": "SpecError: bias: expected None in context parallelism",
    "alibi_slopes": "SpecError: alibi_slopes: expected None in context parallelism",
    "device offsets": "SpecError: seq_info.cu_seqlens_q: expected offsets on the host",
    "documents that differ": "SpecError: seq_info: expected the same documents for queries and keys",
    "length of documents": "SpecError: length=24: expected the 23 positions of seq_info's documents",
    "documents in a batch": "ShapeError: q: ",
    "shard": "ShapeError: q: expected shards of 13 positions, 25 over 2 ranks in a zigzag layout, got 12",
    "shard of keys": "ShapeError: k: expected shards of 12 positions",
    "length": "SpecError: length=2.5: expected the positions of the whole row",
    "three axes": "ShapeError: mesh: expected one axis of ranks or two (outer, inner), got 3",
    "no mesh": "TypeError: mesh: expected a torch DeviceMesh",
    "heads": "heads that 2 ranks can share, got 3 heads over 1 kv heads",
    "kv heads": "ShapeError: k: expected kv heads that divide the 3 query heads, got 2",
    "head_groups": "SpecError: head_groups=3: expected a divisor of the 2 kv heads",
    "head_groups of no number": "SpecError: head_groups=2.0: expected the number of groups",
    "no head_groups": "SpecError: head_groups=0: expected the number of groups",
    "strategy": "SpecError: strategy='rings': expected one of",
    "strategy of no name": "SpecError: strategy='': expected a strategy's name, or None",
    "ulysses outside": "SpecError: strategy='ulysses': expected",
    "layout": "SpecError: layout='zebra': expected one of",
    "layout without documents": WITHOUT,
    "layout of few tokens": FEW_TOKENS,
    "layout of key_ranges": "SpecError: layout='documents': expected another layout beside key_ranges, such as",
    "layout of key_ranges and documents": "SpecError: key_ranges: expected None beside seq_info",
    "shard of documents": "ShapeError: q: expected shards of 12 positions, 23 over 2 ranks in a documents layout",
    "shards without documents": WITHOUT,
    "rows without documents": WITHOUT,
    "shards of few tokens": FEW_TOKENS,
    "backend": "SpecError: backend='flash9'",
    "a backend that cannot": "NoBackendError: ",
    "window": "SpecError: window=3: ",
    "dtype": "DTypeError: k: expected the dtype of q",
    "rank of tensors": "ShapeError: q: expected [batch, shard, heads, dim], or [shard, heads, dim] with seq_info",
    "sinks": "ShapeError: sinks: expected",
    "sinks elsewhere": "DeviceError: sinks: expected the device of q (cpu), got meta",
    "explained dtype": "DTypeError: k: expected the dtype of q",
    "explained rank": "ShapeError: q: expected [batch, shard, heads, dim], or [shard, heads, dim] with seq_info",
    "explained dropout": "SpecError: dropout=0.1: expected 0 in context parallelism",
    "explained mask": "SpecError: mask: expected None in context parallelism",
    "explained bias": "SpecError: bias: expected None in context parallelism",
    "explained alibi_slopes": "SpecError: alibi_slopes: expected None in context parallelism",
    "explained length": "SpecError: length=[23, 2.5]: expected the positions of the whole row",
    "axis": "ShapeError: dim=7: expected one of the 4 axes of x",
    "axis of shards": "ShapeError: dim=7: expected one of the 4 axes of x",
    "length of shards": "SpecError: length=None: expected the positions of the whole row",
    "lengths of documents": "ShapeError: seq_info: expected offsets that rise from 0 to the row's 24 positions",
    "lengths without documents": WITHOUT,
    "lengths of no mesh": "TypeError: mesh: expected a torch DeviceMesh",
    "lengths of no layout": "SpecError: layout='zebra': expected one of",
    "lengths of a long row": "SpecError: length=9223372036854775808: expected the positions of the whole row",
    "other documents": "ShapeError: seq_info: expected offsets that rise from 0 to the row's 23 positions, got (0, 5)",
    "context length": "SpecError: length=True: expected the positions of the whole row",
    "context layout": "SpecError: layout='zebra': expected one of",
    "context mesh": "ShapeError: mesh: expected one axis of ranks or two (outer, inner), got 3",
    "context documents": "SpecError: length=24: expected the 23 positions of seq_info's documents",
}


@results_of(("two", "refusals"))
@pytest.mark.parametrize("name", SAYS)
def test_refusals_name_the_argument_on_every_rank(found: Any, name: str) -> None:
    for actual in found:
        assert actual.keys() == SAYS.keys()
        assert SAYS[name] in actual[name]


@results_of(("two", "explained"))
def test_explain_takes_the_arguments_of_the_call(found: Any) -> None:
    """The lengths may be a list or a tuple, and needs_backward= overrides requires_grad."""
    for actual in found:
        assert actual["same parameters"] and actual["list of lengths"]
        assert actual["needs backward"] == [False, True, True, False]


@results_of(("two", "explained"))
def test_explain_chooses_the_layout_of_whole_rows(found: Any) -> None:
    for actual in found:
        assert actual["layouts"] == ["contiguous", "documents", "zigzag"] and actual["same call"]
        unknown, short = actual["refused"]
        assert f"SpecError: layout=None: expected the layout that shard_sequence cut; {CHOOSES}" in unknown
        assert short.startswith("ShapeError: q, k, v: expected rows of (320, 320) positions with layout=None, got")


# Layers


@results_of(*(("two", name) for name in LAYERS))
def test_layers_on_shards_equal_layers_on_whole_rows(found: Any) -> None:
    """In other layouts than the default, one of the two layers has the window, the other none."""
    for errors in found:
        assert "0.sink_logits" in errors and "1.q_proj.weight" in errors
        assert max(errors.values()) < 1e-9, errors


@results_of(("two", "scopes"))
def test_which_calls_a_block_covers(found: Any) -> None:
    for actual in found:
        assert (actual["inner"], actual["outer"], actual["after"], actual["thread"]) == (
            "zigzag",
            "striped",
            None,
            [None],
        )
        assert actual["mask"].startswith("SpecError: mask: expected None in context parallelism")
        assert actual["pages"].startswith("SpecError: pages: expected None in context parallelism")
        assert actual["documents"].startswith("SpecError: seq_info: expected it once")


@results_of(("two", "compiled layer"))
def test_a_compiled_layer_inside_a_block_is_not_replaced_by_an_old_graph(found: Any) -> None:
    """It runs in parts. A graph that must be whole is refused, and a graph from before the block is not used."""
    for says, error in found:
        assert says.startswith("Unsupported") and error < 1e-9


# Drop-ins


@results_of(("two", "finetrainers"))
def test_a_mesh_of_finetrainers_provider_shares_rows(found: Any) -> None:
    for results in found:
        assert results["allgather"] < 1e-9 and results["alltoall"] < 1e-9, results
        assert results["compiled"][0] < 1e-9 < 0.01 < results["compiled"][1], results["compiled"]
        for name, error in {
            "attn_mask": "SpecError: attn_mask: expected None with a mesh",
            "is_causal": "SpecError: is_causal=True: expected False with a mesh",
            "dropout": "SpecError: dropout=0.5: expected 0 in context parallelism",
            "alibi_slopes": "SpecError: alibi_slopes: expected None in context parallelism",
        }.items():
            assert results[name].startswith(error), results[name]


@pytest.mark.skipif(find_spec("diffusers") is None, reason="no diffusers")
@results_of(("two", "diffusers"), ("four", "diffusers"))
def test_diffusers_context_parallelism_runs_on_ours(found: Any) -> None:
    for (ring, _), each in (item for results in found for item in results.items()):
        assert each["worst"] < 1e-9 and "GQA is not yet supported" in each["before"], each
        if ring == 1:  # diffusers' own exchange, with the mask; and no merge of results
            assert each["masked"] == each["rounded"] == ""
            continue
        assert each["masked"].startswith("SpecError: attn_mask: expected None with ring_degree > 1")
        assert each["rounded"].startswith("SpecError: convert_to_fp32=False: expected True")
