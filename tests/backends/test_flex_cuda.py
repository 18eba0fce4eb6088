"""Tests FlexAttention on CUDA without a GPU: its mask functions and block tables against the definition of visible,
its arithmetic through torch's compiler with uncompiled kernels, one program per signature, and refusals."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from direct_calls import LargestOutput, assert_right, judged, ran, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import FEATURES, Case, fill, make
from spec_strategies import LEARNED, LEARNED_SIZES, learned_call, make_call

from attn_core import AttentionSpec, Target, explain
from attn_core.backends.flex import (
    blocks,
    functions,
    learned,
    operands,
)
from attn_core.backends.flex import (
    cuda as flex_cuda,
)
from attn_core.backends.flex import program as programs
from attn_core.backends.shared import first_calls
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call.functions import aux_of, scored
from attn_core.call.masks import visible
from attn_core.call.tensors import Inputs
from attn_core.expressions import trace_score
from attn_core.expressions.on_torch import torch_function
from attn_core.expressions.tracing import Aux
from tests.campaign.functions import MASKS, fields_of
from torch_frontend import attention

pytestmark = pytest.mark.sampled

SPEC = AttentionSpec(
    batch=2, q_len=256, kv_len=384, num_heads=6, num_kv_heads=2, head_dim=80, value_dim=40, dtype="bfloat16"
)
CASES = [name for name, fields in FEATURES.items() if not fields.get("dropout")]
COMPILED = (
    "plain",
    "causal with empty rows",
    "packed, key ranges, sinks",
    "packed, causal",
    "packed, bias, mask, sinks",
    "both functions",
    "packed, functions",
    "whole",
)
WHOLE = {**FEATURES["everything"], "dropout": 0.0, "bias_gradient": False}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the kernels, on the CPU")


def case_of(name: str, **changes: Any) -> tuple[Case, Inputs]:
    fields = WHOLE if name == "whole" else {**FEATURES[name], "bias_gradient": False}
    case = make({**fields, **changes}, "float32")
    return case, tensors(case.inputs, "float32")


# The spec as arguments


def test_lower() -> None:
    assert flex_cuda.lower(replace(SPEC, causal=True, softcap=50.0, sinks=True)) == {
        "scale": 80**-0.5,
        "enable_gqa": True,
        "widths": (128, 64),
        "score": ("softcap",),
        "mask": ("band",),
        "kernel_options": {"BACKEND": "TRITON", "IS_DIVISIBLE": True},
    }
    packed = replace(SPEC, batch=1, documents=3, mask_shape=(1, 6, 256, 1), alibi_shape=(6,), bias_shape=(1, 1, 1, 384))
    assert flex_cuda.lower(packed)["score"] == ("bias", "alibi")
    assert flex_cuda.lower(packed)["mask"] == ("documents", "mask")
    decode = replace(SPEC, q_len=1, causal=True, dtype="float32", num_kv_heads=6, head_dim=5, value_dim=193, scale=0.5)
    assert flex_cuda.lower(decode) == {
        "scale": 0.5,
        "enable_gqa": False,
        "widths": (256, 256),  # the block sizes follow q's dim, and v must fit as well
        "score": (),
        "mask": (),  # one query at the end sees every key
        "kernel_options": {"BACKEND": "AUTO", "IS_DIVISIBLE": False, "FLOAT32_PRECISION": "'ieee'"},
    }
    assert flex_cuda.lower(replace(decode, num_heads=128, num_kv_heads=1))["kernel_options"]["BACKEND"] == "TRITON"


def test_refusals() -> None:
    def reasons(spec: AttentionSpec, device: str = "sm90") -> tuple[str, ...]:
        return (*unmet_claims(flex_cuda.BACKWARD, spec, device), *flex_cuda.refuses(spec, device, None))

    learning = replace(SPEC, needs_backward=True, return_lse=True, sinks=True, softcap=2.0, alibi_shape=(6,))
    assert (
        reasons(learning) == reasons(replace(learning, batch=1, documents=2, window=(3, 1), deterministic=True)) == ()
    )
    assert reasons(replace(SPEC, dtype="float64", head_dim=257, dropout=0.1)) == (
        "head_dim=257: FlexAttention on CUDA stops at 256",
        "dtype float64: FlexAttention on CUDA takes float32, bfloat16, float16",
        "dropout=0.1: FlexAttention on CUDA has none",
    )
    assert reasons(replace(SPEC, bias_shape=(1, 1, 256, 384), bias_gradient=True)) == (
        "gradient of the bias: FlexAttention on CUDA has none",
    )
    assert reasons(SPEC, "sm75") == ("device sm75: FlexAttention on CUDA needs sm80",)
    assert explain(SPEC, Target("torch", "sm90"), "flex").backend == "flex"


def test_only_plain_calls_with_gradients_have_a_shortcut() -> None:
    learning = replace(SPEC, needs_backward=True, causal=True, softcap=2.0)
    assert flex_cuda.shortcut(learning) is not None
    packed = replace(learning, batch=1, documents=2)
    others = (replace(learning, needs_backward=False), replace(learning, sinks=True), packed)
    assert [flex_cuda.shortcut(spec) for spec in others] == [None] * 3


# Score and mask functions, evaluated by torch as FlexAttention traces them


def functions_of(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """(score function, mask function) as the compiled program creates them."""
    made = functions.edges(spec)
    where = None
    if spec.packed:
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, spec.q_len, spec.kv_len)
        where = functions.places(*lengths, spec.alignment == "bottom_right")
    distance = functions.distance_function(made.offset, where)
    bias = functions.reader(inputs.bias, torch.float64)
    slope = functions.slope_reader(inputs.alibi_slopes, torch.float64)
    mask = functions.reader(inputs.mask)
    in_ranges = functions.range_reader(operands._range_ends(inputs.key_ranges), spec.group_size)
    aux = aux_of(inputs)
    masked, changing = (
        None if tree is None else torch_function(tree).function for tree in (spec.mask_mod, spec.score_mod)
    )
    shown = masked and (lambda *place: masked(None, *place, aux))
    changed = changing and (lambda score, *place: changing(score, *place, aux))
    return (
        functions.score_function(spec.softcap, bias, slope, distance, changed),
        functions.mask_function(mask, made.left, made.right, distance, where, (in_ranges, shown)),
    )


@pytest.mark.parametrize("name", CASES)
def test_mask_functions_match_the_visible_set(name: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    spec, inputs, *_ = make(FEATURES[name])
    _, mask = functions_of(spec, tensors(inputs, "float64"))
    got = create_mask(mask, spec.batch, spec.num_heads, spec.q_len, spec.kv_len, "cpu").numpy()
    given = inputs.mask, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.key_ranges
    expected = visible(spec, *given, aux_of(inputs))
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


@pytest.mark.parametrize(
    "name", ["softcap", "bias", "bias by head", "bias by batch", "alibi", "alibi by batch", "whole", "score function"]
)
def test_score_functions_match_the_reference(name: str) -> None:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    spec, inputs, *_ = make(WHOLE if name == "whole" else FEATURES[name])
    score, _ = functions_of(spec, tensors(inputs, "float64"))
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        score = torch.vmap(score, dims)
    shape = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    plain = np.random.default_rng(0).normal(size=shape)
    with TransformGetItemToIndex():
        got = score(torch.from_numpy(plain), *map(torch.arange, shape)).numpy()
    expected = plain if spec.softcap is None else spec.softcap * np.tanh(plain / spec.softcap)
    if spec.score_mod is not None:
        expected = scored(spec, expected, aux_of(inputs))[0]
    expected = expected + (0 if inputs.bias is None else inputs.bias)
    if inputs.alibi_slopes is not None:
        offset = spec.kv_len - spec.q_len if spec.alignment == "bottom_right" else 0
        away = np.arange(spec.kv_len) - (np.arange(spec.q_len)[:, None] + offset)
        expected = expected - np.broadcast_to(inputs.alibi_slopes, shape[:2])[..., None, None] * abs(away)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_tokens_outside_every_document_see_nothing() -> None:
    offsets = torch.tensor([0, 5, 5, 9]).int()
    where = functions.places(offsets, offsets, 12, 12, True)
    together = where.of_query[:, None] == where.of_key[None]
    assert together.sum() == 5 * 5 + 4 * 4
    assert not together[9:].any() and not together[:, 9:].any()
    assert where.of_query.dtype == where.at_key.dtype == torch.int32


# Block tables


@st.composite
def calls(draw: Any) -> Case:
    """Any band over a few blocks of 8, dense or packed, with or without a mask and key ranges."""
    length = st.integers(1, 45)
    distance = st.none() | st.integers(0, 30)
    fields: dict[str, Any] = {
        **{"batch": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 1, "value_dim": 1, "dtype": "float64"},
        **{"causal": draw(st.booleans()), "window": (draw(distance), draw(distance))},
        "alignment": draw(st.sampled_from(("bottom_right", "top_left"))),
    }
    lengths = None
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5))
        lengths = tuple(zip(*(*pairs, (1, 1))))
        fields |= {"q_len": sum(lengths[0]), "kv_len": sum(lengths[1]), "documents": len(lengths[0])}
    else:
        fields |= {"q_len": draw(length), "kv_len": draw(length)}
    if draw(st.booleans()):
        whole = (1, 4, fields["q_len"], fields["kv_len"])
        fields["mask_shape"] = tuple(draw(st.sampled_from((size, 1))) for size in whole)
    if draw(st.booleans()):
        fields["key_ranges_shape"] = (1, draw(st.sampled_from((1, 2))), fields["kv_len"], draw(st.integers(1, 2)), 2)
    if draw(st.booleans()):
        sizes = (1, 4, fields["q_len"], fields["kv_len"])
        fields |= fields_of(draw(st.sampled_from((*MASKS,))), None, sizes)
    return fill(AttentionSpec(**fields), draw(st.integers(0, 99)), *(lengths or ()))


def matrices(one: blocks.Table, others: int) -> tuple[np.ndarray, np.ndarray]:
    """(partial, full) of a table as boolean ``[batch, heads, blocks, others]``."""
    results = []
    for count, numbers in ((one.partial_count, one.partial), (one.full_count, one.full)):
        meant = np.arange(numbers.shape[-1]) < count.numpy()[..., None]
        dense = np.zeros((*count.shape, others), int)
        for at in zip(*np.nonzero(meant)):
            dense[(*at[:-1], int(numbers[tuple(map(int, at))]))] += 1
        assert dense.max(initial=0) <= 1, "a block twice"
        assert ((numbers >= 0) & (numbers < others)).all(), "the kernel reads one number ahead"
        results.append(dense.astype(bool))
    return results[0], results[1]


@given(case=calls())
@settings(max_examples=150)
def test_block_tables(case: Case) -> None:
    """Every visible pair lies in a block of the table, a full block hides nothing, and the tables by row and by key
    agree."""
    spec, inputs = case.spec, tensors(case.inputs, "float64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 8)
        patch.setattr(programs, "compile_symbolic", lambda function, compiler: function)
        for cache in (blocks.widths, operands.length_classes, operands._by_stream, programs.program):
            cache.cache_clear()
        made = operands.operands(spec, inputs)
        counts = blocks.blocks(spec.q_len), blocks.blocks(spec.kv_len)
    for cache in (blocks.widths, operands.length_classes, operands._by_stream, programs.program):
        cache.cache_clear()
    given = case.inputs
    tables = given.mask, given.cu_seqlens_q, given.cu_seqlens_k, given.key_ranges, aux_of(given)
    seen = visible(spec, *tables)
    if made.tables is None:
        assert seen.all()
        return
    shape = (*seen.shape[:2], counts[0] * 8, counts[1] * 8)
    some, every = np.zeros(shape, bool), np.ones(shape, bool)
    some[:, :, : spec.q_len, : spec.kv_len] = every[:, :, : spec.q_len, : spec.kv_len] = seen
    tiles = (*seen.shape[:2], counts[0], 8, counts[1], 8)
    some, every = some.reshape(tiles).any((3, 5)), every.reshape(tiles).all((3, 5))
    partial, full = matrices(made.tables[0], counts[1])
    assert not (partial & full).any()
    assert ((partial | full) >= some).all() and (full <= every).all()
    by_key = [matrix.swapaxes(2, 3) for matrix in matrices(made.tables[1], counts[0])]
    assert not (by_key[0] & by_key[1]).any()
    assert ((by_key[0] | by_key[1]) >= some).all() and (by_key[1] <= every).all()
    if not spec.packed and not (spec.mask_shape or spec.key_ranges_shape or spec.mask_mod):
        np.testing.assert_array_equal(partial | full, some)
        np.testing.assert_array_equal(by_key[0] | by_key[1], some)


def test_the_blocks_of_key_ranges_are_exact() -> None:
    """128 keys seen by rows 128..383 and by nobody else: two full blocks. The next keys share one partial block."""
    ranges = torch.zeros(1, 1, 200, 1, 2, dtype=torch.int32)
    ranges[:, :, :128] = torch.tensor([128, 384])
    ranges[:, :, 128:, 0, 1] = 5
    some, every = blocks.range_blocks(operands._range_ends(ranges) or (), 400, 200, 3)
    assert some[0, 0].int().tolist() == [[0, 1], [1, 0], [1, 0], [0, 0]]
    assert every[0, 0].int().tolist() == [[0, 0], [1, 0], [1, 0], [0, 0]]


def test_blocks_of_key_ranges_are_the_same_with_deterministic_algorithms(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    ends = torch.randint(0, 401, (2, 3, 300, 2, 2), generator=torch.Generator().manual_seed(0)).int().sort(-1)[0]
    ranges = operands._range_ends(ends) or ()
    usual = blocks.range_blocks(ranges, 400, 300, 2)
    torch.use_deterministic_algorithms(True)
    assert all(map(torch.equal, usual, blocks.range_blocks(ranges, 400, 300, 2)))


def test_lying_ranges_give_blocks_that_exist() -> None:
    ranges = torch.tensor([[-(2**31), 2**31 - 1], [2**31 - 1, -(2**31)], [900, 1000], [-5, 3]], dtype=torch.int32)
    some, every = blocks.range_blocks(operands._range_ends(ranges[None, None, :, None]) or (), 400, 4, 1)
    assert some.shape == every.shape == (1, 1, 4, 1) and some.all() and not every.any()
    for table in blocks.tables_of_blocks([(some, every)], None, 400, 4):
        assert (table.partial < 4).all() and (table.partial_count <= 4).all()


def test_memory_of_key_ranges_grows_with_tokens() -> None:
    """At 64K the blocks have 2^18 numbers; a table of all pairs would have 2^32."""
    tokens = 2**16
    ranges = torch.stack([torch.arange(tokens), torch.full((tokens,), tokens)], -1).int()[None, None, :, None]
    with LargestOutput() as largest:
        part = blocks.range_blocks(operands._range_ends(ranges) or (), tokens, tokens, 1)
        blocks.tables_of_blocks([part], None, tokens, tokens)
    assert 0 < largest.memory <= 40 * tokens


def test_the_tables_of_a_window_have_few_columns() -> None:
    spec = replace(SPEC, q_len=2**17, kv_len=2**17, window=(256, 0))
    assert blocks.widths(spec) == (3, 3)
    assert blocks.widths(replace(spec, causal=True, window=(None, None))) == (1024, 1024)


# The whole backend through torch's compiler. torch's own unfused code stands in for the kernels.


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compiles with the kernels replaced, also for gradients on the CPU. The list grows with every compilation."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []

    def inductor(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, examples)

    monkeypatch.setattr(programs, "inductor", inductor)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda q, k, v: None)
    programs.program.cache_clear()
    yield graphs
    programs.program.cache_clear()


@needs_no_gpu
@pytest.mark.parametrize("name", COMPILED)
def test_forward_and_gradients_match_the_reference(name: str, standing_in: list[Any]) -> None:
    assert_right(flex_cuda, *case_of(name, needs_backward=True, return_lse=True))


@needs_no_gpu
@pytest.mark.parametrize("most", [0, learned.MOST_COPIES], ids=["no copies", "copies"])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_arrays_match_the_reference(
    name: str, most: int, standing_in: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "MOST_COPIES", most)
    learned.read_alone.cache_clear()
    flex_cuda._signature.cache_clear()
    call = learned_call(name, dtype="float32", aux_dtype="float32", causal=True, softcap=2.0, sinks=True)
    assert not list(unmet_claims(flex_cuda.BACKWARD, call.spec, "sm90"))
    assert_right(flex_cuda, call)


@needs_no_gpu
def test_a_wrong_gradient_of_an_array_is_noticed(standing_in: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head's gradient goes to the next head."""
    call = learned_call("relative bias", dtype="float32", aux_dtype="float32")
    real = learned.summed
    rolled = lambda spec, arrays, parts, bad: real(spec, arrays, [part.roll(1, 0) for part in parts], bad)  # noqa: E731
    monkeypatch.setattr(learned, "summed", rolled)
    assert not judged(call, ran(flex_cuda, call)).ok


def test_every_lookup_has_an_array_of_its_own() -> None:
    learned.read_alone.cache_clear()
    both, slopes = (learned.read_alone(learned_call(name).spec) for name in ("two arrays", "learned slopes"))
    assert both.numbers == (0, 1, 0) and both.by_key == (False, False, False)
    assert slopes.by_key == (True,) and str(slopes.tree) == "score - (aux1[h, k] * to_float(abs((q - k))))"
    assert learned.read_alone(learned_call("not read").spec).numbers == ()  # 0.0 * ... does not read it


@needs_no_gpu
def test_a_bad_number_in_a_document_reaches_the_gradients_of_arrays(standing_in: list[Any]) -> None:
    """The kernel gets 0 in its place, and the gradient of an array is a sum over all documents."""
    function, shapes = LEARNED["learned slopes"]
    aux = tuple(Aux(shape, "bfloat16") for shape in shapes)
    sizes = {key: value for key, value in LEARNED_SIZES.items() if key not in ("batch", "q_len", "kv_len", "dtype")}
    call = make_call(4, ((3, 4), (3, 4)), **sizes, dtype="float32", score_mod=trace_score(function, aux).tree, aux=aux)
    call = replace(call, spec=replace(call.spec, aux_gradients=(0,)))
    inputs = tensors(call.inputs, "float32")._replace(aux0=torch.ones(4, dtype=torch.bfloat16))
    for poison in (1.0, np.inf):
        inputs.v[0] *= poison
        out, lse = flex_cuda.forward(call.spec, inputs)
        gradients = flex_cuda.backward(call.spec, inputs, out, lse, torch.ones_like(out), None)
        assert gradients.daux0.dtype == torch.bfloat16
        assert bool(gradients.daux0.isnan().all()) == np.isinf(poison)


@needs_no_gpu
def test_the_shortcut_gives_the_same_bits(standing_in: list[Any]) -> None:
    case, inputs = case_of("causal with empty rows", needs_backward=True)
    spec = case.spec
    run = flex_cuda.shortcut(spec)
    assert run is not None
    out, lse = flex_cuda.forward(spec, inputs)
    q, k, v = inputs.q.requires_grad_(), inputs.k, inputs.v.requires_grad_()  # k needs no gradient
    again, again_lse = run(q, k, v)
    dout = torch.from_numpy(case.dout).float()
    expected = flex_cuda.backward(spec, inputs, out, lse, dout, None)
    compilations = len(standing_in)
    dq, dv = torch.autograd.grad(again, (q, v), dout)
    pairs = ((again, out), (again_lse, lse), (dq, expected.dq), (dv, expected.dv))
    assert all(torch.equal(got.detach(), desired) for got, desired in pairs)
    assert compilations == len(standing_in) == 2  # one with gradients and one without
    with torch.no_grad():
        assert not run(q, k, v)[0].requires_grad


@needs_no_gpu
def test_the_shortcut_allows_retain_graph_but_no_second_derivative(
    standing_in: list[Any], request: pytest.FixtureRequest
) -> None:
    """This also holds if torch compiles again, after a reset or a change of a process-wide setting."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    changes: dict[Any, int] = {  # and the number of compilations afterwards
        lambda: None: 1,
        torch.compiler.reset: 2,
        lambda: torch.use_deterministic_algorithms(True): 3,
        lambda: torch.use_deterministic_algorithms(False): 3,
    }
    case, inputs = case_of("causal with empty rows", needs_backward=True)
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
    for change, compilations in changes.items():
        change()
        run = flex_cuda.shortcut(case.spec)
        assert run is not None
        out, _ = run(*leaves)
        dout = torch.from_numpy(case.dout).float()
        first, again = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, again))
        with pytest.raises(RuntimeError, match="attention has no second derivative"):
            torch.autograd.grad(out, leaves, dout, create_graph=True)
        assert len(standing_in) == compilations


@needs_no_gpu
def test_gradients_are_right_if_the_sink_has_nearly_all_weight(standing_in: list[Any]) -> None:
    """The keys then have weights of 1e-5 and less, and ``1 - the sink's weight`` would have few correct digits."""
    fields = {**FEATURES["sinks"], "bias_gradient": False, "needs_backward": True}
    case = make({**fields, "scale": 1.0}, "float32")
    case.inputs.q[..., 0], case.inputs.k[..., 0] = 4.0, -4.0  # adds -16 to every score
    assert_right(flex_cuda, case)


@needs_no_gpu
def test_one_program_serves_every_length(standing_in: list[Any]) -> None:
    """Equal lengths compile nothing new, whether they equal each other or the batch; neither do other windows."""
    sizes = ((2, 130, 140, (5, 0)), (3, 200, 300, (7, 2)), (139, 139, 130, (3, None)), (4, 333, 257, (None, 3)))
    for batch, q_len, kv_len, window in sizes:
        spec = AttentionSpec(
            **{"batch": batch, "q_len": q_len, "kv_len": kv_len, "window": window, "dtype": "float32"},
            **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16},
        )
        q, k = torch.randn(batch, q_len, 2, 16), torch.randn(batch, kv_len, 1, 16)
        out, _ = flex_cuda.forward(spec, Inputs(q, k, k))
        assert out.isfinite().all() and len(standing_in) == 1


@needs_no_gpu
def test_one_program_serves_every_softcap_and_scale(standing_in: list[Any]) -> None:
    """Another cap or scale compiles nothing new, with and without gradients; its results are its own."""
    results, compilations = [], []
    for cap, scale in ((0.7, 0.3), (1.5, 0.3), (50.0, 2.0)):
        case, inputs = case_of("softcap", needs_backward=True, return_lse=True, softcap=cap, scale=scale)
        results.append(assert_right(flex_cuda, case, inputs).out)
        compilations.append(len(standing_in))
    assert compilations[0] > 0 and len(set(compilations)) == 1
    assert not torch.equal(results[0], results[1])


@needs_no_gpu
@pytest.mark.parametrize("cap", [1e-40, 3e-39, 3e38])
def test_extreme_softcaps_are_finite(cap: float, standing_in: list[Any]) -> None:
    case, inputs = case_of("softcap", softcap=cap)
    inputs = inputs._replace(q=torch.zeros_like(inputs.q))  # a score of 0 stays 0, whatever the cap is
    out, lse = flex_cuda.forward(case.spec, inputs)
    assert out.isfinite().all() and (lse.isfinite() | (lse == -torch.inf)).all()


@needs_no_gpu
def test_nan_stays_in_its_document(standing_in: list[Any]) -> None:
    case, inputs = case_of("packed, causal", needs_backward=True)
    spec, dout = case.spec, torch.from_numpy(case.dout).float()
    clean = (*flex_cuda.forward(spec, inputs), None)
    clean = (*clean[:2], flex_cuda.backward(spec, inputs, *clean[:2], dout, None))
    first_q, first_k = (int(cu[1]) for cu in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    broken_parts = (("v", first_k, np.inf), ("k", first_k, np.nan), ("q", first_q, np.nan), ("dout", first_q, np.inf))
    for name, tokens, poison in broken_parts:
        broken = {"dout": dout.clone(), **{part: getattr(inputs, part).clone() for part in "qkv"}}
        broken[name][:tokens] = poison
        other_dout = broken.pop("dout")
        changed = inputs._replace(**broken)
        out, lse = flex_cuda.forward(spec, changed)
        actual = flex_cuda.backward(spec, changed, out, lse, other_dout, None)
        assert torch.equal(out[first_q:], clean[0][first_q:]) and torch.equal(lse[:, first_q:], clean[1][:, first_q:])
        for got, desired, start in zip(actual[:3], clean[2], (first_q, first_k, first_k)):
            assert torch.equal(got[start:], desired[start:]) and not got[:start].isfinite().all()
        assert name == "dout" or not out[:first_q].isfinite().all()


@needs_no_gpu
def test_other_threads_and_autocast_change_nothing(standing_in: list[Any]) -> None:
    case, inputs = case_of("plain", needs_backward=True)
    results: list[Any] = []

    def in_another_thread() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = flex_cuda.forward(case.spec, inputs)
            results.extend((out, *flex_cuda.backward(case.spec, inputs, out, lse, torch.ones_like(out), None)[:3]))

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    out, lse = flex_cuda.forward(case.spec, inputs)
    expected = (out, *flex_cuda.backward(case.spec, inputs, out, lse, torch.ones_like(out), None)[:3])
    assert out.dtype == torch.float32 and all(map(torch.equal, results, expected))


@needs_no_gpu
def test_a_warm_call_compiles_nothing(standing_in: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = case_of("packed, causal", needs_backward=True)
    blank = first_calls.zeros(case.spec, "cpu")
    monkeypatch.setattr(first_calls, "zeros", lambda spec: blank)
    flex_cuda.warm_up(case.spec)
    compilations = len(standing_in)
    out, lse = flex_cuda.forward(case.spec, inputs)
    flex_cuda.backward(case.spec, inputs, out, lse, torch.ones_like(out), None)
    assert len(standing_in) == compilations > 0


# Programs


def test_many_signatures_never_fall_back_to_uncompiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stops compiling a function after 8 variants of its code. Here every signature has its own code."""
    compilations = []

    def backend(graph: Any, examples: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    monkeypatch.setattr(programs, "inductor", backend)
    ones = torch.ones(3)
    for number in range(20):
        assert torch.equal(programs.program(_times, str(number))(ones), number * ones)
    assert len(compilations) == 20
    assert programs.program(_times, "3") is programs.program(_times, "3")
    programs.program.cache_clear()


def _times(how: tuple[str], values: Any) -> Any:
    return values * int(how[0])


def test_torchs_cache_keeps_programs_of_one_graph_apart(scalar_inductor: None) -> None:
    """100 and 197 queries are one and two blocks. Their graphs are equal, and torch's cache would serve both with one.

    Other lengths of the same signature take their program from the cache, as they would in another process.
    """
    from torch._dynamo.utils import counters

    def hits(q_len: int) -> int:
        programs.program.cache_clear()
        before = counters["inductor"]["fxgraph_cache_hit"]
        spec = AttentionSpec(
            **{"batch": 1, "q_len": q_len, "kv_len": 7, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
            **{"value_dim": 8, "dtype": "float32", "mask_shape": (1, 1, 1, 7)},
        )
        q, k, mask = torch.ones(1, q_len, 1, 8), torch.ones(1, 7, 1, 8), torch.ones((1, 1, 1, 7), dtype=torch.bool)
        with torch.no_grad():
            tables = operands.operands(spec, Inputs(q, k, k, mask)).tables
        assert tables is not None and tables[1].partial_count.item() == blocks.blocks(q_len)
        return int(counters["inductor"]["fxgraph_cache_hit"] - before)

    assert [hits(q_len) for q_len in (100, 197, 300)] == [0, 0, 1]
    programs.program.cache_clear()


def test_nothing_compiles_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    program = programs.CompiledFunction(_times, ("2",))
    with pytest.raises(RuntimeError, match=r"program .* not compiled yet.*CUDA graph.*warm_up"):
        program(torch.ones(3))
    program.run = lambda *arguments: "ran"  # as if the program had been compiled before
    program.ready.add(torch.is_grad_enabled())
    assert program(torch.ones(3)) == "ran"
    operands._by_stream.cache_clear()
    with pytest.raises(RuntimeError, match="block tables"):
        operands.operands(replace(SPEC, causal=True), Inputs(*(torch.zeros(2, 3, 4, 5),) * 3))


def test_tensors_are_copied_only_if_no_program_takes_their_layout() -> None:
    whole = torch.zeros(2, 5, 4, 8)
    heads = whole.transpose(1, 2).contiguous().transpose(1, 2)
    packed = torch.zeros(2, 5, 3, 4, 8).unbind(2)[1]
    for tensor, layout in ((whole, "tokens"), (heads, "heads"), (packed, 96)):
        same, actual = operands.arrange(tensor)
        assert same is tensor and actual == layout
    for tensor in (whole[..., ::2], whole[:, :, :1].expand(-1, -1, 4, -1), whole[:, ::2]):
        copied, actual = operands.arrange(tensor)
        assert actual == "tokens" and copied.is_contiguous() and torch.equal(copied, tensor)
    expanded = torch.zeros(1, 1, 5, 7).expand(2, 4, 5, 7)
    assert operands._condensed(expanded).shape == (1, 1, 5, 7)


# On a GPU: cases that the generated suites do not cover


def case_for_gpu(spec: AttentionSpec) -> Case:
    return fill(spec, 0, *((spec.q_len // 2, spec.q_len // 2),) * 2) if spec.packed else fill(spec, 0)


def on_gpu(spec: AttentionSpec) -> Inputs:
    return tensors(case_for_gpu(spec).inputs, spec.dtype, "cuda")


def assert_right_on_gpu(spec: AttentionSpec) -> None:
    case = case_for_gpu(spec)
    verdict = judged(case, ran(flex_cuda, case, device="cuda"))
    assert verdict.ok, f"{spec}\n{verdict}"


@pytest.mark.cuda
def test_a_graph_replays_the_same_bits_after_warm_up() -> None:
    spec = replace(SPEC, causal=True, softcap=3.0, sinks=True)
    flex_cuda.warm_up(spec)
    inputs = on_gpu(spec)
    expected, _ = flex_cuda.forward(spec, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flex_cuda.forward(spec, inputs)
    graph.replay()
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flex_cuda.forward(replace(spec, softcap=3.5), inputs)


OTHER_LENGTHS = {
    "two row blocks, one key block": ((300, 50), (197, 7), (129, 127), (1000, 65)),
    "one row block, two key blocks": ((50, 300), (7, 197), (127, 129)),
    "some of both": ((200, 300), (600, 140), (131, 1000)),
    "one of each, then others": ((100, 7), (100, 300), (389, 300), (300, 50), (197, 7)),
}
"""(q_len, kv_len) of calls that follow each other. The last has several programs, with one graph."""
MASK_AXES = {"whole": (), "rows alone": (3,), "keys alone": (2,)}
"""The axes of size 1 of a mask."""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("lengths", "axes"),
    [  # each compiles for half a minute
        ("one of each, then others", "whole"),
        ("two row blocks, one key block", "keys alone"),
        ("one row block, two key blocks", "whole"),
        ("some of both", "rows alone"),
    ],
)
def test_a_program_compiled_for_other_lengths_is_right(
    lengths: str, axes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Forward and gradients of calls with a mask, whose block tables have other sizes than the first call's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    sizes = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 96, "value_dim": 96, "dtype": "bfloat16"}
    programs.program.cache_clear()
    for q_len, kv_len in OTHER_LENGTHS[lengths]:
        shape = tuple(1 if axis in MASK_AXES[axes] else size for axis, size in enumerate((1, 1, q_len, kv_len)))
        spec = AttentionSpec(**sizes, q_len=q_len, kv_len=kv_len, softcap=0.7, mask_shape=shape, needs_backward=True)
        assert_right_on_gpu(spec)


RANGES_ON_A_GPU = {
    "two ranges, mask, softcap": {
        **{"key_ranges_shape": (2, 1, 300, 2, 2), "mask_shape": (2, 1, 1, 300), "softcap": 5.0},
    },
    "packed, sinks": {"batch": 1, "documents": 2, "key_ranges_shape": (1, 2, 300, 1, 2), "sinks": True, "q_len": 300},
}


@pytest.mark.cuda
@pytest.mark.parametrize("fields", RANGES_ON_A_GPU.values(), ids=list(RANGES_ON_A_GPU))
def test_key_ranges_on_a_gpu(fields: dict[str, Any]) -> None:
    sizes = {"batch": 2, "q_len": 200, "kv_len": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    more = {"value_dim": 64, "dtype": "bfloat16", "needs_backward": True}
    assert_right_on_gpu(AttentionSpec(**{**sizes, **more, **fields}))  # random ranges leave rows without keys


@pytest.mark.cuda
def test_float32_is_not_rounded_to_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert_right_on_gpu(replace(SPEC, dtype="float32", needs_backward=True))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "changes", [{"window": (128, 0)}, {"documents": 2, "causal": True}, {"key_ranges_shape": (1, 1, 2**15, 1, 2)}]
)
def test_memory_grows_with_tokens(changes: dict[str, Any]) -> None:
    spec = AttentionSpec(
        **{"batch": 1, "q_len": 2**15, "kv_len": 2**15, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64},
        **{"value_dim": 64, "dtype": "bfloat16", "needs_backward": True, **changes},
    )
    inputs = on_gpu(spec)
    flex_cuda.warm_up(spec)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flex_cuda.forward(spec, inputs)
    flex_cuda.backward(spec, inputs, out, lse, torch.ones_like(out), None)
    assert torch.cuda.max_memory_allocated() - before < 16 * sum(t.nbytes for t in inputs[:3])


@pytest.mark.cuda
def test_the_shortcut_gives_the_same_bits_on_a_gpu() -> None:
    for causal, dtype in ((False, "float32"), (True, "bfloat16")):
        spec = replace(SPEC, causal=causal, dtype=dtype, needs_backward=True)
        inputs = on_gpu(spec)
        run = flex_cuda.shortcut(spec)
        assert run is not None
        out, lse = flex_cuda.forward(spec, inputs)
        leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
        again, again_lse = run(*leaves)
        expected = flex_cuda.backward(spec, inputs, out, lse, torch.ones_like(out), None)
        got = torch.autograd.grad(again, leaves, torch.ones_like(out))
        assert torch.equal(again, out) and torch.equal(again_lse, lse) and all(map(torch.equal, got, expected[:3]))


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_function_contains_the_same_kernel(causal: bool) -> None:
    q, k, v = (torch.randn(1, length, 2, 16, device="cuda") for length in (131, 67, 67))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=causal, backend="flex")

    compiled = torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))
