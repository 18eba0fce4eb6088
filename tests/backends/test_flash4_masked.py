"""Tests key ranges and functions on FlashAttention-4: what is refused, the kernels' arguments, and results on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attn_core import AttentionSpec, Target, masks, selection
from attn_core.backends import flash4
from attn_core.backends.flash4 import block_tables, functions, masked, own_kernels, replay
from attn_core.backends.flash4.versions import NEWER
from attn_core.backends.shared import first_calls
from attn_core.backends.support import Build, limit_to_build
from attn_core.call.masks import visible
from attn_core.call.tensors import Inputs
from tests.campaign.functions import MASKS, SCORES, fields_of

torch = pytest.importorskip("torch")
from direct_calls import judged, ran, tensors
from oracle_cases import fill

SIZES: dict[str, Any] = {
    **{"batch": 2, "q_len": 200, "kv_len": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64},
    **{"dtype": "bfloat16", "needs_backward": True, "return_lse": True},
}
RANGES = {"key_ranges_shape": (2, 2, 300, 2, 2)}


def spec_of(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{**SIZES, **changes})


def reasons(spec: AttentionSpec, device: str = "sm90") -> tuple[str, ...]:
    return selection.refusals("flash4", spec, Target("torch", device))


def test_refusals() -> None:
    function = fields_of("by row and head", None, (2, 4, 200, 300))
    score = fields_of(None, "slopes", (2, 4, 200, 300))
    name = "FlashAttention-4"
    for fields in (RANGES, function, score, {**RANGES, **score}, {**function, "causal": True, "window": (3, 2)}):
        assert reasons(spec_of(**fields)) == ()
    assert reasons(spec_of(**RANGES), "sm100") == (
        f"key_ranges, mask_mod, score_mod: {name} is claimed for them on sm90 alone",
    )
    packed = {"batch": 1, "q_len": 300, "documents": 2, "key_ranges_shape": (1, 1, 300, 1, 2)}
    assert reasons(spec_of(**packed)) == (
        f"key_ranges with packed documents: {name} has block tables for dense rows alone",
    )
    assert reasons(spec_of(**{**score, "batch": 1, "q_len": 300, "documents": 2})) == ()
    assert reasons(spec_of(**function, head_dim=160)) == (
        f"mask_mod with head_dim=160: {name} has block tables up to 128",
    )
    equal = spec_of(**RANGES, deterministic=True)
    assert reasons(equal) == (f"key_ranges with deterministic=True and gradients: {name} promises no equal bits there",)
    assert reasons(replace(equal, needs_backward=False)) == ()
    long = {"batch": 2**10, "kv_len": 2**17, "key_ranges_shape": (2**10, 2, 2**17, 2, 2)}
    assert reasons(spec_of(**long)) == (
        f"key_ranges of shape [1024, 2, 131072, 2, 2]: {name} takes fewer than 1073741824 numbers",
    )
    wide = spec_of(**score, head_dim=160)
    assert reasons(wide) == ()
    for size, fields in ((2**31 - 1, {}), (2**31, {}), (0, {"kv_len": 0})):  # beside keys a spec has no empty array
        spec = replace(wide, aux=(replace_shape(wide.aux[0], (size,)),), **fields)
        refused = (f"aux: {name} takes arrays of 1 to 2147483647 elements",)
        assert reasons(spec)[:1] == (() if size == 2**31 - 1 else refused)


def replace_shape(entry: Any, shape: tuple[int, ...]) -> Any:
    return entry._replace(shape=shape)


def test_old_versions_have_none() -> None:
    old = limit_to_build(flash4.FORWARD, Build("flash-attn-4 4.0.0b31", without=NEWER))
    assert old is not None
    assert [getattr(old, name) for name in NEWER] == [False] * 4 and old.softcap


def test_the_band_is_no_argument_of_a_call_with_block_tables() -> None:
    banded = flash4.lower(spec_of(causal=True, window=(5, 0)))["forward"]
    assert (banded["window_size_left"], banded["window_size_right"]) == (5, 0)
    whole = flash4.lower(spec_of(causal=True, window=(5, 0), **RANGES))["forward"]
    assert not whole["causal"] and whole["window_size_left"] is whole["window_size_right"] is None


def test_names_of_compiled_code() -> None:
    """Equal functions have equal names, and anything that changes the code changes the name."""
    one, other = (fields_of(mask, "slopes", (2, 4, 200, 300)) for mask in ("documents", "by row and head"))
    spans = functions.Spans(1, False, False, 2)
    of_masks = [
        functions.mask_function(tree, range_spans, functions.arrays_of(spec_of(**one)), inside)
        for tree in (one["mask_mod"], other["mask_mod"], None)
        for range_spans in (spans, spans._replace(ranges=2), spans._replace(by_head=True), spans._replace(group=4))
        for inside in ((), (3,))
    ]
    of_scores = [
        function
        for cap in (None, 3.0)
        for behind in (False, True)
        for packed in (False, True)
        for inside in (((), ()), ((2,), ()), ((2,), (1,)))
        for function in functions.score_functions(
            one["score_mod"], cap, behind, (("float32", "float", 1),), packed, inside
        )
    ]
    names = [function.__cute_hash__ for function in (*of_masks, *of_scores)]
    assert len(set(names)) == len(names)
    again = functions.mask_function(one["mask_mod"], spans, functions.arrays_of(spec_of(**one)))
    assert again.__cute_hash__ == names[0]


def test_aux_tensors() -> None:
    """A kernel reads no int64, no float64 and no bools, and all arrays are dense."""
    arrays = {
        "aux0": torch.tensor([2**32 + 5, -1]),
        "aux1": torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
        "aux2": torch.tensor([[True, False], [False, True]]).t(),
        "aux3": torch.ones(2, dtype=torch.bfloat16),
    }
    inputs = Inputs(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), **arrays)
    tensors = functions.aux_tensors(inputs)
    assert [tensor.tolist() for tensor in tensors] == [[5, -1], 0.5, [[1, 0], [0, 1]], [1.0, 1.0]]
    assert [str(tensor.dtype) for tensor in tensors] == [
        "torch.int32",
        "torch.float32",
        "torch.uint8",
        "torch.bfloat16",
    ]
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "axes"), [("documents", (1, 1)), ("by row and head", (2, 4)), ("keys of heads", (1, 4))]
)
def test_blocks_of_a_mask_function(name: str, axes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets a row for each batch row and head that the function reads, and each array once."""
    pytest.importorskip("cutlass")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(own_kernels, "launch", lambda kernel, arguments: calls.append(arguments))
    spec = spec_of(**fields_of(name, None, (2, 4, 200, 300)))
    arrays = [torch.zeros(entry.shape, dtype=torch.int32) for entry in spec.aux]
    states = block_tables.states(spec, arrays, torch.device("cpu"), own_kernels)
    ((first, *lengths, scalars),) = calls
    assert first is states and states.shape == (*axes, 2, 3) and states.dtype == torch.int8
    numbers = [scalar.value for scalar in scalars]
    assert lengths == [200, 300]
    assert numbers == [number for array in arrays for number in (array.data_ptr(), *array.shape)]


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 2), (2, 1), (2**31 - 1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_band_becomes_a_part_of_the_function(alignment: str, window: Any, causal: bool) -> None:
    """Where it does not move with the lengths, which would compile a kernel for each."""
    for q_len, kv_len in ((9, 9), (9, 12)):
        fields = fields_of("by row and head", None, (2, 4, q_len, kv_len))
        options = {"alignment": alignment, "window": window, "causal": causal}
        spec = spec_of(**fields, **options, q_len=q_len, kv_len=kv_len)
        arrays = [np.arange(np.prod(entry.shape)).reshape(entry.shape) % 3 for entry in spec.aux]
        found = masked.with_band_in_function(spec)
        np.testing.assert_array_equal(visible(found, aux=arrays), visible(spec, aux=arrays))
        stays = q_len != kv_len and alignment == "bottom_right"
        assert block_tables.has_spans(found) == (stays and block_tables.has_spans(spec))
        ranges = replace(spec, key_ranges_shape=(1, 1, kv_len, 1, 2))
        assert masked.with_band_in_function(ranges) == ranges


# On a GPU: against the float64 reference

LONG = {"q_len": 700, "kv_len": 700}
GALLERY = {
    "shared prefix": masks.shared_prefix(300, [200, 60, 140]),
    "prefix-LM": masks.prefix_lm(300, 700),
    "image blocks": masks.blocks([0, 130, 260, 300, 500], [False, True, False, True, False], 700),
    "block diffusion": masks.block_diffusion(350, 50),
    "global and window": masks.global_and_window(5, (160, 20), 700),
    "documents": masks.documents([256, 129, 1, 314]),
    "nothing": np.zeros((1, 1, 700, 1, 2), np.int32),
}
CASES: dict[str, dict[str, Any]] = {
    "two ranges by head": RANGES,
    "one range, causal, softcap": {"key_ranges_shape": (1, 1, 300, 1, 2), "causal": True, "softcap": 5.0},
    "two ranges by row, window": {"key_ranges_shape": (2, 1, 300, 2, 2), "window": (90, 30), "sinks": True},
    "other lengths": {"key_ranges_shape": (2, 1, 129, 1, 2), "q_len": 257, "kv_len": 129, "head_dim": 128},
    "narrow heads": {"key_ranges_shape": (1, 1, 300, 1, 2), "head_dim": 40, "value_dim": 24, "causal": True},
    "one kv head, float16": {"key_ranges_shape": (2, 1, 300, 2, 2), "num_kv_heads": 1, "dtype": "float16"},
    "a group of 3": {"key_ranges_shape": (1, 1, 300, 1, 2), "num_heads": 6, "head_dim": 96, "value_dim": 96},
    "one query": {"key_ranges_shape": (2, 2, 300, 1, 2), "q_len": 1},
    **{f"mask: {name}": fields_of(name, None, (2, 4, 200, 300)) for name in MASKS},
    **{f"score: {name}": {**fields_of(None, name, (2, 4, 200, 300)), "causal": True} for name in SCORES},
    "mask function, ranges, causal": {**fields_of("documents", None, (2, 4, 200, 300)), **RANGES, "causal": True},
    "all": {**fields_of("keys of heads", "slopes", (2, 4, 200, 300)), **RANGES, "softcap": 2.0, "sinks": True},
    "score, softcap, wide": {**fields_of(None, "per row", (2, 4, 200, 300)), "softcap": 3.0, "head_dim": 128},
    "score, window": {**fields_of(None, "bent", (2, 4, 200, 300)), "window": (70, 20), "head_dim": 192},
    "score, packed": {
        **{"batch": 1, "q_len": 300, "documents": 6, "causal": True},
        **fields_of(None, "per row", (1, 4, 300, 300)),
    },
    **{
        f"gallery: {name}": {**LONG, "key_ranges_shape": array.shape, "head_dim": dim, "value_dim": dim}
        for (name, array), dim in zip(GALLERY.items(), (64, 128, 64, 128, 64, 64, 64))
    },
}
ALIKE = {
    *(f"gallery: {name}" for name in ("block diffusion", "shared prefix", "image blocks", "global and window")),
    *("gallery: documents", "gallery: prefix-LM", "mask: documents", "mask: nothing", "a group of 3"),
}
"""Cases whose kernels and kinds of tables other cases have. A GPU's suite leaves them out, because each compiles."""
PACKED_LENGTHS = (120, 0, 9, 130, 1, 40)


def on_gpu(name: str, seed: int = 3, **changes: Any) -> tuple[AttentionSpec, Inputs, Any]:
    """The spec, the tensors and the arrays of a case. Skips the test if flash-attn-4 is not installed."""
    target = Target.here("torch", "sm90")
    spec = spec_of(**{**CASES[name], **changes})
    refused = selection.refusals("flash4", spec, target)
    if refused:
        pytest.skip("; ".join(refused))
    lengths = PACKED_LENGTHS if spec.packed else None
    case = fill(spec, seed, lengths, lengths)
    if name.startswith("gallery: "):
        ranges = GALLERY[name.removeprefix("gallery: ")]
        case = case._replace(inputs=case.inputs._replace(key_ranges=ranges))
    return spec, tensors(case.inputs, spec.dtype, "cuda"), case


def judged_here(name: str, **changes: Any) -> Any:
    """The verdict on forward and gradients, which run three times: later calls are replayed."""
    _, inputs, case = on_gpu(name, **changes)
    for _ in range(3):
        results = ran(flash4, case, inputs)
    return judged(case, results)


@pytest.mark.cuda
@pytest.mark.on_gpus(only=lambda name: name not in ALIKE)
@pytest.mark.parametrize("name", CASES)
def test_results_on_a_gpu(name: str) -> None:
    verdict = judged_here(name)
    assert verdict.ok, verdict


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name", ["two ranges by head", "mask: documents", "score: slopes", "all", "gallery: prefix-LM"]
)
def test_replayed_launches_give_the_bits_of_the_entry_points(name: str) -> None:
    spec, inputs, _ = on_gpu(name, needs_backward=False, sinks=False)
    replay._seen.clear()
    replay._recorded.clear()
    results = [flash4.forward(spec, inputs) for _ in range(4)]  # entry points, recorded, replayed, replayed
    assert list(replay._recorded) == [(spec, "forward", 0)] and all(replay._recorded.values())
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    others = on_gpu(name, needs_backward=False, sinks=False, seed=5)[1]
    again = flash4.forward(spec, others)
    replay._recorded.clear()
    assert all(map(torch.equal, again, flash4.forward(spec, others)))


@pytest.mark.cuda
def test_a_graph_replays_the_same_bits_after_warm_up() -> None:
    spec, inputs, _ = on_gpu("mask function, ranges, causal", needs_backward=False)
    first_calls.warm_up(flash4.BACKEND, spec)
    expected, _ = flash4.forward(spec, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flash4.forward(spec, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.cuda
def test_memory_is_that_of_the_tokens() -> None:
    """At 64K tokens a table of queries and keys would be 4 GiB."""
    tokens = 2**16
    key_ranges = torch.from_numpy(masks.shared_prefix(2**14, [2**12] * 12)).cuda()
    spec = spec_of(
        **{"batch": 1, "q_len": tokens, "kv_len": tokens, "num_heads": 2, "num_kv_heads": 1},
        key_ranges_shape=tuple(key_ranges.shape),
    )
    q, k, v = (torch.zeros(1, tokens, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (2, 1, 1))
    inputs = Inputs(q, k, v, key_ranges=key_ranges)
    flash4.forward(spec, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flash4.forward(spec, inputs)
    flash4.backward(spec, inputs, out, lse, torch.ones_like(out), None)
    assert torch.cuda.max_memory_allocated() - before < 16 * (q.nbytes + k.nbytes + v.nbytes)


@pytest.mark.cuda
@pytest.mark.parametrize("fault", ["stop one too early", "another key's ranges", "a forgotten batch index"])
def test_planted_faults_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = masked.block_tables.table

    def wrong(spec: AttentionSpec, inputs: Inputs, *others: Any) -> Any:
        key_ranges = inputs.key_ranges
        if fault == "stop one too early":
            key_ranges = key_ranges - torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        elif fault == "another key's ranges":
            key_ranges = key_ranges.roll(1, 2)
        else:
            key_ranges = key_ranges[:1].expand_as(key_ranges)
        return original(spec, inputs._replace(key_ranges=key_ranges), *others)

    monkeypatch.setattr(masked.block_tables, "table", wrong)
    assert not judged_here("two ranges by row, window", sinks=False).ok
