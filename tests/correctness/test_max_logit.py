"""``return_max_logit`` in both frontends, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_maximum_reference as row_maximum
import torch
from both_frontends import FRAMEWORKS, attend
from frameworks import BOTH, JAX, TORCH, Framework
from hypothesis import given, settings
from spec_strategies import MISREAD, Call, calls, corners, make_call, misread
from torch.utils.flop_counter import FlopCounterMode

import attn_core
import jax_frontend
import torch_frontend
from attn_core import SeqInfo, SpecError, Target, backends
from attn_core.backends import jax_xla, math
from attn_core.backends.shared import kernel_programs
from attn_core.selection import row_maximum as choice
from jax_frontend.dispatch import max_logit

pytestmark = pytest.mark.sampled

PLAIN = {"batch": 2, "q_len": 9, "kv_len": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "value_dim": 8}
PLAIN |= {"dtype": "float32"}
LARGE = {**PLAIN, "q_len": 1001, "kv_len": 1001, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "value_dim": 128}
LARGE |= {"dtype": "bfloat16"}


def run(framework: str, call: Call, *, device: str = "cpu", **options: Any) -> list[np.ndarray]:
    """The results of ``attention``, with ``return_max_logit`` unless the options say otherwise."""
    return attend(framework, call, device, **{"return_max_logit": True} | options)


def check(framework: str, call: Call, device: str = "cpu") -> None:
    *results, top = run(framework, call, device=device)
    assert len(results) == 1 + call.spec.return_lse
    assert str(top.dtype) == call.spec.lse_dtype
    assert row_maximum.is_right(top, *row_maximum.max_logit(call.spec, call.inputs)), call


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", corners(math.FORWARD))
def test_corners(name: str, framework: str) -> None:
    check(framework, corners(math.FORWARD)[name])


def test_drawn_calls_in_torch() -> None:
    @settings(max_examples=60)
    @given(call=calls(math.FORWARD))
    def every_call(call: Call) -> None:
        check("torch", call)

    every_call()


CASES: dict[str, dict[str, Any]] = {
    "everything dense": {
        **{**PLAIN, "softcap": 2.0, "window": (4, 3), "bias_shape": (1, 6, 9, 11), "mask_shape": (2, 1, 9, 11)},
        **{"alibi_shape": (6,), "sinks": True, "dropout": 0.3, "return_lse": True},
    },
    "documents": {**PLAIN, "lengths": ((5, 0, 4), (3, 6, 5)), "causal": True, "return_lse": True},
    "tokens behind the last document": {**PLAIN, "lengths": ((5, 4), (3, 6)), "tail": (3, 2), "one_row": True},
    "key ranges": {**PLAIN, "key_ranges_shape": (2, 3, 11, 2, 2), "dtype": "bfloat16"},
    "several blocks": {**PLAIN, "q_len": 300, "kv_len": 1200, "batch": 1, "causal": True, "window": (700, None)},
    "no queries": {**PLAIN, "q_len": 0},
    "no keys": {**PLAIN, "kv_len": 0},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, framework: str) -> None:
    check(framework, make_call(**CASES[name]))


ON_A_GPU: dict[str, dict[str, Any]] = {
    "causal": {**LARGE, "causal": True},
    "softcap, window": {**LARGE, "softcap": 20.0, "window": (200, 0), "dtype": "float16"},
    "float32": {**LARGE, "dtype": "float32", "head_dim": 64, "value_dim": 64},
    "wide": {**LARGE, "head_dim": 192, "q_len": 300, "kv_len": 555},
    "documents": {**LARGE, "lengths": ((300, 0, 701), (300, 5, 701)), "causal": True},
    "tables": {**LARGE, "mask_shape": (2, 1, 1001, 1001), "alibi_shape": (4,), "key_ranges_shape": (1, 2, 1001, 2, 2)},
}


@pytest.mark.cuda
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name: str, framework: str) -> None:
    check(framework, make_call(**ON_A_GPU[name]), "cuda")


@pytest.mark.cuda
def test_xla_launches_the_pass_without_python() -> None:
    q, k, v = (jnp.asarray(each, jnp.bfloat16) for each in arrays(JAX))
    program = jax.jit(lambda q: jax_frontend.attention(q, k, v, return_max_logit=True)[1]).lower(q).compile()
    assert kernel_programs.TARGET in program.as_text()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_faults_are_caught(framework: str) -> None:
    call = make_call(**PLAIN, window=(2, 1), softcap=1.5, scale=1.0)
    truth = row_maximum.max_logit(call.spec, call.inputs)
    assert row_maximum.is_right(run(framework, call)[-1], *truth)
    for fault in MISREAD:
        assert not row_maximum.is_right(run(framework, misread(call, fault))[-1], *truth), fault


def arrays(framework: Framework) -> list[Any]:
    random = np.random.default_rng(3)
    shapes = ((2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8))
    return [framework.array(random.standard_normal(shape), "float32") for shape in shapes]


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_order_and_layout(framework: Framework) -> None:
    attention, qkv = framework.frontend.attention, arrays(framework)
    out, lse, top = attention(*qkv, return_lse=True, return_max_logit=True)
    assert [tuple(each.shape) for each in (out, lse, top)] == [(2, 9, 4, 8), (2, 4, 9), (2, 4)]
    assert (lse > lse.min()).any() and bool((np.asarray(lse).max(-1) >= np.asarray(top)).all())
    swapped = [each.swapaxes(1, 2) for each in qkv]
    heads_first = attention(*swapped, return_lse=True, return_max_logit=True, layout="bhsd")
    expected = (out.swapaxes(1, 2), lse, top)
    assert all(np.array_equal(*pair) for pair in zip(heads_first, expected, strict=True))
    alone = attention(*qkv, return_max_logit=True, backend="math")
    assert len(alone) == 2 and np.allclose(alone[1], top, rtol=1e-6)


def test_nested_tensors() -> None:
    rows = [[torch.randn(length, heads, 8) for length in (3, 5)] for heads in (4, 2, 2)]
    nested = [torch.nested.nested_tensor(each, layout=torch.jagged) for each in rows]
    out, lse, top = torch_frontend.attention(*nested, return_lse=True, return_max_logit=True)
    assert out.is_nested and lse.shape == (4, 8) and top.shape == (4,)
    packed = [torch.cat(each) for each in rows]
    other = torch_frontend.attention(*packed, seq_info=SeqInfo.from_lengths([3, 5]), return_max_logit=True)
    assert torch.equal(top, other[1])


def test_no_gradient_passes_it_in_torch() -> None:
    q, k, v = (each.requires_grad_() for each in arrays(TORCH))
    out, top = torch_frontend.attention(q, k, v, return_max_logit=True, causal=True)
    assert out.requires_grad and not top.requires_grad
    out.sum().backward()
    expected = q.grad.clone()
    q.grad = None
    torch_frontend.attention(q, k, v, causal=True).sum().backward()
    assert torch.equal(q.grad, expected)


def test_transforms_of_torch() -> None:
    q, k, v = arrays(TORCH)

    def attend(q: torch.Tensor) -> Any:
        return torch_frontend.attention(q, k, v, return_max_logit=True, causal=True)

    top = attend(q)[1]
    several = torch.stack([q, 2 * q, -q])
    assert torch.allclose(torch.func.vmap(attend)(several)[1], torch.stack([attend(each)[1] for each in several]))
    gradient, aux = torch.func.grad(lambda q: (sum(each.sum() for each in attend(q)), attend(q)[1]), has_aux=True)(q)
    assert torch.equal(aux, top)
    assert torch.allclose(gradient, torch.func.grad(lambda q: attend(q)[0].sum())(q))
    _, moved = torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    assert moved[0].any() and not moved[1].any()

    def documents(q: torch.Tensor) -> Any:
        info = SeqInfo.from_lengths([4, 5], [5, 6])
        return torch_frontend.attention(q, k[0], v[0], seq_info=info, return_max_logit=True)[1]

    assert torch.allclose(torch.func.vmap(documents)(q), torch.stack([documents(each) for each in q]))


def test_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch_frontend.attention, fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v = arrays(TORCH)
    for length in (9, 7):
        some = q[:, :length].requires_grad_(), k, v
        results = compiled(*some, return_max_logit=True, return_lse=True, window=(3, 2))
        expected = torch_frontend.attention(*some, return_max_logit=True, return_lse=True, window=(3, 2))
        assert torch.equal(results[0], expected[0]) and torch.equal(results[1], expected[1])
        assert torch.allclose(results[2], expected[2], rtol=1e-6) and not results[2].requires_grad
    torch.library.opcheck(torch.ops.attn.max_logit.default, _op_arguments(q, k))


def _op_arguments(q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
    from attn_core.call.options import Options
    from attn_core.call.tensors import Inputs
    from torch_frontend.dispatch.op_arguments import OpOptions, to_call

    plain = OpOptions(Options(causal=True, window=(None, None)), False, False, None)
    return to_call(Inputs(q.detach(), k, k), plain)


def test_flops() -> None:
    """The pass has half the products of the forward."""
    q, k, v = arrays(TORCH)
    counts = []
    for options in ({}, {"return_max_logit": True}):
        with FlopCounterMode(display=False) as counter:
            torch_frontend.attention(q, k, v, **options)
        counts.append(counter.get_total_flops())
    assert 0 < 3 * counts[0] == 2 * counts[1]


def test_under_checks_and_autocast() -> None:
    qkv = arrays(TORCH)
    expected = torch_frontend.attention(*qkv, return_max_logit=True)[1]
    with attn_core.checks():
        for backend in ("math", "sdpa_flash"):
            top = torch_frontend.attention(*qkv, return_max_logit=True, backend=backend)[1]
            assert torch.allclose(top, expected, rtol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        out, top = torch_frontend.attention(*qkv, return_max_logit=True)
    assert out.dtype is torch.bfloat16 and top.dtype is torch.float32
    rounded = torch_frontend.attention(*(each.bfloat16() for each in qkv), return_max_logit=True)[1]
    assert torch.equal(top, rounded)


def test_transforms_of_jax() -> None:
    q, k, v = arrays(JAX)

    def attend(q: jax.Array) -> Any:
        return jax_frontend.attention(q, k, v, return_max_logit=True, causal=True)

    top = attend(q)[1]
    assert np.array_equal(jax.jit(attend)(q)[1], top)
    several = jnp.stack([q, 2 * q, -q])
    assert np.allclose(jax.vmap(attend)(several)[1], jnp.stack([attend(each)[1] for each in several]), rtol=1e-6)
    both = [jax.grad(lambda q, count=count: sum(each.sum() for each in attend(q)[:count]))(q) for count in (1, 2)]
    assert np.array_equal(*both)
    remat = jax.checkpoint(lambda q: attend(q)[0].sum(), policy=jax.checkpoint_policies.nothing_saveable)
    assert np.allclose(jax.grad(remat)(q), both[0], rtol=1e-6)
    assert not jax.jvp(attend, (q,), (q,))[1][1].any()

    def body(total: jax.Array, q: jax.Array) -> Any:
        return jnp.maximum(total, attend(q)[1]), None

    largest = jax.lax.scan(body, jnp.full((2, 4), -jnp.inf), several)[0]
    assert np.allclose(largest, jnp.stack([attend(each)[1] for each in several]).max(0), rtol=1e-6)


def test_jax_export() -> None:
    batch, length = jax.export.symbolic_shape("batch, length")
    shapes = [jax.ShapeDtypeStruct((batch, length, heads, 8), jnp.float32) for heads in (4, 2, 2)]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax_frontend.attention(q, k, v, return_max_logit=True, backend="jax_xla")

    program = jax.export.export(jax.jit(attend))(*shapes)
    _, k, v = arrays(JAX)
    results = program.call(k.repeat(2, 2), k, v)
    assert np.allclose(results[1], attend(k.repeat(2, 2), k, v)[1], rtol=1e-6)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_explain_names_what_computes_it(framework: Framework) -> None:
    frontend, qkv = framework.frontend, arrays(framework)
    first = {"torch": "math", "jax": "jax_xla"}[framework.name]
    selection = frontend.explain(*qkv, return_max_logit=True)
    assert selection.max_logit == f"by a second pass over q and k: {first}"
    assert f"max_logit: {selection.max_logit}" in str(selection)
    assert frontend.explain(*qkv).max_logit is None and "max_logit" not in str(frontend.explain(*qkv))
    kernel = frontend.explain(*qkv, return_max_logit=True, needs_backward=True, backend=first)
    assert str(kernel.max_logit).startswith("by the kernel of the output")
    if framework is JAX:  # a few queries
        other = frontend.explain(*qkv, return_max_logit=True, backend="jax_xla")
        assert other.max_logit == "by a second pass over q and k: jax_xla"


OWN = {
    "few keys": PLAIN | {"q_len": 17, "kv_len": 17},
    "softcap, in a few blocks": PLAIN | {"q_len": 300, "kv_len": 1100, "batch": 1, "softcap": 2.0, "num_heads": 3},
    "documents": {**PLAIN, "lengths": ((50, 0, 4), (3, 60, 5)), "causal": True, "return_lse": True, "sinks": True},
    "rows without keys": {**PLAIN, "q_len": 43, "kv_len": 19, "causal": True, "needs_backward": True},
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("framework", "backend"), [("torch", "math"), ("jax", "math"), ("jax", "jax_xla")])
def test_backends_that_have_it_need_no_pass(
    name: str, framework: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output and the log-sum-exp have the bits of a call without it."""
    call = make_call(**OWN[name])

    def refuse(*_: Any) -> None:
        raise AssertionError("a second pass")

    monkeypatch.setattr(choice, "choose", refuse)
    if framework == "jax":
        monkeypatch.setattr(jax_xla, "MAX_SCORES", 0 if "blocks" in name else 2**22)
        monkeypatch.setattr(jax_xla, "NOTHING_TO_SKIP", {"training": 1, "forward": 1})
    *results, top = run(framework, call, backend=backend)
    assert row_maximum.is_right(top, *row_maximum.max_logit(call.spec, call.inputs))
    usual = run(framework, call, backend=backend, return_max_logit=False)
    assert all(np.array_equal(*pair) for pair in zip(results, usual, strict=True))


def test_gradients_beside_a_backend_that_has_it() -> None:
    """They have the bits of a call without it."""
    q, k, v = arrays(JAX)

    def total(q: jax.Array, **options: Any) -> Any:
        results = jax_frontend.attention(q, k, v, backend="jax_xla", causal=True, return_lse=True, **options)
        return results[0].sum() + results[1].max(), results[2:]

    gradient, (top,) = jax.jit(jax.grad(lambda q: total(q, return_max_logit=True), has_aux=True))(q)
    assert np.array_equal(gradient, jax.jit(jax.grad(total, has_aux=True))(q)[0]) and top.shape == (2, 4)
    q, k, v = arrays(TORCH)
    q.requires_grad_()
    gradients = []
    for options in ({"return_max_logit": True}, {}):
        results = torch_frontend.attention(q, k, v, backend="math", causal=True, return_lse=True, **options)
        assert [each.requires_grad for each in results] == [True, True, False][: len(results)]
        gradients += torch.autograd.grad(results[0].sum() + results[1].max(), q)
    assert torch.equal(*gradients)


def test_a_gpu_takes_the_triton_kernel() -> None:
    spec = make_call(**{**PLAIN, "causal": True, "mask_shape": (1, 1, 9, 11)}).spec
    for framework in FRAMEWORKS:
        assert choice.choose(spec, Target(framework, "sm90")).backend == "triton_jvp"
    functions = replace(spec, dtype="float64")
    expected = "dtype float64: the Triton forward-mode kernel takes float32, bfloat16, float16"
    for framework, name in {"torch": "math", "jax": "jax_xla"}.items():
        other = choice.choose(functions, Target(framework, "sm90"))
        assert other.backend == name and expected in str(other)
    wide = replace(spec, value_dim=512, sinks=True, dropout=0.1)  # nothing of these changes a logit
    assert choice.choose(wide, Target("torch", "sm90")).backend == "triton_jvp"
    assert choice.choose(spec, Target("jax", "tpu")).backend == "jax_xla"
    assert choice.choose(spec, Target("torch", "gfx942")).backend == "math"


def test_rows_that_no_kernel_writes_are_hidden() -> None:
    """Traced offsets may say that a document is longer than the caller did; XLA's memory there is anything."""
    spec = make_call(**{**PLAIN, "batch": 1, "q_len": 12, "lengths": ((5, 0, 3, 4), (4, 3, 2, 2)), "causal": True}).spec
    rows = jnp.arange(24.0).reshape(2, 12)
    whole = max_logit.within_documents(spec, rows, jnp.asarray([0, 5, 5, 8, 12], jnp.int32))
    assert spec.max_len_q == 5 and (whole == rows).all()
    lied = jax.jit(partial(max_logit.within_documents, spec))(
        rows.at[:, 6:9].set(jnp.nan), jnp.asarray([0, 1, 9, 9, 12], jnp.int32)
    )
    assert (lied[:, 6:9] == -jnp.inf).all() and (lied == rows).sum() == 18


def test_a_pass_of_a_kernel_over_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a kernel behind the bridge computes the rows: here it is ``math``."""
    call = make_call(**{**PLAIN, "batch": 1, "q_len": 12, "lengths": ((5, 0, 3, 4), (4, 3, 2, 2)), "causal": True})
    first = replace(Target("jax", "cpu"), unavailable=(("jax_xla", "not now"),))
    chosen: list[str | None] = []

    def choose(spec: Any, device: str) -> Any:
        found = choice.choose(spec, first)
        chosen.append(found.backend)
        return found

    monkeypatch.setattr(max_logit, "_choice", choose)
    results = run("jax", call, backend="sdpa_flash")
    assert chosen == ["math"] and row_maximum.is_right(results[-1], *row_maximum.max_logit(call.spec, call.inputs))


def test_every_candidate_has_a_row_maximum() -> None:
    for framework, kind in product(FRAMEWORKS, backends.kinds_in_order()):
        for name in backends.row_maximum_order(framework, kind):
            assert backends.load(name, "cpu" if kind == backends.ANY else kind).row_maximum is not None


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_bad_values_are_named(framework: Framework) -> None:
    frontend, qkv = framework.frontend, arrays(framework)
    for function in (frontend.attention, frontend.explain):
        for value in (1, None, "yes"):
            with pytest.raises(SpecError, match=r"return_max_logit=.*expected True or False"):
                function(*qkv, return_max_logit=value)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_functions_without_it_say_so(framework: Framework) -> None:
    frontend = framework.frontend
    needed = {"paged_attention": ("block_table", "seq_lens"), "context_parallel_attention": ("mesh",)}
    for name in (*needed, "attention_qkvpacked"):
        rest = dict.fromkeys(needed.get(name, ()))
        inputs = arrays(framework)[: 3 if rest else 1]
        with pytest.raises(TypeError, match=rf"return_max_logit: {name}\(\) has no such argument; attention\(\) has"):
            getattr(frontend, name)(*inputs, **rest, return_max_logit=True)


def test_pages_are_refused() -> None:
    from attn_core.call.spec import PagedKV

    spec = make_call(**PLAIN, lengths=((5, 4), (3, 6))).spec
    paged = replace(spec, kv_len=16, max_len_k=None, paged=PagedKV(num_pages=4, page_size=8, width=2))
    with pytest.raises(SpecError, match="return_max_logit=True: expected keys that are not in pages"):
        choice.choose(paged, Target("torch", "cpu"))
