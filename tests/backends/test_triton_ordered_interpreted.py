"""The Triton kernels of one order in Triton's interpreter, on the CPU: their numbers, gradients and equal bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
import direct_calls
import interpreted_calls
import same_bits_calls
from both_frontends import _numpy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreted_calls import BANDS, FAULTY, LIES, SINKS, amid_nan, heads_outside, stepped, tensor, tensors
from same_bits_calls import Kind, differing, packed_of
from spec_strategies import MISREAD, Call, make_call, misread
from triton_interpreter import ALL, NONE, SMALL, make_small, slow_draws

from attn_core.backends import triton_ordered, triton_splitkv
from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.in_order.order import Order, Tiles
from attn_core.backends.triton_ordered import launches
from attn_core.backends.triton_ordered.launches import Tile
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("interpreter")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Small tiles and shares, so that few tokens are several."""
    monkeypatch.setattr(launches, "TILES", {256: (Tile(32, 32, 1, 1), Tile(32, 32, 1, 1))})
    monkeypatch.setattr(order, "NARROW", Order(32, 64, (Tiles(16, 32, 1, 2), Tiles(64, 32, 4, 2))))
    order.how.cache_clear()
    yield monkeypatch
    order.how.cache_clear()


@pytest.fixture
def exact(small: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Products as a GPU has them, too."""
    return make_small(small)


ONE_ROW: dict[str, Any] = {"batch": 1, "needs_backward": True, "return_lse": True}
SIZES = {**interpreted_calls.SIZES, **ONE_ROW}
DOCUMENTS = {**SIZES, "lengths": ((33, 0, 37, 5), (20, 8, 70, 0))}
CASES: dict[str, dict[str, Any]] = {
    **{name: {**fields, **ONE_ROW} for name, fields in (BANDS | SINKS).items()},
    "causal": {**BANDS["causal"], **ONE_ROW, "batch": 2, "q_len": 20, "kv_len": 70},
    "softcap and slopes": {**SIZES, "softcap": 1.3, "alibi_shape": (2, 2), "causal": True, "batch": 2},
    "slopes of heads": {**SIZES, "alibi_shape": (6,), "num_heads": 6, "num_kv_heads": 2, "causal": True},
    "one query": {**SIZES, "q_len": 1, "causal": True, "num_heads": 6, "num_kv_heads": 2},
    "documents": {**DOCUMENTS, "causal": True},
    "documents, everything": {
        **{**DOCUMENTS, "window": (5, 2), "sinks": True, "softcap": 2.0, "num_heads": 3, "alibi_shape": (3,)},
    },
    "other widths": {**SIZES, "head_dim": 64, "value_dim": 32, "causal": True},
}


def buffers(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Gradients]:
    """Memory for results that was NaN."""
    kind = getattr(torch, spec.dtype)
    results = (
        torch.full(spec.out_shape, torch.nan, dtype=kind),
        torch.full(spec.lse_shape, torch.nan, dtype=torch.float32),
    )
    return results, Gradients(*(torch.full(each.shape, torch.nan, dtype=kind) for each in inputs[:3]))


def computed(call: Call, spec: AttentionSpec | None = None) -> direct_calls.Results:
    """out, lse and gradients. spec: another one with a fault."""
    spec, inputs = spec or call.spec, tensors(call)
    assert triton_ordered.refuses(spec, "sm90", None) == ()
    into, into_gradients = buffers(spec, inputs)
    out, lse = triton_ordered.forward(spec, inputs, into)
    assert out is into[0] and lse is into[1]
    dlse = tensor(call.dlse, "float32") if spec.return_lse else None
    actual = triton_ordered.backward(spec, inputs, out, lse, tensor(call.dout, spec.dtype), dlse, into_gradients)
    assert all(one is other for one, other in zip(actual[:3], into_gradients[:3], strict=True))
    return direct_calls.Results(out, lse, actual)


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, small: pytest.MonkeyPatch) -> None:
    """Every second case has a program for each share of the keys."""
    small.setattr(order, "FEW_PROGRAMS", ALL if list(CASES).index(name) % 2 else NONE)
    call = make_call(**CASES[name])
    verdict = direct_calls.judged(call, computed(call))
    assert verdict.ok, f"{call}\n{verdict}"


@settings(max_examples=8)
@given(st.data())
def test_any_call(data: Any) -> None:
    lengths = st.lists(st.sampled_from((0, 1, 7, 40, 70)), min_size=1, max_size=3)
    queries = data.draw(lengths)
    keys = data.draw(st.lists(st.sampled_from((0, 1, 9, 40, 70)), min_size=len(queries), max_size=len(queries)))
    heads, kv_heads = data.draw(st.sampled_from(((1, 1), (4, 2), (3, 1))))
    fields: dict[str, Any] = {
        **{**SIZES, "num_heads": heads, "num_kv_heads": kv_heads},
        "dtype": data.draw(st.sampled_from(("float16", "bfloat16"))),
        "causal": data.draw(st.booleans()),
        "alignment": data.draw(st.sampled_from(("bottom_right", "top_left"))),
        "window": data.draw(st.sampled_from((None, None, (3, 1), (0, 0), (20, None), (None, 5)))),
        "softcap": data.draw(st.sampled_from((None, 2.0))),
        "sinks": data.draw(st.booleans()),
        "alibi_shape": data.draw(st.sampled_from((None, (heads,)))),
        "return_lse": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 99)),
    }
    if data.draw(st.booleans()):
        if not sum(queries) or not sum(keys):
            return
        call = make_call(**fields, lengths=(tuple(queries), tuple(keys)))
    else:
        call = make_call(**{**fields, "q_len": max(queries[0], 1), "kv_len": max(keys[0], 1)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "FEW_PROGRAMS", data.draw(st.sampled_from((ALL, NONE))))
        order.how.cache_clear()
        verdict = direct_calls.judged(call, computed(call))
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("fault", MISREAD)
def test_faults_are_caught(fault: str) -> None:
    call = make_call(**{**FAULTY, **ONE_ROW})
    wrong = direct_calls.judged(call, computed(call, misread(call, fault).spec))
    assert not wrong.ok
    assert not next(each for each in wrong.quantities if each.name == "dk").use <= 1


# Other memory, and numbers that are not finite


def results_of(call: Call, inputs: Inputs, dout: Any = None) -> list[Any]:
    """out, lse and the gradients of q, k and v."""
    out, lse = triton_ordered.forward(call.spec, inputs)
    dout = tensor(call.dout, call.spec.dtype) if dout is None else dout
    return [out, lse, *triton_ordered.backward(call.spec, inputs, out, lse, dout, None)[:3]]


def test_any_strides_give_the_same_bits() -> None:
    call = make_call(**{**CASES["causal"], "q_len": 20, "kv_len": 40})
    inputs, dout = tensors(call), tensor(call.dout, "float16")
    expected = results_of(call, inputs, dout)
    sliced = [torch.nn.functional.pad(each, (1, 2))[..., 1:-2] for each in (*inputs[:3], dout)]
    for tensors_of in (map(heads_outside, inputs[:3]), map(stepped, inputs[:3]), sliced[:3]):
        actual = results_of(call, inputs._replace(**dict(zip("qkv", tensors_of, strict=True))), sliced[3])
        assert all(map(torch.equal, actual, expected))


def test_a_gradient_of_a_row_that_sees_no_key_has_no_effect() -> None:
    call = make_call(**CASES["rows without keys"])
    inputs, dout = tensors(call), tensor(call.dout, "float16")
    expected = results_of(call, inputs, dout)
    hidden = expected[1] == -torch.inf
    assert hidden[:, :, :46].all() and not hidden[:, :, 46:].any()
    dout[:, :46] = torch.nan
    actual = results_of(call, inputs, dout)
    assert all(map(torch.equal, actual, expected)) and not actual[2][:, :46].any()


def test_nan_stays_in_its_document() -> None:
    call = make_call(**CASES["documents"])
    inputs = tensors(call)
    right = results_of(call, inputs)
    broken = inputs._replace(k=inputs.k.clone(), v=inputs.v.clone())
    broken.k[-1] = broken.v[-1] = torch.nan  # the last key of the third document, whose queries are tokens 33 to 69
    actual = results_of(call, broken)
    assert actual[0][69].isnan().all()
    for clean in (slice(0, 33), slice(70, None)):
        assert torch.equal(actual[0][clean], right[0][clean]) and torch.equal(actual[2][clean], right[2][clean])
    assert all(torch.equal(one[:28], other[:28]) for one, other in zip(actual[3:], right[3:], strict=True))


def test_offsets_that_lie_lead_nowhere_outside() -> None:
    call = make_call(**CASES["documents"])
    inputs, dout = tensors(call), tensor(call.dout, "float16")
    out, lse = triton_ordered.forward(call.spec, inputs)
    for lie in LIES:
        offsets = torch.tensor(lie, dtype=torch.int32)
        amid = dict(zip("qkv", map(amid_nan, inputs[:3]), strict=True))
        for side in ("cu_seqlens_q", "cu_seqlens_k"):
            liars = inputs._replace(**{**amid, side: offsets})
            into, into_gradients = buffers(call.spec, inputs)
            for each in (*into, *into_gradients[:3]):
                each.zero_()
            triton_ordered.forward(call.spec, liars, into)
            triton_ordered.backward(call.spec, liars, out, lse, amid_nan(dout), None, into_gradients)
            assert not any(each.isnan().any() for each in (*into, *into_gradients[:3]))


# The same bits

OPTIONS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (),
    (("window", 20),),
    (("softcap", 5.0), ("sinks", True)),
    (("alibi_slopes", True),),
)


def both(spec: AttentionSpec, inputs: PagedInputs) -> tuple[np.ndarray, np.ndarray]:
    """The results of a call on pages, which are those of the same keys as packed documents."""
    paged, packed = same_bits_calls.as_tensors(spec, inputs, "cpu"), packed_of(spec, inputs)
    order.how.cache_clear()
    one = [_numpy(each) for each in triton_splitkv.forward(spec, paged)]
    kinds = {name: spec.dtype for name in "qkv"} | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "int32")
    named = {name: tensor(each, kinds.get(name, "float32")) for name, each in packed[1]._asdict().items()}
    assert triton_ordered.refuses(packed[0], "sm90", None) == ()
    other = [_numpy(each) for each in triton_ordered.forward(packed[0], Inputs(**named))]
    differences = differing(dict(zip(("out", "lse"), one)), dict(zip(("out", "lse"), other)))
    assert not differences, f"pages and packed: {differences}"
    return one[0], one[1]


def check_pages(patch: pytest.MonkeyPatch, examples: int, lengths: tuple[int, ...], **how: Any) -> None:
    @settings(max_examples=examples, **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        heads, options = data.draw(st.sampled_from(((1, 1), (2, 1), (3, 1)))), data.draw(st.sampled_from(OPTIONS))
        patch.setattr(order, "FEW_PROGRAMS", data.draw(st.sampled_from((NONE, ALL, 4))))
        kind = Kind("torch", "triton_ordered", "prefix", heads, "float16", options)
        same_bits_calls.check(kind, both, data.draw, lengths, (1, 16, 64))

    draws()


def test_a_query_has_the_same_bits_packed_in_every_chunk_and_in_pages(exact: pytest.MonkeyPatch) -> None:
    check_pages(exact, slow_draws(3), (2, 15, 40))


def test_an_order_that_differs_between_packed_calls_and_pages_is_caught(exact: pytest.MonkeyPatch) -> None:
    """Planted: calls without pages have other shares."""
    exact.setattr(order, "order", lambda spec: SMALL._replace(share=48) if spec.paged is None else SMALL)
    with pytest.raises(AssertionError, match="pages and packed"):
        check_pages(exact, 10, (70,), phases=[Phase.generate])


def in_call(kind: Kind, documents: list[dict[str, np.ndarray]], packs: bool) -> list[dict[str, np.ndarray]]:
    """out, lse, and dq, dk and dv in float32, of each document, computed in one packed or dense call."""
    lengths = [len(each["q"]) for each in documents]
    join = np.concatenate if packs else np.stack
    arrays = {name: tensor(join([each[name] for each in documents]), kind.dtype) for name in ("q", "k", "v", "dout")}
    tokens = sum(lengths) if packs else lengths[0]
    options = dict(kind.options)
    sizes: dict[str, Any] = {"batch": 1 if packs else len(documents), "q_len": tokens, "kv_len": tokens}
    if packs:
        sizes |= {"documents": len(documents), "max_len_q": max(lengths), "max_len_k": max(lengths)}
    spec = AttentionSpec(
        **{**sizes, "num_heads": kind.heads[0], "num_kv_heads": kind.heads[1], "head_dim": kind.dim},
        **{"value_dim": kind.dim, "dtype": kind.dtype, "causal": True, "needs_backward": True, "invariant": "prefix"},
        **{"window": (options["window"] - 1, 0) if "window" in options else (None, None)},
        **{"softcap": options.get("softcap"), "sinks": "sinks" in options},
        alibi_shape=(kind.heads[0],) if "alibi_slopes" in options else None,
    )
    numbers = tensor(np.linspace(0.1, 0.7, kind.heads[0]), "float32")
    cu = tensor(np.cumsum([0, *lengths]), "int32") if packs else None
    others = {"sinks": numbers if spec.sinks else None, "alibi_slopes": numbers if spec.alibi_shape else None}
    inputs = Inputs(*(arrays[name] for name in "qkv"), cu_seqlens_q=cu, cu_seqlens_k=cu, **others)
    order.how.cache_clear()
    out, lse = triton_ordered.forward(spec, inputs)
    sums = Gradients(*(torch.zeros(each.shape) for each in inputs[:3]))  # float16 would hide most differences
    actual = triton_ordered.backward(spec, inputs, out, lse, arrays["dout"], None, sums)
    named = {"out": out, "lse": lse, "dq": actual.dq, "dk": actual.dk, "dv": actual.dv}
    results = {name: _numpy(each) for name, each in named.items()}
    if not packs:
        return [{name: array[at] for name, array in results.items()} for at in range(len(documents))]
    ends = pairwise(np.cumsum([0, *lengths]))
    return [{n: a[:, i:j] if n == "lse" else a[i:j] for n, a in results.items()} for i, j in ends]


def check_gradients(patch: pytest.MonkeyPatch, examples: int, **how: Any) -> None:
    @settings(max_examples=examples, **how)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        heads, options = data.draw(st.sampled_from(((2, 1), (3, 1)))), data.draw(st.sampled_from(OPTIONS))
        kind = Kind("torch", "triton_ordered", "prefix", heads, "float16", options)
        length, number = data.draw(st.sampled_from((5, 40, 70))), st.integers(0, 2**31)

        def others(*lengths: int) -> list[dict[str, np.ndarray]]:
            return [same_bits_calls.document(kind, data.draw(number), each, each) for each in lengths]

        (subject,) = others(length)
        alone = in_call(kind, [subject], True)[0]
        patch.setattr(order, "FEW_PROGRAMS", data.draw(st.sampled_from((NONE, ALL))))
        neighbours = others(*data.draw(st.lists(st.sampled_from((1, 9, 50)), max_size=2)))
        place = data.draw(st.integers(0, len(neighbours)))
        among = [*neighbours[:place], subject, *neighbours[place:]]
        assert not differing(alone, in_call(kind, among, True)[place]), "packing"
        rows = [subject, *others(length)][:: data.draw(st.sampled_from((1, -1)))]
        place = next(at for at, row in enumerate(rows) if row is subject)
        assert not differing(alone, in_call(kind, rows, False)[place]), "batch"

    draws()


def test_a_document_has_the_same_bits_and_gradients_in_every_batch(exact: pytest.MonkeyPatch) -> None:
    check_gradients(exact, slow_draws(3))


def test_tiles_of_gradients_that_the_batch_chooses_are_caught(exact: pytest.MonkeyPatch) -> None:
    def by_the_batch(spec: AttentionSpec) -> tuple[Tile, Tile]:
        keys = 16 if spec.q_len > 80 else 32
        return Tile(keys, 32, 1, 1), Tile(32, keys, 1, 1)

    kind = Kind("torch", "triton_ordered", "prefix", (2, 1), "float16", ())
    subject, other = (same_bits_calls.document(kind, seed, 60, 60) for seed in (1, 2))
    for tiles, caught in ((launches.tiles, set()), (by_the_batch, {"dq", "dk", "dv"})):
        exact.setattr(launches, "tiles", tiles)
        alone, among = in_call(kind, [subject], True)[0], in_call(kind, [other, subject], True)[1]
        assert set(differing(alone, among)) == caught


# Through the frontends


PROGRAMS = {"causal": ALL, "rows without keys, sinks": NONE, "slopes of heads": NONE, "documents, everything": ALL}
"""Cases, and whether each share has a program."""


@pytest.mark.parametrize(("name", "few"), PROGRAMS.items())
def test_a_program_for_jax_has_the_results_of_torch(name: str, few: int, small: pytest.MonkeyPatch) -> None:
    """Its kernels run here on buffers that were NaN, in the order in which XLA would launch them."""
    from attn_core.backends.shared import kernel_programs

    small.setattr(order, "FEW_PROGRAMS", few)
    small.setattr(
        kernel_programs, "step", lambda kernel, reads, writes, kinds, how: (kernel, reads, writes, kinds, how)
    )
    call = make_call(**CASES[name])
    spec, inputs = call.spec, tensors(call)
    arrays = {name: each for name, each in inputs._asdict().items() if each is not None}
    arrays |= {name: each.float() for name, each in arrays.items() if name in ("sinks", "alibi_slopes")}
    dout, dlse = tensor(call.dout, spec.dtype), tensor(call.dlse, "float32")
    out, lse = triton_ordered.forward(spec, inputs)
    expected = triton_ordered.backward(spec, inputs, out, lse, dout, dlse)
    forward = executed(triton_ordered._forward_program(spec, order.how(spec, 1)), arrays)
    assert torch.equal(forward["out"], out) and torch.equal(forward["lse"], lse)
    actual = executed(
        triton_ordered._backward_program(spec, True), arrays | {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    )
    for name, each in expected._asdict().items():
        assert each is None or torch.equal(actual[name].to(each.dtype), each), name


def executed(program: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """The buffers of a program by name after its steps."""
    memory = []
    for buffer in program.buffers:
        array = arrays.get(buffer.name)
        if array is None:
            array = torch.full(buffer.shape, torch.nan, dtype=getattr(torch, buffer.dtype))
        assert array.shape == buffer.shape and str(array.dtype) == f"torch.{buffer.dtype}", buffer
        memory.append(array)
    for kernel, reads, writes, kinds, (grid, numbers, constants) in program.steps:
        operands = [memory[at] for at in (*reads, *writes)]
        assert [each.dtype for each in operands] == list(kinds)
        kernel[grid](*operands, *numbers, **constants)
    return {buffer.name: each for buffer, each in zip(program.buffers, memory, strict=True)}


def claim_the_cpu(replace_fields: Any) -> None:
    """As on a GPU: this process lets the backend claim the CPU, too."""

    def freeing(run: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            results = run(*arguments)
            gc.collect()  # the interpreter leaves references to tensors in cycles, and JAX allows none
            return results

        return wrapped

    claims = replace(triton_ordered.FORWARD, devices=("cpu",))
    functions = {"forward": freeing(triton_ordered.forward), "backward": freeing(triton_ordered.backward)}
    replace_fields(triton_ordered.BACKEND, forward_claims=claims, backward_claims=claims, **functions)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.usefixtures("small")
def test_both_frontends_reach_it(packed: bool, replace_fields: Any) -> None:
    jax, jax_frontend = pytest.importorskip("jax"), pytest.importorskip("jax_frontend")
    pytest.importorskip("jax_tvm_ffi")
    import jax.numpy as jnp

    import torch_frontend
    from attn_core import SeqInfo

    claim_the_cpu(replace_fields)
    random = np.random.default_rng(3)
    q, k, v, dout = (random.standard_normal((1, 38, heads, 16)).astype(np.float16) for heads in (4, 2, 2, 4))
    info = SeqInfo.from_lengths([20, 18]) if packed else None
    options: dict[str, Any] = {"causal": True, "invariant": "prefix", "backend": "triton_ordered", "return_lse": True}
    learned = [torch.from_numpy(each).requires_grad_() for each in (q, k, v)]
    out, lse = torch_frontend.attention(*learned, seq_info=info, **options)
    ones = torch.ones_like(lse)
    actual = [out, lse, *torch.autograd.grad((out, lse), learned, (torch.from_numpy(dout), ones))]

    def attend(*arrays: Any) -> Any:
        return jax_frontend.attention(*arrays, seq_info=info, **options)

    @jax.jit
    def program(q: Any, k: Any, v: Any, dout: Any) -> Any:
        results, pull = jax.vjp(attend, q, k, v)
        return *results, *pull((dout, jnp.ones_like(results[1])))

    for one, other in zip(actual, program(q, k, v, dout), strict=True):
        assert np.array_equal(_numpy(one), np.asarray(other))
    exact = torch_frontend.attention(*[each.double() for each in learned], seq_info=info, causal=True, backend="math")
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-3)
    compiled = torch.compile(torch_frontend.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*learned, seq_info=info, **options)[0], out)
