"""Tests the compiled lane: which calls take it, and that XLA runs the kernels of a program correctly.

Without a GPU a stand-in provides a program: the halves of the math backend cut into kernels that read, write, update
and add into zeros, as FlashAttention-4's do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax_tvm_ffi")
import cpu_meshes
import jax
import jax.numpy as jnp
import jax_tvm_ffi
import torch
import tvm_ffi
from frameworks import TORCH

import jax_frontend
import torch_frontend
from attn_core import AttentionSpec, Target, backends, explain, masks
from attn_core.backends import flash4, math
from attn_core.backends.contract import Program
from attn_core.backends.shared.kernel_programs import SCRATCH, Buffer, KernelProgram, KernelStep
from attn_core.call.spec import PagedKV
from attn_core.call.tensors import Inputs
from attn_core.context_parallel import call as context_call
from attn_core.selection import choice
from jax_frontend import context_parallel_attention, explain_context_parallel, shard_sequence, unshard_sequence
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import calls_of
from tests.campaign.functions import fields_of

SPEC = AttentionSpec(
    batch=2, q_len=64, kv_len=64, num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, dtype="bfloat16", scale=0.125
)


PAGES = PagedKV(num_pages=9, page_size=16, width=4)

# The choice of the lane, as data


@pytest.mark.parametrize(
    ("changes", "lane", "why"),
    [
        ({}, "compiled", ""),
        ({"causal": True, "softcap": 50.0, "needs_backward": True}, "compiled", ""),
        ({"return_lse": True, "needs_backward": True}, "compiled", ""),
        ({"invariant": "batch", "causal": True, "needs_backward": True}, "compiled", ""),
        ({"documents": 3, "max_len_q": 40, "max_len_k": 40, "batch": 1}, "compiled", ""),
        ({"key_ranges_shape": (1, 1, 64, 2, 2), "q_len": 64, "kv_len": 64}, "compiled", ""),
        (
            {**fields_of("by row and head", None, (2, 4, 64, 64)), "q_len": 64, "kv_len": 64},
            *("compiled", ""),
        ),
        ({**fields_of(None, "slopes", (2, 4, 64, 64)), "q_len": 64, "kv_len": 64, "softcap": 5.0}, "compiled", ""),
        ({"sinks": True, "needs_backward": True}, "compiled", ""),
        ({"head_dim": 70, "value_dim": 70}, "compiled", ""),
        ({"head_dim": 192, "value_dim": 128, "needs_backward": True}, "compiled", ""),
        (
            {"documents": 3, "max_len_q": 1, "batch": 1, "q_len": 3, "kv_len": 64, "paged": PAGES},
            "callback",
            "in pages",
        ),
    ],
)
def test_the_selection_names_the_lane_and_the_reason(changes: dict[str, Any], lane: str, why: str) -> None:
    selection = explain(replace(SPEC, **changes), Target("jax", "sm90"), "flash4")
    assert selection.lane is not None and selection.lane[0] == lane
    assert why in "; ".join(selection.lane[1]) and bool(why) == bool(selection.lane[1])
    assert f"selected: flash4, {lane} lane" in str(selection) and why in " ".join(str(selection).split())


def test_which_backends_have_a_lane() -> None:
    assert explain(SPEC, Target("torch", "sm90"), "flash4").lane is None
    assert explain(SPEC, Target("jax", "sm90"), "jax_cudnn").lane is None
    assert explain(SPEC, Target("jax", "sm90"), "flash2").lane == ("callback", ())
    assert explain(SPEC, Target("jax", "sm100"), "flash4").lane == ("callback", ("sm100: proven on sm90 only",))
    assert explain(replace(SPEC, dropout=0.5), Target("jax", "sm90"), "flash4").lane is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_torch_backend_has_a_lane_in_jax(kind: str) -> None:
    device, bridged = {"cpu": "cpu", "cuda": "sm90"}[kind], []
    for name in backends.names():
        if backends.load(name, kind).framework == "torch":
            bridged.append(name)
            (call, *_) = calls_of(name, SPEC, device)
            why = compiled_lane.static_reasons(call)
            expected = () if kind == "cuda" else ("cpu: proven on sm90 only",)
            if name not in ("flash4", "triton_ordered", "triton_splitkv"):
                expected = (f"{name} hands out no compiled kernels",)
            assert why == expected
    assert {"cpu": "math", "cuda": "flex"}[kind] in bridged


# A program of the math backend

LAUNCHED: list[str] = []


def kernel(name: str, run: Any) -> Any:
    """A stand-in for a compiled kernel: a function that takes only tensors."""

    def launch(*tensors: torch.Tensor) -> None:
        LAUNCHED.append(name)
        run(*tensors)

    return lambda: tvm_ffi.convert_func(launch, tensor_cls=torch.Tensor)


def split(names: Any, tensors: Any) -> dict[str, torch.Tensor]:
    """Returns operands by name, with q, k and v out of one array."""
    named = dict(zip(names, tensors, strict=False))
    return named if "qkv" not in named else dict(zip("qkv", named.pop("qkv").unbind(-3), strict=True)) | named


def forward_program(spec: AttentionSpec, as_one: bool) -> KernelProgram:
    names = (*(["qkv"] if as_one else "qkv"), *(("cu_seqlens_q", "cu_seqlens_k") if spec.packed else ()))

    def run(*tensors: torch.Tensor) -> None:
        given, (out, lse) = tensors[: len(names)], tensors[len(names) :]
        actual = math.forward(spec, Inputs(**split(names, given)))
        out.copy_(actual[0])
        lse.copy_(actual[1])

    shapes = operand_shapes(spec)
    buffers = (
        *(Buffer(name, *shapes[name]) for name in names),
        *(Buffer(name, *shapes[name]) for name in ("out", "lse")),
    )
    places = tuple(range(len(names)))
    target = f"attn_core.stand_in.forward.{as_one}.{abs(hash(spec))}"
    return KernelProgram(buffers, (KernelStep(target, places, (len(names), len(names) + 1), kernel("forward", run)),))


def operand_shapes(spec: AttentionSpec) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = () if spec.packed else (spec.batch,)
    q = (*rows, spec.q_len, spec.num_heads, spec.head_dim), spec.dtype
    k = (*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim), spec.dtype
    offsets = ((spec.documents or 0) + 1,), "int32"
    lse = spec.lse_shape, spec.lse_dtype
    one = (*rows, spec.q_len, 3, spec.num_heads, spec.head_dim), spec.dtype
    named = {
        "q": q,
        "k": k,
        "v": k,
        "qkv": one,
        "dqkv": one,
        "out": q,
        "dout": q,
        "lse": lse,
        "dlse": lse,
        "dq": q,
        "dk": k,
        "dv": k,
    }
    return {**named, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}


def backward_program(spec: AttentionSpec, with_dlse: bool, as_one: bool) -> KernelProgram:
    """Three kernels: gradients into scratch, with k and v added into zeros; one that doubles a gradient; one that
    rounds all."""
    names = [*(["qkv"] if as_one else "qkv"), "out", "lse", "dout", *(["dlse"] if with_dlse else [])]
    shapes = operand_shapes(spec)
    results = ["dqkv"] if as_one else ["dq", "dk", "dv"]
    made = [*(Buffer(name, *shapes[name]) for name in (*names, *results))]
    made += [Buffer(SCRATCH, shapes["q"][0], "float32"), *(Buffer(SCRATCH, shapes["k"][0], "float32", True),) * 2]
    count = len(names)
    *written, wide_q, wide_k, wide_v = range(count, count + len(results) + 3)

    def gradients(*tensors: torch.Tensor) -> None:
        given = split(names, tensors)
        old_k, old_v, new_q, new_k, new_v = tensors[count:]
        assert old_k.data_ptr() == new_k.data_ptr() and old_v.data_ptr() == new_v.data_ptr()
        assert new_k.data_ptr() != new_v.data_ptr() and not new_k.any() and not new_v.any()
        inputs = Inputs(given["q"], given["k"], given["v"])
        actual = math.backward(spec, inputs, given["out"], given["lse"], given["dout"], given.get("dlse"))
        new_q.copy_(actual.dq)
        new_k.add_(actual.dk)
        new_v.add_(actual.dv)

    def doubled(old: torch.Tensor, new: torch.Tensor) -> None:
        assert old.data_ptr() == new.data_ptr()
        new.mul_(2)

    def rounded(*tensors: torch.Tensor) -> None:
        parts = tensors[-1].unbind(-3) if as_one else tensors[-3:]
        for wide, narrow in zip(tensors[:3], parts, strict=True):
            narrow.copy_(wide)

    stem = f"attn_core.stand_in.backward.{with_dlse}.{as_one}.{abs(hash(spec))}"
    return KernelProgram(
        tuple(made),
        (
            KernelStep(
                f"{stem}.0", (*range(count), wide_k, wide_v), (wide_q, wide_k, wide_v), kernel("gradients", gradients)
            ),
            KernelStep(f"{stem}.1", (wide_k,), (wide_k,), kernel("doubled", doubled)),
            KernelStep(f"{stem}.2", (wide_q, wide_k, wide_v), tuple(written), kernel("rounded", rounded)),
        ),
    )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, replace_fields: Any) -> Iterator[None]:
    def program(spec: AttentionSpec, direction: str, with_dlse: bool = False, as_one: bool = False) -> KernelProgram:
        return forward_program(spec, as_one) if direction == "forward" else backward_program(spec, with_dlse, as_one)

    register = jax_tvm_ffi.register_ffi_target
    replace_fields(backends.load("math"), program=Program(make=program))

    def with_owners(*given: Any, allow_cuda_graph: bool = False, **options: Any) -> Any:
        return register(*given, **{**options, "pass_owned_tensor": True})  # torch's tensors need owners

    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", with_owners)
    empty_caches()
    LAUNCHED.clear()
    yield
    empty_caches()


def program_of_math() -> Callable[..., KernelProgram]:
    """What makes the programs of the stand-in."""
    program = backends.load("math").program
    assert program is not None
    return program.make


def empty_caches() -> None:
    choice._explained.cache_clear()
    compiled_lane.lane_of.cache_clear()
    jax.clear_caches()


def arrays(packed: bool = False) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    rows = (11,) if packed else (2, 5)
    shapes = ((*rows, 4, 8), (*rows, 2, 8), (*rows, 2, 8), (*rows, 4, 8))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def in_torch(*given: jax.Array, with_lse: bool = False) -> list[np.ndarray]:
    """out, dq, dk and dv of torch_frontend from the same bytes."""
    call = partial(torch_frontend.attention, causal=True, backend="math", return_lse=with_lse)
    *qkv, dout = map(np.asarray, given)
    douts = (dout, np.swapaxes(dout[..., 0], 1, 2)) if with_lse else (dout,)
    out, *rest = TORCH.gradients(call, dict(zip("qkv", qkv, strict=True)), *douts)
    return [out, *rest[-3:]]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_program_gives_torchs_bits(with_lse: bool) -> None:
    q, k, v, dout = arrays()

    @jax.jit
    def forward_and_gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        def function(q: Any, k: Any, v: Any) -> Any:
            return jax_frontend.attention(q, k, v, causal=True, backend="math", return_lse=with_lse)

        out, pull = jax.vjp(function, q, k, v)
        cotangent = (dout, jnp.swapaxes(dout[..., 0], 1, 2)) if with_lse else dout
        return (out[0] if with_lse else out), pull(cotangent)

    out, (dq, dk, dv) = forward_and_gradients(q, k, v, dout)
    expected = in_torch(q, k, v, dout, with_lse=with_lse)
    for ours, theirs, factor in zip((out, dq, dk, dv), expected, (1, 1, 2, 1), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs * factor)
    jax.block_until_ready(dq)
    assert LAUNCHED == ["forward", "gradients", "doubled", "rounded"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_zero_buffer_is_a_separate_value_in_xla(dtype: str) -> None:
    """XLA may give one buffer to values that it knows to be equal, even if a kernel adds to both."""
    buffers = tuple(Buffer(SCRATCH, (2, 8), kind, True) for kind in ("float32", "float32", "int32", "int32", "float32"))
    buffers = (*buffers[:2], Buffer("q", (2, 8), dtype), *buffers[2:])
    zeros = jax.jit(lambda operand: compiled_lane._zeros(buffers, operand))
    whole = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    for bits in (0, 1, np.iinfo(whole).max):  # the last one is a NaN with every bit set
        actual = zeros(jnp.asarray(np.full((2, 3), bits, whole).view(jnp.dtype(dtype))))
        assert list(actual) == [0, 1, 3, 4, 5]
        for place, array in actual.items():
            assert array.shape == buffers[place].shape and array.dtype == buffers[place].dtype and not array.any()
    text = zeros.lower(jnp.ones((2, 3), dtype)).compile().as_text()
    (root,) = re.findall(r"ROOT .* tuple\((.*)\)", text.split("ENTRY")[1]) or [""]
    results = re.findall(r"%[\w.\-]+", root) or [""]
    assert len(set(results)) == len(results) and text.count("shift-right-arithmetic(") >= 5


@pytest.mark.usefixtures("stand_in")
def test_packed_documents_pass_their_offsets() -> None:
    q, k, v, _ = arrays(packed=True)
    info = jax_frontend.SeqInfo.from_lengths([4, 7])
    out, lse = jax.jit(lambda q, k, v: jax_frontend.attention(q, k, v, seq_info=info, backend="math", return_lse=True))(
        q, k, v
    )
    tensors = (torch.from_numpy(np.array(array)) for array in (q, k, v))
    expected = torch_frontend.attention(
        *tensors, seq_info=torch_frontend.SeqInfo.from_lengths([4, 7]), backend="math", return_lse=True
    )
    np.testing.assert_array_equal(np.asarray(out), expected[0].numpy())
    np.testing.assert_array_equal(np.asarray(lse), expected[1].numpy())
    assert LAUNCHED == ["forward"]


@pytest.mark.usefixtures("stand_in")
def test_qkv_in_one_array_stays_one_array() -> None:
    qkv = jax.random.normal(jax.random.key(0), (2, 5, 3, 4, 8))
    dout = jax.random.normal(jax.random.key(1), (2, 5, 4, 8))
    out, pull = jax.vjp(lambda qkv: jax_frontend.attention_qkvpacked(qkv, causal=True, backend="math"), qkv)
    (gradient,) = pull(dout)
    expected = in_torch(*(qkv[:, :, which] for which in range(3)), dout)
    np.testing.assert_array_equal(np.asarray(out), expected[0])
    factors = np.array([1, 2, 1], np.float32)[:, None, None]
    np.testing.assert_array_equal(np.asarray(gradient), np.stack(expected[1:], 2) * factors)
    assert LAUNCHED == ["forward", "gradients", "doubled", "rounded"]


@pytest.mark.usefixtures("stand_in")
def test_operands_are_padded_to_the_buffers_and_results_are_cut(replace_fields: Any) -> None:
    made = program_of_math()

    def wide(spec: AttentionSpec, direction: str, with_dlse: bool = False, as_one: bool = False) -> KernelProgram:
        return made(replace(spec, head_dim=16, value_dim=16), direction, with_dlse, as_one)

    replace_fields(backends.load("math"), program=Program(make=wide))
    q, k, v, dout = arrays()
    out, pull = jax.vjp(lambda *x: jax_frontend.attention(*x, causal=True, backend="math"), q, k, v)
    ours = (out, *pull(dout))
    expected = in_torch(q, k, v, dout)
    for one, other, factor in zip(ours, expected, (1, 1, 2, 1), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), other * factor, rtol=1e-5, atol=1e-6)
    assert LAUNCHED == ["forward", "gradients", "doubled", "rounded"]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("fails", ["program", "compile"])
def test_a_call_that_cannot_be_compiled_uses_the_callback_and_logs_why(
    fails: str, replace_fields: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any, **more: Any) -> Any:
        raise TypeError("upstream changed its mind")

    made = program_of_math()

    def half_broken(spec: AttentionSpec, direction: str, with_dlse: bool = False, **_: Any) -> KernelProgram:
        program = made(spec, direction, with_dlse)
        steps = (program.steps[0]._replace(target="attn_core.stand_in.broken", compile=broken),)
        return program._replace(steps=steps)

    make = broken if fails == "program" else half_broken
    replace_fields(backends.load("math"), program=Program(make=make))
    q, k, v, dout = arrays()
    with caplog.at_level("WARNING", "attn_core.compiled_lane"):
        out = jax_frontend.attention(q, k, v, causal=True, backend="math")
    np.testing.assert_array_equal(np.asarray(out), in_torch(q, k, v, dout)[0])
    assert LAUNCHED == [] and "upstream changed its mind" in caplog.text and "runs by callback" in caplog.text
    if fails == "program":
        selection = jax_frontend.explain(q, k, v, causal=True, backend="math")
        assert selection.lane == ("callback", ("math: TypeError: upstream changed its mind",))
        assert "selected: math, callback lane" in str(selection)
        assert "lane: callback: math: TypeError: upstream changed its mind" in str(selection)


@pytest.mark.usefixtures("stand_in", "four_devices")
@pytest.mark.parametrize(
    ("strategy", "layout", "window", "steps"),
    [("all_gather", "zigzag", None, 2), ("ring", "contiguous", 6, 2), ("ulysses", "zigzag", None, 1)],
)
def test_steps_of_context_parallelism_are_programs(strategy: str, layout: str, window: int | None, steps: int) -> None:
    """XLA launches every tile of every step, forward and backward, and ``explain`` says so."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (2, 16, heads, 8)) for key, heads in zip(keys, (4, 2, 2, 4), strict=True))
    mesh = cpu_meshes.mesh((2,), ("cp",))
    where = {"mesh": mesh, "axis_name": "cp"}
    options: dict[str, Any] = {"causal": True, "window": window, "backend": "math"}
    call = partial(context_parallel_attention, **where, **options, strategy=strategy, layout=layout)

    def run(call: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    given = [shard_sequence(array, **where, layout=layout) for array in (q, k, v, dout)]
    lowered = jax.jit(partial(run, call)).lower(*given)
    assert ("stablehlo.case" in lowered.as_text()) == (strategy != "ulysses")  # whose devices have the same tiles
    compiled = lowered.compile()
    text = compiled.as_text()
    assert "attn_core.stand_in.forward" in text and "attn_core.stand_in.backward" in text
    assert "callback" not in text
    found = [np.asarray(unshard_sequence(array, **where, layout=layout)) for array in compiled(*given)]
    assert set(LAUNCHED) == {"forward", "gradients", "doubled", "rounded"}
    whole = partial(torch_frontend.attention, causal=True, window=window, backend="math")
    theirs = TORCH.gradients(whole, {"q": q, "k": k, "v": v}, dout)
    for one, other, factor in zip(found, theirs, (1, 1, 2, 1), strict=True):  # the stand-in doubles dk
        np.testing.assert_allclose(one, other * factor, rtol=2e-5, atol=2e-5)
    explained = explain_context_parallel(q, k, v, **where, **options, strategy=strategy, layout=layout)
    assert explained.lanes == (("math", ("compiled", ())),) and len(explained.call.plan.steps) == steps
    assert "backends: math, compiled lane" in str(explained) and "by callback" not in str(explained)


@pytest.mark.usefixtures("stand_in", "four_devices")
def test_a_step_that_python_launches_says_why(replace_fields: Any) -> None:
    q, k, v, _ = (array[:, :4] for array in arrays())
    where = {"mesh": cpu_meshes.mesh((2,), ("cp",)), "axis_name": "cp", "strategy": "ring", "backend": "math"}
    proven_elsewhere = Program(make=program_of_math(), refuses=lambda spec, device: ("cpu: proven on sm90 only",))
    for program, reasons in (
        (proven_elsewhere, ("cpu: proven on sm90 only",)),
        (None, ("it hands out no compiled kernels",)),
    ):
        replace_fields(backends.load("math"), program=program)
        text = str(explain_context_parallel(q, k, v, **where, causal=True))
        assert "backends: math, callback lane" in text and f"math by callback: {reasons[0]}" in text

    def broken(*given: Any, **more: Any) -> Any:
        raise TypeError("upstream changed its mind")

    replace_fields(backends.load("math"), program=Program(make=broken))
    text = str(explain_context_parallel(q, k, v, **where, causal=True))
    assert "math by callback: math: TypeError: upstream changed its mind" in text


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_flash4_refuses_no_program_of_a_step(strategy: str, layout: str) -> None:
    """On a GPU without packages: the decision from data, for every tile of the plans of plain and packed rows."""
    for documents, window in ((None, None), (None, (100, 0)), ((0, 70, 201, 512), None)):
        spec = replace(SPEC, batch=1, q_len=512, kv_len=512, causal=True, window=window or (None, None))
        spec = replace(spec, needs_backward=True, return_lse=True)
        if documents is not None:
            spec = replace(spec, documents=3, max_len_q=311, max_len_k=311)
        call = context_call.build_call(
            spec, documents, strategy, layout, (4,), 1, Target("jax", "sm90"), ("flash4",), None
        )
        assert call.backends
        for tile, name in call.backends:
            assert choice.lane_of(name, tile, Target("jax", "sm90")) == ("compiled", ())


# On a GPU


DOCUMENTS = np.repeat(np.arange(4, dtype=np.int32), 40)[:150]
FUNCTIONS: list[dict[str, Any]] = [
    {"mask_mod": lambda b, h, q, k, ids: ids[q] == ids[k], "aux": (DOCUMENTS,), "causal": True},
    {
        "score_mod": lambda s, b, h, q, k, slope, scale: s * scale - slope[h] * abs(q - k),
        "aux": (np.array([0.5, 0.1, 0.02, 0.0], np.float32), np.array(0.7, np.float32)),
        **{"softcap": 9.0, "causal": True, "dim": 128},
    },
    {
        "score_mod": lambda s, b, h, q, k, ids: s + ids[q],
        **{"aux": (np.repeat(DOCUMENTS, 2),), "packed": True, "causal": True},
    },
]


CALLS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softcap": 30.0},
    {"packed": True, "causal": True, "invariant": "batch"},
    {"packed": True, "window": (5, 3)},
    {"sinks": True, "causal": True},
    {"sinks": True, "dim": 72, "window": (5, 3)},
    {"key_ranges": masks.prefix_lm([70], 150), "heads": (6, 2)},
    *FUNCTIONS[:-1],
]
"""Calls whose gradients add in any order. Those of ``EXACT`` are not repeated here."""
EXACT: list[dict[str, Any]] = [
    {"dim": 256, "causal": True},
    {"packed": True, "causal": True},
    {"sinks": True, "packed": True, "causal": True, "dim": 128},
    FUNCTIONS[-1],
]
"""Calls with ``deterministic=True``, whose gradients have torch's bits, too. It compiles other kernels."""
ALIKE: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "window": 17, "deterministic": True},
    {"dim": 128, "causal": True, "dtype": "float16"},
    {"dim": 96, "heads": (4, 4)},
    {"dim": 192, "value_dim": 128, "causal": True},
    {"dim": 192, "value_dim": 128, "heads": (4, 4), "causal": True, "deterministic": True},
    {"dim": 64, "value_dim": 32, "causal": True},
    {"key_ranges": masks.global_and_window(9, (40, 20), 150), "dim": 128, "causal": True},
    {"mask_mod": lambda b, h, q, k: (q >= k) & (q - k < 30), "heads": (4, 4)},
    {
        "mask_mod": lambda b, h, q, k, table: table[h, q, k],
        "aux": (np.random.default_rng(3).random((4, 150, 150)) < 0.7,),
        "key_ranges": masks.prefix_lm([70], 150),
    },
]
"""Calls of features that others have, too. A GPU's suite leaves them out, because each compiles several kernels."""


@pytest.mark.cuda
@pytest.mark.on_gpus(only=lambda options: all(options is not each for each in ALIKE))
@pytest.mark.parametrize("options", [*CALLS, *({**each, "deterministic": True} for each in EXACT), *ALIKE])
def test_flash4_gives_torchs_bits_without_python(options: dict[str, Any]) -> None:
    if flash4_missing():
        pytest.skip(flash4_missing())
    usual = {"heads": (4, 2), "dim": 64, "packed": False, "dtype": "bfloat16", "deterministic": False}
    options = {**usual, "backend": "flash4", **options}
    (heads, kv_heads), dim, packed, dtype = (options.pop(name) for name in ("heads", "dim", "packed", "dtype"))
    rows, rng, wide = ((300,) if packed else (2, 150)), np.random.default_rng(0), options.pop("value_dim", dim)
    shapes = ((*rows, heads, dim), (*rows, kv_heads, dim), (*rows, kv_heads, wide), (*rows, heads, wide))
    given = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
    lengths = {"seq_info": jax_frontend.SeqInfo.from_lengths([130, 1, 169])} if packed else {}
    aux = options.pop("aux", ())
    logits = [np.linspace(-1.0, 2.0, heads, dtype=np.float32)] if options.pop("sinks", False) else []

    def forward_and_gradients(q: Any, k: Any, v: Any, dout: Any, *aux: Any) -> Any:
        def call(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
            more = {"sinks": sinks[0]} if sinks else {}
            return jax_frontend.attention(q, k, v, aux=aux, **more, **options, **lengths)

        out, pull = jax.vjp(call, q, k, v, *map(jnp.asarray, logits))
        return out, *pull(dout)

    given += [jnp.asarray(array) for array in aux]
    compiled = jax.jit(forward_and_gradients).lower(*given).compile()
    text = compiled.as_text()
    assert "attn_core.flash4." in text and "attn_core.callback" not in text
    ours = [np.asarray(actual.astype(jnp.float32)) for actual in compiled(*given)]
    floats = (np.array(array.astype(jnp.float32)) for array in given[:4])
    q, k, v, dout = (torch.from_numpy(array).to("cuda", getattr(torch, dtype)) for array in floats)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, *(torch.from_numpy(each).cuda() for each in logits))]
    lengths = {"seq_info": torch_frontend.SeqInfo.from_lengths([130, 1, 169])} if packed else {}
    options["aux"] = tuple(torch.from_numpy(array).cuda() for array in aux)
    if logits:
        options["sinks"] = leaves[3]
    out = torch_frontend.attention(*leaves[:3], **options, **lengths)
    theirs = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    exact = len(ours) if options["deterministic"] else 1  # otherwise sums are added in any order
    for place, (one, other) in enumerate(zip(ours, (x.float().cpu().numpy() for x in theirs), strict=True)):
        if place < exact:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.02 * np.abs(other).max())


def flash4_missing() -> str:
    target = Target.here("jax", "sm90")
    return dict(target.unavailable).get("flash4", "")


@pytest.mark.cuda
def test_flash4_names_its_kernels_and_their_time() -> None:
    if flash4_missing():
        pytest.skip(flash4_missing())
    spec = replace(SPEC, causal=True, needs_backward=True)
    steps = [step for direction in ("forward", "backward") for step in flash4.program(spec, direction).steps]
    assert [step.target for step in steps] == [
        step.target for d in ("forward", "backward") for step in flash4.program.__wrapped__(spec, d).steps
    ]
    q = jnp.zeros((2, 64, 4, 64), jnp.bfloat16)
    k = jnp.zeros((2, 64, 2, 64), jnp.bfloat16)
    jax.jit(lambda q, k: jax_frontend.attention(q, k, k, causal=True, scale=0.125, backend="flash4"))(q, k)
    assert compiled_lane.compile_seconds().keys() & {step.target for step in steps}


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 72])
def test_flash4_reads_and_writes_one_array_without_python(dim: int) -> None:
    if flash4_missing():
        pytest.skip(flash4_missing())
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((2, 150, 3, 4, dim), np.float32), "bfloat16")
    dout = jnp.asarray(rng.standard_normal((2, 150, 4, dim), np.float32), "bfloat16")
    options: dict[str, Any] = {"causal": True, "deterministic": True, "backend": "flash4"}

    def forward_and_gradient(qkv: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda one: jax_frontend.attention_qkvpacked(one, **options), qkv)
        return out, *pull(dout)

    compiled = jax.jit(forward_and_gradient).lower(qkv, dout).compile()
    text = compiled.as_text()
    assert "attn_core.flash4." in text and "attn_core.callback" not in text
    ours = [np.asarray(actual.astype(jnp.float32)) for actual in compiled(qkv, dout)]
    tensor, dout = (torch.from_numpy(np.array(x.astype(jnp.float32))).cuda().bfloat16() for x in (qkv, dout))
    out = torch_frontend.attention_qkvpacked(tensor.requires_grad_(), **options)
    theirs = [out.detach(), *torch.autograd.grad(out, [tensor], dout)]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other.float().cpu().numpy())


@pytest.mark.cuda
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"sinks": True}, {"window": 40, "softcap": 9.0}, {"chunks": True}, {"lengths": (3, 1), "pages": 3}),
        *({"quantised": True}, {"quantised": True, "chunks": True, "sinks": True}),
        *({"invariant": "prefix"}, {"invariant": "prefix", "chunks": True, "sinks": True}, {"invariant": "batch"}),
    ],
)
def test_decoding_from_pages_gives_torchs_bits_without_python(changes: dict[str, Any]) -> None:
    """The number of splits is more than 1 in the calls with long sequences, and 1 in the one with short ones."""
    options = dict(changes)
    quantised = options.pop("quantised", False)
    lengths = options.pop("lengths", (900, 1, 577))
    pages, rng, chunks = options.pop("pages", 200), np.random.default_rng(0), options.pop("chunks", False)
    news = [4, 1, 30] if chunks else [1] * len(lengths)
    table = np.full((len(lengths), 60), -1, np.int32)
    free = iter(rng.permutation(pages))
    for row, length in enumerate(lengths):
        count = -(-length // 16)
        table[row, :count] = [next(free) for _ in range(count)]
    pool = rng.standard_normal((2, pages, 16, 2, 64)).astype(np.float32)
    q = rng.standard_normal((sum(news), 8, 64)).astype(np.float32)
    sinks = np.linspace(-1, 1, 8, dtype=np.float32) if options.pop("sinks", False) else None
    tables = {"block_table": table, "seq_lens": np.array(lengths, np.int32)}
    if chunks:
        tables["cu_seqlens_q"] = np.cumsum([0, *news]).astype(np.int32)
        options["max_len_q"] = max(news)
    options |= {"backend": "triton_splitkv", "return_lse": True}
    if quantised:
        pool = (9 * pool).clip(-127, 127).astype(np.int8)
        tables |= {name: rng.random((pages, 16, 2)).astype(np.float32) + 0.1 for name in ("k_scales", "v_scales")}

    def call(q: Any, k: Any, v: Any, tables: Any, sinks: Any) -> Any:
        return jax_frontend.paged_attention(q, k, v, **tables, sinks=sinks, **options)

    operands = [jnp.asarray(q, "bfloat16"), *(jnp.asarray(each, None if quantised else "bfloat16") for each in pool)]
    arguments = (*operands, jax.tree.map(jnp.asarray, tables), None if sinks is None else jnp.asarray(sinks))
    compiled = jax.jit(call).lower(*arguments).compile()
    text = compiled.as_text()
    assert "triton_kernel_call_ffi" in text and "attn_core.callback" not in text
    ours = [np.asarray(each.astype(jnp.float32)) for each in compiled(*arguments)]
    tensors = [torch.from_numpy(each).cuda() for each in (q, *pool)]
    tensors = [each if each.dtype is torch.int8 else each.bfloat16() for each in tensors]
    in_torch_tables = {name: torch.from_numpy(each).cuda() for name, each in tables.items()}
    more = None if sinks is None else torch.from_numpy(sinks).cuda()
    theirs = torch_frontend.paged_attention(*tensors, **in_torch_tables, sinks=more, **options)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other.float().cpu().numpy())
