"""Tests mask and score functions in both frontends: against the oracle, against other ways to say the same, under
transformations, and that planted faults and bad arguments are found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import cpu_meshes
import jax
import jax.numpy as jnp
import torch
from both_frontends import FRAMEWORKS, judge, judged, only, run, same_bits
from frameworks import BOTH, Framework, as_numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from spec_strategies import make_call

import jax_frontend
import torch_frontend
from attn_core import DeviceError, NoBackendError, ShapeError, SpecError, masks
from attn_core.call.functions import aux_of
from attn_core.expressions import ExpressionError, alibi, causal, lookup, prefix_lm, softcap, tanh, trace_mask, where
from tests.campaign.functions import MASKS, SCORES, fields_of

pytestmark = pytest.mark.sampled

SIZES = {"batch": 2, "q_len": 12, "kv_len": 12, "num_heads": 6, "num_kv_heads": 3, "head_dim": 5, "value_dim": 5}
SIZES |= {"dtype": "float32", "needs_backward": True, "return_lse": True}
NUMBERS = (2, 6, 12, 12)
CALLS = {
    **{name: fields_of(name, None, NUMBERS) for name in MASKS},
    **{name: fields_of(None, name, NUMBERS) for name in SCORES},
    "both, causal": fields_of("documents", "per row", NUMBERS) | {"causal": True, "softcap": 3.0},
    "slopes, learned": fields_of(None, "slopes", NUMBERS) | {"aux_gradients": (0,)},
    "per row, learned": fields_of(None, "per row", NUMBERS) | {"aux_gradients": (0, 1), "causal": True, "softcap": 2.0},
    "both, one learned": fields_of("documents", "per row", NUMBERS) | {"aux_gradients": (2,)},
    "both, with tables": fields_of("by row and head", "hides", NUMBERS)
    | {"bias_shape": (2, 6, 12, 12), "bias_gradient": True, "mask_shape": (2, 1, 1, 12), "sinks": True},
}

OF_FLEX = ("bits", "hides", "both, with tables")
"""The calls to FlexAttention on a GPU: all kinds of arrays and operations.

In a GPU's suite other backends have these and those of learned arrays.
"""


def on(device: str, framework: str, backend: str) -> None:
    if reason := judged(framework, backend, device):
        pytest.skip(reason)


@pytest.mark.on_gpus(only=lambda name, **_: name in OF_FLEX or "learned" in name)
@pytest.mark.parametrize(
    ("backend", "framework"), [("math", "torch"), ("jax_xla", "jax"), ("flex", "torch"), ("flex", "jax")]
)  # math has the same bits in JAX
@pytest.mark.parametrize("name", CALLS)
def test_functions_match_the_oracle(name: str, backend: str, framework: str, device: str) -> None:
    on(device, framework, backend)
    only(OF_FLEX, name, backend, device)
    call = make_call(3, **{**SIZES, **CALLS[name]})
    if backend == "flex":
        gradients = device == "cuda" and not (call.spec.bias_gradient or call.spec.aux_gradients)
        without = {"needs_backward": gradients, "bias_gradient": False, "aux_gradients": ()}
        call = replace(call, spec=replace(call.spec, **without))
        wide = {"head_dim": 64, "value_dim": 64, "q_len": 200, "kv_len": 200}
        if device == "cuda":
            functions = {
                key: value for key, value in CALLS[name].items() if not key.endswith(("gradient", "gradients"))
            }
            call = make_call(3, **{**SIZES, **wide, **_longer(functions), "needs_backward": gradients})
    assert judge(framework, call, run(framework, call, backend, device)).ok


def _longer(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields for 200 tokens in the place of 12."""
    shapes = {
        key: tuple(200 if n == 12 else n for n in value) for key, value in fields.items() if key.endswith("_shape")
    }
    aux = tuple(each._replace(shape=tuple(200 if n == 12 else n for n in each.shape)) for each in fields["aux"])
    return {**fields, **shapes, "aux": aux}


@pytest.mark.parametrize("name", CALLS)
def test_torch_and_jax_give_the_same_bits(name: str, device: str) -> None:
    on(device, "jax", "math")
    call = make_call(3, **{**SIZES, **CALLS[name]})
    assert same_bits(run("torch", call, "math", device), run("jax", call, "math", device)) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_functions_count_in_the_whole_row(framework: str) -> None:
    """Also with documents: the second document's first token has q and k of the first one's length."""
    lengths = (5, 4)
    sizes = {name: value for name, value in SIZES.items() if name not in ("batch", "q_len", "kv_len")}
    functions = fields_of("by row and head", "slopes", (1, 6, 9, 9))
    call = make_call(4, (lengths, lengths), **sizes, **functions, causal=True)
    for backend in ("math", "jax_xla")[: 1 + (framework == "jax")]:
        assert judge(framework, call, run(framework, call, backend)).ok


def attend(framework: Framework, **options: Any) -> np.ndarray:
    """The output of three arrays of numbers with some options."""
    random = np.random.default_rng(0)
    q, k, v = (framework.array(random.standard_normal((2, 12, heads, 8), np.float32)) for heads in (4, 2, 2))
    return as_numpy(framework.frontend.attention(q, k, v, backend="math", **options))


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_functions_say_what_options_say(framework: Framework) -> None:
    ids = np.repeat(np.arange(3, dtype=np.int32), 4)
    slopes = np.float32([0.5, 0.25, 0.125, 1.0])
    same = [
        ({"mask_mod": causal()}, {"causal": True}),
        (
            {"mask_mod": lambda b, h, q, k, ids: ids[q] == ids[k], "aux": (ids,)},
            {"key_ranges": masks.documents([4] * 3)},
        ),
        ({"score_mod": softcap(2.0)}, {"softcap": 2.0}),
        ({"score_mod": alibi(slopes)}, {"alibi_slopes": framework.array(slopes)}),
        ({"mask_mod": trace_mask(lambda b, h, q, k: q - k < 3), "causal": True}, {"window": 3, "causal": True}),
    ]
    for functions, options in same:
        np.testing.assert_allclose(attend(framework, **functions), attend(framework, **options), rtol=0, atol=2e-6)


def test_torchs_own_functions_are_taken_as_they_are() -> None:
    """With tensors that they capture."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    random = np.random.default_rng(1)
    q, k, v = (torch.from_numpy(random.standard_normal((2, heads, 12, 16), np.float32)) for heads in (4, 4, 4))
    ids, slopes = torch.arange(12) // 4, torch.rand(4)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score / 2) * 2 - slopes[h] * (q_idx - kv_idx)

    blocks = create_block_mask(mask_mod, None, None, 12, 12, device="cpu")
    expected = flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks)
    functions: dict[str, Any] = {"mask_mod": mask_mod, "score_mod": score_mod}
    out = torch_frontend.attention(q, k, v, layout="bhsd", backend="math", **functions)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_torchs_masks_combine_and_hide_nothing() -> None:
    from torch.nn.attention import flex_attention as flex

    # k is not v: for one tensor given twice torch's flex_attention explains why it compiles again, and fails if an
    # earlier program of the process had other functions.
    q, k, v = (torch.randn(2, 4, length, 8) for length in (9, 7, 7))
    first, second = (lambda b, h, q, k: q >= k), (lambda b, h, q, k: (q - k <= 2 + b) & (h != 1))
    plain = torch_frontend.explain(q, k, v, layout="bhsd")
    for mask_mod in (flex.and_masks(first, second), flex.or_masks(first, second), flex.noop_mask):
        blocks = flex.create_block_mask(mask_mod, 2, 4, 9, 7, device="cpu")
        expected = flex.flex_attention(q, k, v, block_mask=blocks)
        for given in (mask_mod, blocks):
            out = torch_frontend.attention(q, k, v, layout="bhsd", mask_mod=given)
            seen = flex.create_mask(mask_mod, 2, 4, 9, 7, device="cpu").any(-1, keepdim=True)
            torch.testing.assert_close(out, torch.where(seen, expected, 0.0), rtol=0, atol=2e-6)
            found = torch_frontend.explain(q, k, v, layout="bhsd", mask_mod=given)
            assert (found.spec == plain.spec) == (found.backend == plain.backend) == (mask_mod is flex.noop_mask)
    counts = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = flex.BlockMask.from_kv_blocks(counts, counts[..., None] * 0, BLOCK_SIZE=128, seq_lengths=(9, 7))
    assert torch.equal(
        torch_frontend.attention(q, k, v, layout="bhsd", mask_mod=blocks),
        torch_frontend.attention(q, k, v, layout="bhsd"),
    )
    refusal = "mask_mod: expected a BlockMask that has a mask function.*, or no mask if it hides nothing"
    counts.zero_()  # now its one block is hidden
    with pytest.raises(SpecError, match=refusal):
        torch_frontend.attention(q, k, v, layout="bhsd", mask_mod=blocks)


def test_blocks_are_read_only_where_nothing_waits() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import flex_attention as flex

    counts = torch.ones(1, 1, 1, dtype=torch.int32)
    mode = FakeTensorMode()
    fake = mode.from_tensor(counts)

    def masked(counts: Any, q: Any) -> Any:
        mask = flex.BlockMask(
            (9, 9), counts, counts[..., None], None, None, None, None, None, None, (128, 128), flex.noop_mask
        )
        return torch_frontend.attention(q, q, q, layout="bhsd", mask_mod=mask)

    q = torch.randn(2, 4, 9, 8)
    right = torch_frontend.attention(q, q, q, layout="bhsd")
    refusal = "mask_mod: expected a BlockMask that has a mask function.*, or no mask if it hides nothing"
    for unread, rows in ((counts.to("meta"), q), (fake, q), (fake, mode.from_tensor(q))):
        with pytest.raises(SpecError, match=refusal):
            masked(unread, rows)
    with mode, pytest.raises(SpecError, match=refusal):
        masked(fake, mode.from_tensor(q))
    with pytest.raises(SpecError, match=refusal):
        torch.vmap(masked, in_dims=(0, None))(counts[None], q)
    torch.testing.assert_close(torch.vmap(masked, in_dims=(None, 0))(counts, q[None])[0], right)
    torch.testing.assert_close(torch.func.grad(lambda q: masked(counts, q).sum())(q).shape, q.shape)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_functions_that_say_nothing_are_none(framework: Framework) -> None:
    own, module, ids = framework.zeros(1, 3, 1, 8), framework.frontend, np.zeros(3, np.int32)
    plain = module.explain(own, own, own).spec
    everything, same = (lambda b, h, q, k, *aux: True), (lambda s, b, h, q, k, *aux: s)
    for functions in ({"mask_mod": everything}, {"score_mod": same}, {"mask_mod": everything, "score_mod": same}):
        for aux in ((), (ids,)):
            assert module.explain(own, own, own, **functions, aux=aux).spec == plain
            np.testing.assert_array_equal(module.attention(own, own, own, **functions, aux=aux), 0.0)
    kept = module.explain(own, own, own, mask_mod=lambda b, h, q, k, ids: ids[q] == 0, score_mod=same, aux=(ids,)).spec
    assert kept.mask_mod is not None and kept.score_mod is None and len(kept.aux) == 1


def test_vmap_keeps_the_places_of_rows_and_heads() -> None:
    random = np.random.default_rng(2)
    q, k, v = (jnp.asarray(random.standard_normal((3, 4, 12, heads, 8), np.float32)) for heads in (4, 2, 2))
    first = jnp.asarray(random.integers(0, 9, (3, 12)), jnp.int32)

    def one(q: Any, k: Any, v: Any, first: Any, backend: str) -> Any:
        hides: Any = lambda b, h, q, k, first: (k >= first[q]) & ((k + b + h) % 3 != 0)  # noqa: E731
        return jax_frontend.attention(q, k, v, mask_mod=hides, aux=(first,), backend=backend)

    for backend in ("math", "jax_xla"):
        expected = jnp.stack([one(*each, backend) for each in zip(q, k, v, first, strict=True)])
        mapped = jax.vmap(partial(one, backend=backend))(q, k, v, first)
        np.testing.assert_allclose(mapped, expected, rtol=0, atol=2e-6)


def test_a_mesh_keeps_the_places_of_rows_and_heads(four_devices: None) -> None:
    random = np.random.default_rng(2)
    q, k, v = (jnp.asarray(random.standard_normal((4, 12, heads, 8), np.float32)) for heads in (4, 4, 4))
    mesh = jax.sharding.Mesh(np.array(cpu_meshes.devices()).reshape(2, 2), ("data", "heads"))
    split = [jax.device_put(array, NamedSharding(mesh, P("data", None, "heads"))) for array in (q, k, v)]
    for read in ("b", "h", "q"):
        hides = {
            "b": lambda b, h, q, k: (k + b) % 3 != 0,
            "h": lambda b, h, q, k: (k + h) % 3 != 0,
            "q": lambda b, h, q, k: (k + q) % 3 != 0,
        }[read]
        for backend in ("math", "jax_xla"):
            run = jax.jit(lambda *qkv: jax_frontend.attention(*qkv, mask_mod=hides, backend=backend))  # noqa: B023
            np.testing.assert_allclose(run(*split), run(q, k, v), rtol=0, atol=2e-6)


def test_a_jitted_program_takes_other_arrays_without_a_trace() -> None:
    q = jnp.ones((1, 6, 2, 8))
    traces = []

    @jax.jit
    def program(ids: jax.Array) -> jax.Array:
        traces.append(1)
        keys = jnp.arange(6.0)[None, :, None, None] * jnp.ones((1, 6, 2, 8))
        return jax_frontend.attention(q, q, keys, mask_mod=lambda b, h, q, k, ids: ids[q] == ids[k], aux=(ids,))

    ones = program(jnp.zeros(6, jnp.int32)), program(jnp.arange(6, dtype=jnp.int32))
    np.testing.assert_allclose(ones[0][0, :, 0, 0], 2.5, rtol=1e-6)
    np.testing.assert_allclose(ones[1][0, :, 0, 0], np.arange(6.0), rtol=1e-6)
    assert len(traces) == 1


FAULTS = {
    "an array of another row": lambda inputs: inputs._replace(aux0=inputs.aux0[::-1]),
    "an array one place too late": lambda inputs: inputs._replace(aux0=np.roll(inputs.aux0, 1, -1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    call = make_call(3, **SIZES, **fields_of("first key of each query", None, NUMBERS))
    wrong = replace(call, inputs=FAULTS[fault](call.inputs))
    assert not np.array_equal(wrong.inputs.aux0, call.inputs.aux0)
    assert not judge("torch", call, run("torch", wrong, "math")).ok


@pytest.mark.parametrize("change", ["k <= q + 1", "swapped", "h for b"])
def test_a_wrong_function_is_found(change: str) -> None:
    right: Any = lambda b, h, q, k: (k <= q) & (b + 2 * q != k)  # noqa: E731
    wrong: Any = {
        "k <= q + 1": lambda b, h, q, k: (k <= q + 1) & (b + 2 * q != k),
        "swapped": lambda b, h, q, k: right(b, h, k, q),
        "h for b": lambda b, h, q, k: right(h, b, q, k),
    }[change]
    calls = [make_call(3, **SIZES, mask_mod=trace_mask(function).tree) for function in (right, wrong)]
    assert judge("torch", calls[0], run("torch", calls[0], "math")).ok
    assert not judge("torch", calls[0], run("torch", calls[1], "math")).ok


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no function": ({"mask_mod": 3}, ExpressionError, r"mask_mod: expected a function of \(b, h, q, k, \*aux\)"),
    "a branch": (
        {"mask_mod": lambda b, h, q, k: q > k if h > 0 else k < 0},
        ExpressionError,
        r"mask_mod: .*truth value.*\n.*test_functions.py:\d+: ",
    ),
    "a score for a mask": ({"mask_mod": lambda b, h, q, k: q - k}, ExpressionError, "must return a bool"),
    "a mask for a score": ({"score_mod": lambda s, b, h, q, k: q > k}, ExpressionError, "must return a float"),
    "arguments": ({"mask_mod": lambda b, h, q: q > 0}, ExpressionError, r"takes \(b, h, q, k\) and 0 aux arrays"),
    "aux alone": ({"aux": (np.zeros(3),)}, SpecError, "aux: expected mask_mod or score_mod with it, got 1 arrays"),
    "aux no tuple": ({"mask_mod": causal(), "aux": 3}, SpecError, "aux=3: expected a tuple of arrays"),
    "five arrays": (
        {"mask_mod": lambda b, h, q, k, *aux: aux[4][q] > 0, "aux": (np.zeros(12),) * 5},
        SpecError,
        "aux: expected at most 4 arrays, captured ones included, got 5",
    ),
    "traced with other arrays": (
        {"mask_mod": trace_mask(lambda b, h, q, k: q > k), "aux": (np.zeros(12),)},
        SpecError,
        "aux: expected the 0 arrays that mask_mod was traced with, got 1",
    ),
    "an empty array": (
        {"mask_mod": lambda b, h, q, k, a: a[b, k] > 0, "aux": (np.zeros((2, 0), np.int32),)},
        ShapeError,
        r"aux\[0\]: expected at least one element, because mask_mod reads it, got \[2, 0\]",
    ),
    "an empty captured array": (
        {"score_mod": lambda s, b, h, q, k: s + lookup(np.zeros(0, np.float32), k)},
        ShapeError,
        r"aux\[0\]: expected at least one element, because score_mod reads it, got \[0\]",
    ),
    **{
        f"{how} {number}": (
            {"mask_mod": function, "aux": aux},
            ExpressionError,
            rf"aux\[{len(aux) and 1}\]: expected ints of 32 bits, got values from {min(number, 0)} to {max(number, 0)}",
        )
        for number in (2**31, -(2**31) - 1, 2**32)
        for how, function, aux in (
            ("passed", lambda b, h, q, k, x, a: a[q] == a[k], (np.zeros(3), np.array([0, number]))),
            ("captured", lambda b, h, q, k, n=number: lookup(np.array([0, n]), q) == lookup(np.array([0, n]), k), ()),
        )
    },
    "a list in aux": (
        {"mask_mod": lambda b, h, q, k, a: a[q] > 0, "aux": ([1],)},
        ExpressionError,
        r"aux\[0\]: expected",
    ),
}


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str, framework: Framework) -> None:
    options, error, text = BAD[name]
    with pytest.raises(error, match=text):
        attend(framework, **options)


def test_other_kernels_refuse_functions_by_name() -> None:
    with pytest.raises(NoBackendError, match="mask_mod: the aten CPU flash kernel has none"):
        q = torch.zeros(1, 3, 1, 8)
        torch_frontend.attention(q, q, q, mask_mod=prefix_lm(1), backend="sdpa_flash")


def test_arrays_beside_the_tensors_are_named() -> None:
    q = torch.zeros(1, 3, 1, 8)
    with pytest.raises(DeviceError, match=r"aux\[0\]: expected the device of q \(cpu\), got meta"):
        torch_frontend.attention(
            q,
            q,
            q,
            mask_mod=lambda b, h, q, k, ids: ids[q] > 0,
            aux=(torch.zeros(3, dtype=torch.int32, device="meta"),),
        )


def test_a_score_may_hide_all_keys_of_a_row() -> None:
    """The row has output 0, log-sum-exp -inf and gradients 0; a NaN in a hidden value reaches nothing."""
    hides: Any = lambda s, b, h, q, k: where((q == 1) | (k == 2), -float("inf"), tanh(s))  # noqa: E731
    q, k, v = (torch.ones(1, 3, 1, 4, requires_grad=True) for _ in range(3))
    values = v.detach().clone()
    values[0, 2] = torch.nan
    out, lse = torch_frontend.attention(q, k, values.requires_grad_(), score_mod=hides, return_lse=True)
    out.sum().backward()
    assert out[0, 1].eq(0).all() and lse[0, 0, 1] == -torch.inf and out[0, ::2].eq(1).all()
    assert q.grad is not None and q.grad.isfinite().all() and q.grad[0, 1].eq(0).all()
    results = [
        jax_frontend.attention(*(jnp.asarray(each.detach().numpy()) for each in (q, k, values)), score_mod=hides)
        for _ in range(1)
    ]
    np.testing.assert_array_equal(results[0], out.detach().numpy())


def test_a_call_prints_its_formulas() -> None:
    q = torch.zeros(1, 4, 1, 8)
    found = torch_frontend.explain(q, q, q, mask_mod=lambda b, h, q, k: k <= q + h, score_mod=softcap(5.0))
    text = found.text(everything=True).replace("\n    ", " ")
    assert found.backend == "math" and "mask_mod=k <= (q + h)" in text and "score_mod=5.0 * tanh" in text
    assert "flash2" in text and "mask_mod" in str(found.spec)
    assert aux_of(make_call(1, **SIZES, **CALLS["documents"]).inputs)[0].shape == (12,)


def test_a_compiled_program_takes_traced_functions() -> None:
    """Others break its graph, with words."""
    q, ids = torch.randn(1, 6, 2, 8), torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
    plain: Any = lambda b, h, q, k, ids: ids[q] == ids[k]  # noqa: E731
    traced = trace_mask(plain, (ids,))

    def attend(function: Any) -> Any:
        # By name, because automatic choice reads ids in eager calls alone.
        return lambda q, ids: torch_frontend.attention(q, q, q, mask_mod=function, aux=(ids,), backend="math")

    def compiled(function: Any, **options: Any) -> Any:
        return torch.compile(attend(function), backend="aot_eager", **options)(q, ids)

    expected = attend(plain)(q, ids)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"pass what attn_core\.expressions\.trace_mask"):
        compiled(plain, fullgraph=True)
    torch._dynamo.reset()
    assert torch.equal(compiled(plain), expected)
    assert torch.equal(compiled(traced, fullgraph=True), expected)


def test_torchs_transforms_keep_the_places_of_rows() -> None:
    q = torch.randn(3, 2, 6, 2, 8)
    hides = trace_mask(lambda b, h, q, k: (k + b) % 3 != 0)

    def one(q: torch.Tensor) -> torch.Tensor:
        return torch_frontend.attention(q, q, q, mask_mod=hides, backend="math")

    torch.testing.assert_close(torch.func.vmap(one)(q), torch.stack([one(each) for each in q]))
    grads = torch.func.vmap(torch.func.grad(lambda q: one(q).sum()))(q)
    leaf = q[1].clone().requires_grad_()
    one(leaf).sum().backward()
    torch.testing.assert_close(grads[1], leaf.grad)


# BlockMask


def test_a_block_mask_is_its_function() -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 7, 2, 8)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j <= 2 + b) & (j <= i + h)

    block = create_block_mask(near, 2, 4, 9, 7, device="cpu")
    expected = torch_frontend.attention(q, k, k, mask_mod=near)
    assert torch.equal(torch_frontend.attention(q, k, k, mask_mod=block), expected)
    heads_first = torch_frontend.attention(*(each.transpose(1, 2) for each in (q, k, k)), mask_mod=block, layout="bhsd")
    assert torch.equal(heads_first.transpose(1, 2), expected)
    assert torch_frontend.explain(q, k, k, mask_mod=block).spec.mask_mod is not None
    with pytest.raises(
        ShapeError, match=r"mask_mod: expected a BlockMask of \[2 or 1, 4 or 1, 8, 7\], got \[2, 4, 9, 7\]"
    ):
        torch_frontend.attention(q[:, :8], k, k, mask_mod=block)
    tables = BlockMask.from_kv_blocks(block.kv_num_blocks * 0, block.kv_indices, seq_lengths=(9, 7))
    with pytest.raises(SpecError, match="mask_mod: expected a BlockMask that has a mask function"):
        torch_frontend.attention(q, k, k, mask_mod=tables)
    with pytest.raises(TypeError, match=r"mask: expected a torch.Tensor.*mask_mod"):
        torch_frontend.attention(q, k, k, mask=block)
