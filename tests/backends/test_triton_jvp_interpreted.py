"""The Triton kernel of forward mode in Triton's interpreter, on the CPU, against the float64 formula and its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
import triton_interpreter
from forward_mode import NAMES, in_forward_mode, judge, tangents_of
from oracle_cases import rounded
from other_process import OtherProcess
from spec_strategies import MISREAD, Call, make_call, misread

from attn_core.backends.contract import ForwardModePass
from attn_core.backends.triton_jvp import backend as triton_jvp
from attn_core.call.tensors import Inputs, Tangents
from attn_core.correctness import reference
from torch_frontend import SeqInfo, attention

pytestmark = pytest.mark.sampled


@pytest.fixture(autouse=True, scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[OtherProcess | None]:
    """The process that runs these tests; None if this process does."""
    yield from triton_interpreter.process(__file__, tmp_path_factory, pytestconfig)


SIZES = {
    **{"batch": 2, "q_len": 37, "kv_len": 83, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16},
    "dtype": "float16",
}
DOCUMENTS = {**SIZES, "lengths": ((33, 0, 67, 5), (20, 8, 90, 0))}
CASES: dict[str, dict[str, Any]] = {
    "plain": SIZES,
    "float32": {**SIZES, "dtype": "float32", "causal": True},
    "bfloat16": {**SIZES, "dtype": "bfloat16", "causal": True},
    "causal": {**SIZES, "causal": True, "num_kv_heads": 2},
    "top left": {**SIZES, "causal": True, "alignment": "top_left"},
    "rows without keys": {**SIZES, "causal": True, "q_len": 83, "kv_len": 37, "sinks": True},
    "window": {**SIZES, "window": (17, 5), "kv_len": 150},
    "a narrow window": {**SIZES, "window": (3, 0), "q_len": 130, "kv_len": 130, "batch": 1},
    "a window on the left": {**SIZES, "window": (40, None)},
    "a window on the right": {**SIZES, "window": (None, 3)},
    "a window beside the keys": {**SIZES, "window": (2, 1), "alignment": "top_left", "q_len": 83, "kv_len": 37},
    "softcap": {**SIZES, "softcap": 1.3},
    "softcap, float32": {**SIZES, "softcap": 30.0, "dtype": "float32"},
    "sinks": {**SIZES, "sinks": True, "causal": True},
    "documents": {**DOCUMENTS, "causal": True},
    "documents, top left": {**DOCUMENTS, "causal": True, "alignment": "top_left", "dtype": "bfloat16"},
    "documents, everything": {**DOCUMENTS, "window": (5, 2), "sinks": True, "softcap": 2.0, "num_heads": 3},
    "odd widths": {**SIZES, "head_dim": 21, "value_dim": 13, "dtype": "float32", "window": (40, 7)},
    "wide": {**SIZES, "head_dim": 80, "value_dim": 150, "batch": 1, "num_heads": 1},
    "as wide as it gets": {**SIZES, "head_dim": 256, "value_dim": 256, "batch": 1, "num_heads": 1, "kv_len": 40},
}


def tensor(array: Any, dtype: str) -> Any:
    return None if array is None else torch.from_numpy(np.array(array)).to(getattr(torch, dtype))


def tensors(call: Call) -> Inputs:
    learned = {name: tensor(getattr(call.inputs, name), call.dtype_of(name)) for name in ("q", "k", "v", "sinks")}
    offsets = {name: tensor(getattr(call.inputs, name), "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return Inputs(**learned, **offsets)


def moved(call: Call, tangents: Tangents) -> Tangents:
    return Tangents(*(tensor(each, call.dtype_of(name)) for name, each in zip(NAMES, tangents, strict=True)))


def computed(call: Call, tangents: Tangents) -> dict[str, np.ndarray]:
    """The kernel's results as a caller gets them: rows that see no key have their sink, and its tangent."""
    assert triton_jvp.refuses(call.spec, "sm90", None) == ()
    results = triton_jvp.jvp(call.spec, tensors(call), moved(call, tangents), primals=True)
    named = {name: each.double().numpy() for name, each in zip(("out", "lse", "dout", "dlse"), results, strict=True)}
    if call.spec.sinks:
        alone = named["lse"] == -np.inf
        assert not named["dlse"][alone].any()
        sink = reference.softmax(call.spec, call.inputs).sink[0]
        tangent = 0.0 if tangents.dsinks is None else np.asarray(tangents.dsinks)[:, None]
        named["lse"] = np.where(alone, sink, named["lse"])
        named["dlse"] = np.where(alone & (sink != -np.inf), tangent, named["dlse"])
    return named


def check(call: Call, tangents: Tangents) -> None:
    verdict = judge(call, tangents, computed(call, tangents))
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name: str) -> None:
    call = in_forward_mode(make_call(**CASES[name]))
    check(call, tangents_of(call))


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("sinks",), ("q", "v"), ("k", "sinks")])
def test_tangents_of_some_inputs(names: tuple[str, ...]) -> None:
    call = in_forward_mode(make_call(**{**SIZES, "causal": True, "sinks": True, "softcap": 2.0}))
    check(call, tangents_of(call, names))


def test_without_tangents_it_is_the_forward() -> None:
    call = in_forward_mode(make_call(**CASES["documents, everything"]))
    out, lse = triton_jvp.forward(call.spec, tensors(call))
    expected = computed(call, tangents_of(call))
    assert np.array_equal(out.double().numpy(), expected["out"])
    assert np.array_equal(np.where(np.isinf(lse), expected["lse"], lse.double().numpy()), expected["lse"])


def test_large_tangents_in_float16_stay_finite() -> None:
    """Tangents of logits beyond float16's range, beside small values."""
    call = in_forward_mode(make_call(**SIZES, scale=3.0))
    sizes = {"q": 0.01, "k": 30.0, "v": 1e-4}
    small = {name: rounded(size * getattr(call.inputs, name), "float16") for name, size in sizes.items()}
    call = replace(call, inputs=call.inputs._replace(**small))
    tangents = tangents_of(call)
    tangents = tangents._replace(dq=rounded(1e3 * tangents.dq, "float16"), dv=small["v"])
    results = computed(call, tangents)
    assert abs(results["dlse"]).max() > 65504 and np.isfinite(results["dout"]).all()
    verdict = judge(call, tangents, results)
    assert verdict.ok, verdict


def test_nan_stays_in_its_document() -> None:
    call = in_forward_mode(make_call(**CASES["documents"]))
    tangents = tangents_of(call)
    right = computed(call, tangents)
    for array in (call.inputs.k, call.inputs.v, tangents.dk, tangents.dv):
        array[-1] = np.nan  # the last key of the third document, whose queries are tokens 33 to 99
    dout = computed(call, tangents)["dout"]
    assert np.isnan(dout[99]).all()
    for clean in (slice(0, 33), slice(100, None)):
        assert np.array_equal(dout[clean], right["dout"][clean])


def test_offsets_that_lie_lead_nowhere_outside() -> None:
    call = in_forward_mode(make_call(**CASES["documents"]))
    inputs, tangents = tensors(call), moved(call, tangents_of(call))
    for lie in ([0, 99, 3, 10**6, -7], [-5, 2**31 - 1, 40, 41, 2**31 - 1], [50, 40, 30, 20, 10]):
        offsets = torch.tensor(lie, dtype=torch.int32)
        amid = [amid_nan(each) for each in inputs[1:3]]
        given = inputs._replace(k=amid[0], v=amid[1], cu_seqlens_q=inputs.cu_seqlens_q, cu_seqlens_k=offsets)
        for each in triton_jvp.jvp(call.spec, given, tangents, primals=True):
            assert not each.isnan().any()


def amid_nan(rows: Any) -> Any:
    """The same rows as the middle of a tensor that is NaN on both sides."""
    wide = rows.new_full((3 * len(rows), *rows.shape[1:]), torch.nan)
    wide[len(rows) : 2 * len(rows)] = rows
    return wide[len(rows) : 2 * len(rows)]


def test_any_strides() -> None:
    call = in_forward_mode(make_call(**CASES["causal"]))
    inputs, tangents = tensors(call), moved(call, tangents_of(call))
    expected = triton_jvp.jvp(call.spec, inputs, tangents)[2:]
    heads_outside = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in inputs[:3]]
    stepped = [each.repeat_interleave(2, -1)[..., ::2] for each in tangents[:3]]
    into = tuple(torch.full_like(each, torch.nan) for each in expected)
    results = triton_jvp.jvp(call.spec, Inputs(*heads_outside), Tangents(*stepped), into)[2:]
    assert all(map(torch.equal, results, expected)) and results[0] is into[0] and results[1] is into[1]


@pytest.mark.parametrize("fault", MISREAD)
def test_faults_are_caught(fault: str) -> None:
    call = in_forward_mode(make_call(**{**CASES["window"], "scale": 1.0, "softcap": 1.5}))
    tangents = tangents_of(call)
    assert judge(call, tangents, computed(call, tangents)).ok
    assert not judge(call, tangents, computed(misread(call, fault), tangents)).ok


def test_the_frontend_chooses_it(replace_fields: Any) -> None:
    """As on a GPU: this process lets it claim the CPU, too."""
    ran: list[Any] = []

    def jvp(spec: Any, *rest: Any, **more: Any) -> Any:
        ran.append(spec)
        return triton_jvp.jvp(spec, *rest, **more)

    claims = replace(triton_jvp.FORWARD, devices=("cpu",))
    own = ForwardModePass(claims=claims, jvp=jvp, preference={"cpu": 10})
    replace_fields(triton_jvp.BACKEND, forward_claims=claims, forward_mode=own)
    q, k, v = (torch.randn(1, 38, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    ways = torch.stack([torch.cos(q), torch.sin(q)])
    packed = {"seq_info": SeqInfo.from_lengths([20, 18]), "causal": True, "window": 7}
    for options in ({"causal": True}, packed, {"softcap": 3.0}, {"bias": torch.zeros(1, 1, 38, 38)}):
        one, other = (along(ways[0], (q, k, v), backend=name, **options) for name in (None, "math"))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [spec.packed for spec in ran] == [False, True, False], "the kernel has no bias"
    for options, batch in (({"causal": True}, 2), (packed, 1)):  # vmap folds rows, and runs documents one by one
        mapped = torch.func.vmap(lambda way, options=options: along(way, (q, k, v), **options))(ways)
        torch.testing.assert_close(mapped[1], along(ways[1], (q, k, v), **options), rtol=1e-5, atol=1e-6)
        assert ran[3].batch == batch
        ran[3:] = []


def along(way: Any, primals: Any, **options: Any) -> Any:
    """The tangent of the output along a way of q."""
    q, k, v = primals
    return torch.func.jvp(lambda q: attention(q, k, v, **options), (q,), (way,))[1]
