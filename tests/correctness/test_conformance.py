"""Tests that every backend does what it claims: drawn calls match the float64 reference or are refused with all
reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import torch
from both_frontends import (
    COMPILED_ON_GPUS,
    DEVICES,
    FRAMEWORKS,
    claimed,
    compiles_for_long,
    judge,
    judged,
    module_on,
    number_of_draws,
    only,
    reachable,
    run,
    spec_seen,
    target,
    with_every_token,
)
from frameworks import replaced
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from spec_strategies import Call, calls, compiled_calls, corners, cudnn_calls, few_numbers, make_call

import jax_frontend
import torch_frontend
from attn_core import NoBackendError, backends, explain
from attn_core.backends.support import Support
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy
from benchmarks.fit.calls import as_called

BACKENDS = backends.names()


def drawn_for(backend: str, device: str, framework: str) -> st.SearchStrategy[Call]:
    """Calls for a backend: any call, or calls of a few signatures if a compiler would compile each."""
    module = module_on(backend, device)
    claims = module.forward_claims
    if backend == "jax_xla" or compiles_for_long(backend, device):
        return compiled_calls(claims)
    without = (
        () if claims.portable_dropout else ("dropout",)
    )  # its masks differ from the oracle's, with tests of their own
    drawn = calls(claims, without=without, squares=(64, 192) if claims.approximate else ())
    if backend == "jax_cudnn":
        return st.one_of(drawn, cudnn_calls())
    compiles = module.framework == "jax" or (backend in COMPILED_ON_GPUS and device == "cuda")
    return drawn.map(few_numbers) if compiles else drawn


def conforms(framework: str, call: Call, backend: str, device: str) -> bool:
    """Whether the backend accepts the call. Asserts that the result is then correct, and else that every reason is
    named."""
    on_host = framework == "torch" and device == "cpu"
    where, spec = target(framework, device), as_called(with_every_token(call, on_host=on_host))
    selection = explain(spec, where, backend)
    if selection.backend is None:
        with pytest.raises(NoBackendError) as refusal:
            run(framework, call, backend, device)
        reasons = selection.reasons(backend)
        if framework == "jax":  # if the forward is refused, JAX does not know yet that a gradient will follow
            alone = replace(spec, needs_backward=False, bias_gradient=False, aux_gradients=())
            reasons = explain(alone, where, backend).reasons(backend) or reasons
        message = " ".join(str(refusal.value).split())  # the message is wrapped
        assert reasons and [why for why in reasons if why not in message] == []
        return False
    results = run(framework, call, backend, device)
    if where.claims(backend)[0].approximate:
        assert_near(call, results)
        return True
    verdict = judge(framework, call, results, device)
    assert verdict.ok, f"{backend} in {framework}: {call}\n{verdict}"
    return True


def assert_near(call: Call, results: Any) -> None:
    """Checks an approximate backend: no NaN, and a total error within a few percent of the reference."""
    truth = accuracy.expect(call.spec, call.inputs).truth["out"]
    out = results["out"].astype(np.float64)
    error, size = np.sqrt(((out - truth) ** 2).mean()), np.sqrt((truth**2).mean())
    assert error <= 0.08 * size + 1e-6, f"{call}: error {error:.3g} beside values of {size:.3g}"


def corners_conform(framework: str, backend: str, device: str) -> bool:
    """Whether any of the fixed corners of a backend's claims ran. Asserts that the backend conforms in all of them.

    JAX and, on a GPU, FlexAttention compile each corner, so they run a corner once: with gradients if they have them.
    """
    forward, backward = target(framework, device).claims(backend)
    ran = []
    for name, call in corners(forward).items():
        both = (call,) if framework == "jax" or compiles_for_long(backend, device) else (call.inference, call)
        for each in both if backward is not None else (call.inference,):
            try:
                ran.append(conforms(framework, each, backend, device))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
    return any(ran)


@pytest.mark.sampled
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_drawn_calls_match_the_claims(backend: str, device: str, framework: str) -> None:
    inferred, learned, missing = [], [], judged(framework, backend, device)
    if missing:
        pytest.skip(missing)
    learns = target(framework, device).claims(backend)[1] is not None
    few = module_on(backend, device).forward_claims.approximate or backend == "jax_cudnn"  # much of these is refused
    assert corners_conform(framework, backend, device) or few, "no corner was run"

    # Few calls are drawn of kernels that compile on a GPU. So calls that are refused do not count there.
    counted = few or not (backend in COMPILED_ON_GPUS and device == "cuda")

    @settings(max_examples=number_of_draws(backend, device), suppress_health_check=list(HealthCheck))
    @given(call=drawn_for(backend, device, framework))
    def every_call(call: Call) -> None:
        if not (learns and compiles_for_long(backend, device)):  # its forwards alone are in test_mask_probe
            inferred.append(conforms(framework, call.inference, backend, device))
        if learns:
            learned.append(conforms(framework, call, backend, device))
        assume(counted or any((*inferred[-1:], *learned[-1:])))

    every_call()
    share = 1 / (16 if few else 4) if counted else 0
    assert not inferred or sum(inferred) > share * len(inferred), "too few of the drawn calls were run to mean anything"
    assert not learns or sum(learned) > share / 2 * len(learned), "too few of the drawn gradients were run"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_outside_the_claims_are_refused(backend: str, framework: str, device: str) -> None:
    missing = reachable(framework, backend, device)
    call = make_call(**PLAIN)
    if missing is None:
        call = replace(call, spec=replace(call.spec, dropout=0.1, window=(None, 3), softcap=2.0, causal=True))
        missing = next(iter(explain(call.spec, target(framework, device), backend).reasons(backend)), None)
        if missing is None:
            pytest.skip(f"{backend} refuses nothing of this")
    with pytest.raises(NoBackendError) as refusal:
        run(framework, call, backend, device)
    assert explain(call.spec, target(framework, device), backend).reasons(backend)
    message = " ".join(str(refusal.value).split())  # the message is wrapped
    # The error turns "(needs PACKAGE)" into a command.
    assert all(why.partition(" (needs ")[0] in message for why in refusal.value.selection.reasons(backend))


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_automatic_choice(framework: str, device: str) -> None:
    """Some backend runs every call, and runs it correctly.

    (In JAX, dropout compiles: see SIGNATURES. On a GPU kernels may have other dropout masks.)
    """
    without = ("dropout",) if framework == "jax" or device == "cuda" else ()
    drawn = calls(without=without, on_gpu=device == "cuda")
    if framework == "jax" and device == "cuda":  # XLA compiles for every scale, softcap and window
        drawn = drawn.map(few_numbers)
    as_users_compile: list[bool] = []

    @settings(max_examples=number_of_draws("flex", device))  # on a GPU it is often the only one
    @given(call=drawn, learns=st.booleans())
    def every_call(call: Call, learns: bool) -> None:
        call = call if learns else call.inference
        selection = explain(call.spec, target(framework, device))
        assert selection.backend is not None, str(selection)
        # XLA compiles each call anew, which takes most of the time: every fourth one as users have it.
        as_users_compile.append(call.seed % 4 == 0)
        results = run(framework, call, None, device, rounding_matters=as_users_compile[-1])
        verdict = judge(framework, call, results, device)
        assert verdict.ok, f"{selection.backend} in {framework}: {call}\n{verdict}"

    every_call()
    assert any(as_users_compile), "every call was compiled as quickly as possible"


@given(call=calls())
def test_both_frontends_build_the_same_spec(call: Call) -> None:
    """Either frontend builds the drawn spec from the arguments, and every token has a document."""
    call = replace(call, spec=with_every_token(call))
    assert spec_seen("torch", call) == as_called(call.spec)
    if call.spec.bias_shape and not call.spec.bias_gradient:  # JAX's explain assumes gradients of every input
        call = replace(call, spec=replace(call.spec, bias_gradient=True))
    # Nor can it know which arrays of a function will have one; it assumes none of these.
    assert spec_seen("jax", call) == as_called(replace(call.spec, aux_gradients=()))


@pytest.mark.parametrize(("backend", "device"), claimed())
@pytest.mark.parametrize("changes", [{}, {"causal": True, "window": 3}, {"lengths": ((5, 0, 3), (2, 4, 6))}])
def test_the_expanded_gradient_of_a_sum(backend: str, device: str, changes: dict[str, Any]) -> None:
    """``out.sum().backward()`` passes an output gradient of one expanded element: every stride is 0."""
    only(({},), changes, backend, device)
    claims = module_on(backend, device).forward_claims
    fields = {**PLAIN, **changes, "dtype": "float32" if "float32" in claims.dtypes else "bfloat16"}
    fields["num_kv_heads"] = 3 if claims.grouped_heads else 6
    call = make_call(**fields, needs_backward=True)
    call = replace(call, dout=np.ones_like(call.dout))
    if explain(call.spec, target("torch", device), backend).backend is None:
        pytest.skip(f"{backend} does not run this")
    kind = getattr(torch, call.spec.dtype)
    arrays = {name: torch.from_numpy(array).to(device, kind).requires_grad_() for name, array in call.arrays().items()}
    info = torch_frontend.SeqInfo.from_lengths(*changes["lengths"]) if call.spec.packed else None
    out = torch_frontend.attention(**arrays, **call.options, seq_info=info, backend=backend)
    out.sum().backward()
    gradients = {f"d{name}": tensor.grad.double().cpu().numpy() for name, tensor in arrays.items()}
    verdict = judge("torch", call, {"out": out.detach().double().cpu().numpy(), **gradients})
    assert verdict.ok, verdict


# The suite must be able to fail: it catches a backend that misreads its call.

PLAIN = {
    **{"batch": 2, "q_len": 7, "kv_len": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 13, "value_dim": 13},
    "dtype": "float32",
}
BANDED = {**PLAIN, "causal": True, "window": (3, 0)}
DOCUMENTS = {**PLAIN, "lengths": ((5, 2, 4), (3, 6, 5)), "max_len_q": 11, "max_len_k": 14}


def misread(**changes: Callable[[AttentionSpec], Any]) -> Callable[..., tuple[AttentionSpec, Inputs]]:
    """A fault that computes another spec on the same inputs."""
    return lambda spec, inputs: (replace(spec, **{name: change(spec) for name, change in changes.items()}), inputs)


def document_boundary(spec: AttentionSpec, inputs: Inputs) -> tuple[AttentionSpec, Inputs]:
    """A fault that moves the first boundary between documents by one token."""

    def moved(offsets: Any) -> Any:
        if isinstance(offsets, jax.Array):
            return offsets.at[1].add(1)
        return offsets + torch.tensor([at == 1 for at in range(len(offsets))], dtype=torch.int32).to(offsets.device)

    cu_q, cu_k = moved(inputs.cu_seqlens_q), moved(inputs.cu_seqlens_k)
    return spec, inputs._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


FAULTS: dict[str, tuple[dict[str, Any], Any]] = {
    "window one wider": (BANDED, misread(window=lambda spec: (spec.window[0] + 1, spec.window[1]))),
    "window one narrower": (BANDED, misread(window=lambda spec: (spec.window[0] - 1, spec.window[1]))),
    "window one further right": ({**PLAIN, "window": (2, 1)}, misread(window=lambda spec: (2, 2))),
    "alignment flipped": ({**PLAIN, "causal": True}, misread(alignment=lambda spec: "top_left")),
    "scale one percent off": (PLAIN, misread(scale=lambda spec: spec.scale * 1.01)),
    "softcap forgotten": ({**PLAIN, "softcap": 5.0}, misread(softcap=lambda spec: None)),
    "document boundary off by one": (DOCUMENTS, document_boundary),
    "heads of groups swapped": (PLAIN, None),
}


def faulty(module: Any, fault: Any) -> tuple[Any, Any]:
    """A backend's forward and backward with a fault in their arguments, their results or their map of heads."""
    forward, backward = module.forward, module.backward
    if fault is nan_without_keys:
        return nan_without_keys(forward, backward)
    if fault is not None:
        return (
            lambda spec, inputs, *into: forward(*fault(spec, inputs), *into),
            lambda spec, inputs, *rest: backward(*fault(spec, inputs), *rest),
        )

    def swap(spec: AttentionSpec, *arrays: Any) -> list[Any]:  # head h reads kv head h % kv_heads, not h // group
        order = np.arange(spec.num_heads).reshape(spec.group_size, spec.num_kv_heads).T.ravel()
        return [array if array is None else array[..., order, :] for array in arrays]  # lse: [..., heads, rows]

    def unswap(spec: AttentionSpec, array: Any) -> Any:
        order = np.arange(spec.num_heads).reshape(spec.num_kv_heads, spec.group_size).T.ravel()
        return array[..., order, :]

    def swapped_forward(spec: AttentionSpec, inputs: Inputs, *into: Any) -> tuple[Any, Any]:
        out, lse = forward(spec, inputs._replace(q=swap(spec, inputs.q)[0]))
        return unswap(spec, out), None if lse is None else unswap(spec, lse)

    def swapped_backward(spec: AttentionSpec, inputs: Inputs, *rest: Any) -> Gradients:
        q, *rest = swap(spec, inputs.q, *rest[:4])
        actual = backward(spec, inputs._replace(q=q), *rest)
        return actual._replace(dq=unswap(spec, actual.dq))

    return swapped_forward, swapped_backward


@contextmanager
def planted_fault(backend: str, fault: Any, where: str, device: str = "cpu") -> Iterator[None]:
    """A backend with a fault in its forward, its backward or both."""
    module = module_on(backend, device)
    forward, backward = faulty(module, fault)
    halves = {"forward": forward, "backward": backward}
    faults = halves if where == "both" else {where: halves[where]}
    with replaced(module, shortcut=None, **faults):
        yield


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_planted_faults_are_caught(framework: str, where: str, name: str) -> None:
    changes, fault = FAULTS[name]
    for seed in range(3):
        call = make_call(seed, **changes, needs_backward=True, return_lse=True)
        with planted_fault("math", fault, where):
            verdict = judge(framework, call, run(framework, call, "math"))
            with pytest.raises(AssertionError, match="WRONG"):
                conforms(framework, call, "math", "cpu")
        assert not verdict.ok
        wrong = {quantity.name for quantity in verdict.quantities if quantity.use > 1}
        assert wrong & ({"dq", "dk", "dv"} if where == "backward" else {"out"}), verdict
        if where == "backward":
            assert not wrong & {"out", "lse"}, verdict
        healthy = judge(framework, call, run(framework, call, "math"))
        assert healthy.ok, healthy


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught_in_xla(name: str) -> None:
    changes, fault = FAULTS[name]
    call = make_call(**changes, needs_backward=True, return_lse=True)
    with planted_fault("jax_xla", fault, "both"):
        verdict = judge("jax", call, run("jax", call, "jax_xla", rounding_matters=False))
    assert {"out", "dq", "dk", "dv"} <= {quantity.name for quantity in verdict.quantities if quantity.use > 1}, verdict


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("backend", "device"), claimed(None, "cuda"))
def test_planted_faults_are_caught_in_every_kernel(
    backend: str,
    device: str,
    name: str,
) -> None:
    """On a GPU, in the most precise dtype that the kernel takes."""
    only(("window one wider",), name, backend, device)
    framework = module_on(backend, device).framework
    dtypes = [kind for kind in ("float32", "float16") if kind in module_on(backend, device).forward_claims.dtypes]
    changes, fault = FAULTS[name]
    sizes = {} if "lengths" in changes else {"q_len": 61, "kv_len": 67}
    peaked = {"scale": 0.5}  # logits far apart: if all weights are alike, one percent is too little for float16 to show
    widths = {"head_dim": 64, "value_dim": 64, "dtype": dtypes[0]}
    call = make_call(**{**changes, **sizes, **peaked, **widths}, needs_backward=True)
    where = target(framework, device)
    requested = next((c for c in (call, call.inference) if explain(c.spec, where, backend).backend), None)
    if requested is None or where.claims(backend)[0].approximate:
        pytest.skip(f"{backend} does not run this, or promises no precision")
    if name == "alignment flipped" and "top_left" not in where.claims(backend)[0].alignments:
        pytest.skip(f"{backend} knows one alignment, and cannot be told of another")
    with planted_fault(backend, fault, "both", device):
        verdict = judge(framework, requested, run(framework, requested, backend, device), device)
    assert {"out", *(f"d{x}" for x in requested.learned)} <= {q.name for q in verdict.quantities if q.use > 1}, verdict
    healthy = judge(framework, requested, run(framework, requested, backend, device), device)
    assert healthy.ok, healthy


def nan_without_keys(run_forward: Any, run_backward: Any) -> tuple[Any, Any]:
    """A backend's forward and backward that leave NaN in rows that see no key."""

    def rows_without_keys(lse: Any) -> Any:  # [..., heads, rows] -> [..., rows, heads, 1]
        return (lse == float("-inf")).transpose(-1, -2)[..., None]

    def forward(spec: AttentionSpec, inputs: Inputs, *into: Any) -> tuple[Any, Any]:
        out, lse = run_forward(replace(spec, return_lse=True), inputs, *into)
        return out.masked_fill(rows_without_keys(lse), float("nan")), lse

    def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, *rest: Any) -> Gradients:
        actual = run_backward(spec, inputs, out, lse, *rest)
        return actual._replace(dq=actual.dq.masked_fill(rows_without_keys(lse), float("nan")))

    return forward, backward


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", ["math", "sdpa_flash"])
def test_nan_in_rows_without_keys_fails_the_claims(
    backend: str,
    framework: str,
    where: str,
) -> None:
    with (
        planted_fault(backend, nan_without_keys, where),
        pytest.raises(AssertionError, match=r"^rows without keys: "),
    ):
        test_drawn_calls_match_the_claims(backend, "cpu", framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_honest_backend_with_few_claims_passes(framework: str) -> None:
    """A new backend that claims no grouped heads, for example: draws follow the claims, so most of them run."""
    few = Support(
        kernel="a new kernel",
        devices=("cpu",),
        dtypes=("float32",),
        alignments=("bottom_right", "top_left"),
        causal=True,
        window=True,
        lse=True,
        deterministic=True,
    )
    with replaced(module_on("math", "cpu"), forward_claims=few, backward_claims=few):
        test_drawn_calls_match_the_claims("math", "cpu", framework)


def test_refusals_name_every_reason() -> None:
    call = make_call(**{**PLAIN, "value_dim": 5, "softcap": 3.0}, needs_backward=True, return_lse=True)
    for attention, arrays in (
        (torch_frontend.attention, {name: torch.from_numpy(array).float() for name, array in call.arrays().items()}),
        (jax_frontend.attention, {name: jax.numpy.float32(array) for name, array in call.arrays().items()}),
    ):
        with pytest.raises(NoBackendError) as refusal:
            attention(**arrays, **call.options, backend="sdpa_flash")
        for words in ("value_dim=5", "softcap=3.0"):
            assert f"{words}: the aten CPU flash kernel" in str(refusal.value)
