"""Tests the gradients of the arrays that score functions read: in both frontends, under transformations, on meshes, and
that what has none says so. ``test_reference`` has those of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import cpu_meshes
import jax
import jax.numpy as jnp
import torch
from both_frontends import judge, run
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from spec_strategies import LEARNED, LEARNED_SIZES, learned_call, make_call

import jax_frontend
import torch_frontend
from attn_core import NoBackendError, SpecError, explain
from attn_core.backends import jax_xla
from attn_core.call.functions import lookup_slopes
from attn_core.expressions import trace_score
from attn_core.expressions.tracing import Aux
from attn_core.selection import Target

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize(("framework", "backend"), [("torch", "math"), ("jax", "math"), ("jax", "jax_xla")])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_match_the_reference(name: str, framework: str, backend: str) -> None:
    all_options = {"causal": True, "softcap": 2.0, "sinks": True}
    for fields in ({}, all_options, {"dtype": "bfloat16", "aux_dtype": "float32"}):
        call = learned_call(name, **fields)
        results = run(framework, call, backend, rounding_matters=bool(fields))  # with options as users compile
        verdict = judge(framework, call, results)
        assert verdict.ok, verdict


# FlexAttention compiles for half a minute: it has one function of each kind. In JAX, which calls it back, it has the
# bits that it has in torch (test_bit_equality).
OF_FLEX = ("relative bias", "two arrays")
OF_XLA = ("relative bias", "learned slopes", "beyond the array", "hides", "one number")
"""The functions of ``jax_xla`` in a GPU's suite, where XLA compiles what it compiles on a CPU."""
ON_A_GPU = [(name, "jax", "jax_xla") for name in LEARNED] + [(name, "torch", "flex") for name in OF_FLEX]


@pytest.mark.cuda
@pytest.mark.on_gpus(only=lambda name, backend, **_: backend == "flex" or name in OF_XLA)
@pytest.mark.parametrize(("name", "framework", "backend"), ON_A_GPU)
def test_gradients_on_a_gpu_match_the_reference(name: str, framework: str, backend: str) -> None:
    sizes = {"q_len": 300, "kv_len": 300, "head_dim": 64, "value_dim": 64}
    plain, options = {"dtype": "float32"}, {"dtype": "bfloat16", "causal": True, "softcap": 2.0, "sinks": True, **sizes}
    for fields in (options,) if backend == "flex" else (plain, options):
        call = learned_call(name, aux_dtype="float32", **fields)
        verdict = judge(framework, call, run(framework, call, backend, "cuda"), "cuda")
        assert verdict.ok, verdict


@pytest.mark.slow
@settings(max_examples=8)
@given(st.data())
def test_blocks_and_documents_add_up(data: Any) -> None:
    """XLA's blocked maths, with blocks smaller than the call; the blocks of math; packed documents."""
    name = data.draw(st.sampled_from(sorted(set(LEARNED) - {"two arrays"})))
    lengths = data.draw(st.sampled_from([None, ((3, 4), (3, 4)), ((5, 0, 2), (4, 1, 2))]))
    options: dict[str, Any] = {"causal": data.draw(st.booleans()), "window": data.draw(st.sampled_from([None, (2, 1)]))}
    if data.draw(st.booleans()):
        options["bias_shape"], options["bias_gradient"] = (1, 4, 7, 1), True
    if lengths is not None:
        function, shapes = LEARNED[name]
        aux = tuple(Aux(shape, "float64") for shape in shapes)
        tree = trace_score(function, aux).tree
        sizes = {key: value for key, value in LEARNED_SIZES.items() if key not in ("batch", "q_len", "kv_len")}
        call = make_call(4, lengths, **sizes, **options, score_mod=tree, aux=aux)
        numbers = tuple(sorted({row.value for row in tree.rows if row.op == "lookup"}))
        call = replace(call, spec=replace(call.spec, aux_gradients=numbers))
    else:
        call = learned_call(name, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_xla, "MAX_SCORES", 0)
        patch.setattr(jax_xla, "LARGEST_BLOCKS", dict.fromkeys(("cpu", "any"), jax_xla.BlockSizes(4, 3)))
        jax.clear_caches()
        assert judge("jax", call, run("jax", call, "jax_xla")).ok
    jax.clear_caches()
    assert judge("torch", call, run("torch", call, "math")).ok


@pytest.mark.parametrize("fault", ["no gradient of the second lookup", "of another head", "one place too late"])
def test_wrong_gradients_are_noticed(fault: str) -> None:
    call = learned_call("two arrays" if "second" in fault else "relative bias", dtype="float32", aux_dtype="float32")
    results = run("torch", call, "math")
    assert judge("torch", call, results).ok
    if fault == "no gradient of the second lookup":
        (node, _), *_ = lookup_slopes(call.spec.score_mod, (0,))
        only = replace(
            call.spec, score_mod=trace_score(lambda s, b, h, q, k, w, t: s * w[b, k] + t[q], call.spec.aux).tree
        )
        wrong = run("torch", replace(call, spec=only), "math")["daux0"]
        assert node.value == 0
    else:
        wrong = results["daux0"][::-1] if fault == "of another head" else np.roll(results["daux0"], 1, -1)
    assert not judge("torch", call, results | {"daux0": wrong}).ok


def arguments() -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(5)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in ((2, 7, 4, 8), (2, 7, 2, 8), (4, 13)))


RELATIVE: Any = LEARNED["relative bias"][0]
TRACED = trace_score(RELATIVE, (Aux((4, 13), "float32"),))


def loss(q: Any, k: Any, table: Any, **options: Any) -> Any:
    frontend = torch_frontend if isinstance(q, torch.Tensor) else jax_frontend
    options = {"score_mod": TRACED, "aux": (table,)} | options
    return (frontend.attention(q, k, k, causal=True, **options) ** 2).sum()


def test_every_way_in_torch_gives_one_gradient() -> None:
    q, k, table = map(torch.from_numpy, arguments())
    leaf = table.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(q, k, leaf), leaf)
    (alone,) = torch.autograd.grad(loss(q.clone().requires_grad_(), k, leaf), leaf)
    assert torch.equal(alone, expected) and expected.abs().max() > 0.1
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(q, k, leaf), leaf)[0], expected)
    of_table = torch.func.grad(loss, argnums=2)
    assert torch.equal(of_table(q, k, table), expected)
    many = torch.func.vmap(of_table, in_dims=(None, None, 0))(q, k, torch.stack([table, 2 * table]))
    torch.testing.assert_close(many[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(many[1], of_table(q, k, 2 * table), rtol=1e-5, atol=1e-6)
    captured = lambda s, b, h, q, k: s + leaf[h, q - k + 6]  # noqa: E731
    assert torch.equal(torch.autograd.grad(loss(q, k, leaf, score_mod=captured, aux=()), leaf)[0], expected)
    rows = torch.func.vmap(lambda q, k: of_table(q[None], k[None], table))(q, k)
    torch.testing.assert_close(rows.sum(0), expected, rtol=1e-5, atol=1e-5)
    step = torch.utils.checkpoint.checkpoint(loss, q, k, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(step, leaf)[0], expected)
    with pytest.raises(RuntimeError, match="second"):
        (first,) = torch.autograd.grad(loss(q, k, leaf), leaf, create_graph=True)
        first.sum().backward()


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_every_way_in_jax_gives_one_gradient(backend: str, four_devices: None) -> None:
    q, k, table = map(jnp.asarray, arguments())
    run = lambda q, k, table: loss(q, k, table, backend=backend)  # noqa: E731
    expected = jax.jit(jax.grad(run, argnums=2))(q, k, table)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(jax.grad(run, argnums=2)(q, k, table), expected, **close)
    np.testing.assert_allclose(jax.grad(jax.remat(run), argnums=2)(q, k, table), expected, **close)
    many = jax.vmap(jax.grad(run, argnums=2), (None, None, 0))(q, k, jnp.stack([table, 2 * table]))
    np.testing.assert_allclose(many[0], expected, **close)
    np.testing.assert_allclose(many[1], jax.grad(run, argnums=2)(q, k, 2 * table), **close)
    rows = jax.vmap(lambda q, k: jax.grad(run, argnums=2)(q[None], k[None], table))(q, k)
    np.testing.assert_allclose(rows.sum(0), expected, **close)
    mesh = cpu_meshes.mesh((2, 2), ("data", "model"))
    split = [jax.device_put(array, NamedSharding(mesh, P("data", None, "model"))) for array in (q, k)]
    np.testing.assert_allclose(jax.jit(jax.grad(run, argnums=2))(*split, table), expected, **close)

    def local(q: Any, k: Any, table: Any) -> Any:
        return jax.lax.psum(run(q, k, table), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P())
    np.testing.assert_allclose(jax.jit(jax.grad(mapped, argnums=2))(q, k, table), expected, **close)


def test_forward_mode_in_jax() -> None:
    q, k, table = map(jnp.asarray, arguments())
    run = lambda table: loss(q, k, table, backend="jax_xla")  # noqa: E731
    way = jnp.asarray(np.random.default_rng(2).standard_normal(table.shape), table.dtype)
    _, moved = jax.jvp(run, (table,), (way,))
    np.testing.assert_allclose(moved, (jax.grad(run)(table) * way).sum(), rtol=1e-4)


def test_what_has_no_gradient_says_so() -> None:
    q, k, table = map(torch.from_numpy, arguments())
    leaf = table.requires_grad_()
    with pytest.raises(NoBackendError, match=r"gradient of aux\[0\]: FlexAttention on CPU has none"):
        loss(q, k, leaf, backend="flex")
    spec = learned_call("relative bias", dtype="bfloat16", head_dim=64, value_dim=64, aux_dtype="float32").spec
    reasons = explain(spec, Target("torch", "sm90"), "flash4").reasons("flash4")
    assert any("gradient of aux[0]" in why for why in reasons), reasons
    equal_bits = replace(spec, deterministic=True)
    reasons = explain(equal_bits, Target("torch", "sm90"), "flex").reasons("flex")
    assert any("gradient of aux[0] with deterministic=True" in why for why in reasons), reasons
    assert not any("aux[0]" in why for why in explain(spec, Target("torch", "sm90"), "flex").reasons("flex"))
    with torch.no_grad():
        assert torch_frontend.explain(q, k, k, score_mod=RELATIVE, aux=(leaf,)).spec.aux_gradients == ()
    assert torch_frontend.explain(q, k, k, score_mod=RELATIVE, aux=(leaf,)).spec.aux_gradients == (0,)
    hides = lambda b, h, q, k, t: t[h, q - k + 6] > 0  # noqa: E731
    out = torch_frontend.attention(q.requires_grad_(), k, k, mask_mod=hides, aux=(leaf,))
    assert torch.autograd.grad(out.sum(), [q, leaf], allow_unused=True)[1] is None  # a mask has no gradient
    of_mask = jax.grad(lambda t: jax_frontend.attention(*(jnp.ones((1, 7, 4, 8)),) * 3, mask_mod=hides, aux=(t,)).sum())
    assert not np.asarray(of_mask(jnp.ones((4, 13)))).any()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((1,), "expected numbers of arrays that score_mod reads"), ((0, 0), "ascending"), ([0], r"aux_gradients=\[0\]")],
)
def test_a_spec_checks_the_numbers(numbers: Any, words: str) -> None:
    spec = learned_call("relative bias").spec
    with pytest.raises(SpecError, match=words):
        replace(spec, aux_gradients=numbers)
    with pytest.raises(SpecError, match="needs_backward=True"):
        replace(spec, needs_backward=False)
