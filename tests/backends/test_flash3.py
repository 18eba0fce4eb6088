"""Tests FlashAttention 3: lowering, refusals, arguments by name, and e4m3, with a stand-in for the kernel.

The stand-in has the operators' schemas and computes with the math backend, so all the code around the kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from callers_view import callers_results
from direct_calls import assert_right, assert_writes_into, tensors
from oracle_cases import make
from paged_inputs import inputs_of

from attn_core import AttentionSpec, PagedKV, SeqInfo, Target, backends, explain
from attn_core.backends import flash3
from attn_core.backends.flash3 import SMALLEST_FACTOR, Operators, prepare, quantise
from attn_core.backends.shared import first_calls, rewrites
from attn_core.backends.support import Build
from attn_core.call.tensors import Inputs, PagedInputs
from attn_core.correctness import accuracy, reference
from attn_core.errors import DTypeError, ShapeError
from torch_frontend import attention
from torch_frontend import explain as explained
from torch_frontend.dispatch import plan
from torch_frontend.flash_attn import hopper

math: Any = backends.load("math")
fp8: Any = backends.load("flash3_fp8")

SPEC = AttentionSpec(
    batch=2, q_len=131, kv_len=257, num_heads=8, num_kv_heads=2, head_dim=128, value_dim=128, dtype="bfloat16"
)
PACKED = replace(SPEC, batch=1, documents=3, max_len_q=101, max_len_k=199)
FORWARD_ONLY = Build("tokenspeed-fa3 3.0.0", without=("softcap", "backward"))
FULL = Build("flash-attn-3 3.0.0")


# The kernel's arguments

PLAIN = {
    "softmax_scale": 1 / 128**0.5,
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "num_splits": 0,
    "pack_gqa": None,
    "deterministic": False,
}
LENGTHS = {"max_seqlen_q": 101, "max_seqlen_k": 199}


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (SPEC, {}),
        (replace(SPEC, causal=True), {"is_causal": True, "window_size_right": 0}),
        (replace(SPEC, window=(None, 0)), {"is_causal": True, "window_size_right": 0}),
        (replace(SPEC, causal=True, window=(7, 3)), {"window_size_left": 7, "window_size_right": 0}),
        (replace(SPEC, causal=True, window=(7, None)), {"window_size_left": 7, "window_size_right": 0}),
        (replace(SPEC, window=(5, None)), {"window_size_left": 5}),
        (replace(SPEC, window=(None, 2)), {"window_size_right": 2}),
        (replace(SPEC, window=(0, 0)), {"window_size_left": 0, "window_size_right": 0}),
        (replace(SPEC, window=(2**62, 1)), {"window_size_left": 388, "window_size_right": 1}),
        (replace(SPEC, softcap=50), {"softcap": 50.0}),
        (replace(SPEC, scale=0.5), {"softmax_scale": 0.5}),
        (replace(SPEC, deterministic=True), {"deterministic": True}),
        (PACKED, LENGTHS),
        (replace(PACKED, causal=True), LENGTHS | {"is_causal": True, "window_size_right": 0}),
        (replace(PACKED, q_len=4096), LENGTHS),
        (replace(PACKED, q_len=4097), LENGTHS | {"num_splits": 1, "pack_gqa": False}),  # more than 2^15 rows of heads
        (replace(PACKED, q_len=1024 * 3, num_heads=16), LENGTHS | {"num_splits": 1, "pack_gqa": False}),
        (replace(PACKED, q_len=1024 * 3 - 1, num_heads=16), LENGTHS | {"num_splits": 1}),  # few queries
        (replace(SPEC, batch=1, q_len=4096), {}),
        (replace(SPEC, batch=1, q_len=4097), {"num_splits": 1}),
    ],
    ids=str,
)
def test_lower(spec: AttentionSpec, changes: dict[str, Any]) -> None:
    assert flash3.lower(spec) == PLAIN | changes
    assert fp8.lower(spec) == PLAIN | changes


def test_the_kernel_width_of_each_head_dim() -> None:
    def widths(built: tuple[int, ...], *dims: int, multiple: int = 8) -> list[int]:
        return [rewrites.width_of(dim, flash3.WIDTHS, built, multiple) for dim in dims]

    assert widths((), 1, 8, 11, 64, 72, 80, 96, 130, 256) == [8, 8, 16, 64, 72, 80, 96, 136, 256]
    assert widths((), 1, 16, 24, 80, 200, multiple=16) == [16, 16, 32, 80, 208]
    assert widths((64, 128), 40, 64, 72, 96, 100) == [40, 64, 128, 128, 104]
    assert widths((64, 128), 136) == [136]  # refused earlier: larger than any width of the build


# What is refused


def reasons(spec: AttentionSpec, build: Build | None, name: str = "flash3", device: str = "sm90") -> tuple[str, ...]:
    where = Target("torch", device, builds=() if build is None else ((name, build),))
    return explain(spec, where, name).reasons(name)


def test_no_build_refuses_a_plain_call() -> None:
    for build in (None, FULL, FORWARD_ONLY, replace(FORWARD_ONLY, head_dims=(64, 128))):
        for spec in (SPEC, PACKED, replace(SPEC, causal=True, sinks=True, return_lse=True, value_dim=64)):
            assert reasons(spec, build) == ()
    assert reasons(replace(SPEC, needs_backward=True, softcap=5.0), FULL) == ()


def test_other_devices_are_refused() -> None:
    for device in ("sm80", "sm100", "cpu"):
        assert reasons(SPEC, None, device=device) == (f"device {device}: the FlashAttention 3 kernel needs sm90",)


@pytest.mark.parametrize(
    ("fields", "build", "words"),
    [
        ({"softcap": 50.0}, FORWARD_ONLY, "softcap=50.0: the FlashAttention 3 kernel (tokenspeed-fa3 3.0.0) has none"),
        ({"needs_backward": True}, FORWARD_ONLY, "backward: "),
        ({"window": (3, None)}, Build("fa3-fwd 0.0.3", ("window",)), "window=(3, None): the Fla"),
        ({"dtype": "float16"}, Build("fa3-fwd 0.0.3", ("float16",)), "dtype float16: the FlashAttention 3 kernel (fa3"),
        ({"head_dim": 192}, Build("small 1", head_dims=(64, 128)), "head_dim=192: the FlashAttention 3 kernel (small"),
        ({"head_dim": 257}, FULL, "head_dim=257: the FlashAttention 3 kernel stops at 256"),
        ({"causal": True, "alignment": "top_left"}, FULL, "alignment=top_left"),
        ({"dropout": 0.1}, FULL, "dropout=0.1"),
        ({"alibi_shape": (8,)}, FULL, "alibi_slopes"),
        ({"mask_shape": (1, 1, 131, 257)}, FULL, "mask of shape"),
        ({"batch": 65536}, FULL, "batch=65536: the FlashAttention 3 kernel launches at most 65535 rows"),
        ({"return_lse": True, "needs_backward": True, "softcap": 5.0}, FULL, "return_lse with gradients and softcap"),
        (
            {"deterministic": True, "needs_backward": True, "head_dim": 256},
            FULL,
            "deterministic=True with head_dim=256",
        ),
        ({"deterministic": True, "needs_backward": True}, None, "backward: deterministic=True: the FlashAttention 3"),
        (
            {"deterministic": True, "needs_backward": True},
            replace(FULL, without=(flash3.ORDERED,)),
            "not known to keep",
        ),
    ],
    ids=str,
)
def test_refusals_name_the_value(fields: dict[str, Any], build: Build | None, words: str) -> None:
    actual = reasons(replace(SPEC, **fields), build)
    assert any(words in reason for reason in actual), actual


def test_deterministic_calls_are_accepted_by_new_builds_and_in_every_forward() -> None:
    assert reasons(replace(SPEC, deterministic=True, needs_backward=True), FULL) == ()
    assert reasons(replace(SPEC, deterministic=True), None) == ()
    assert reasons(replace(SPEC, deterministic=True, head_dim=256), replace(FULL, without=(flash3.ORDERED,))) == ()


def test_fp8_runs_only_by_name_and_has_no_gradient() -> None:
    assert reasons(SPEC, FULL, "flash3_fp8") == () == reasons(PACKED, None, "flash3_fp8")
    assert "has no gradient" in reasons(replace(SPEC, needs_backward=True), FULL, "flash3_fp8")[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash3, "build", lambda: replace(FULL, without=("fp8",)))
        with pytest.raises(RuntimeError, match=r"flash-attn-3 3\.0\.0 was built without fp8"):
            fp8.build()  # the build is then unavailable, and this is the reason
    assert reasons(replace(SPEC, dtype="float16"), replace(FULL, without=("float16",)), "flash3_fp8") == ()
    assert explain(SPEC, Target("torch", "sm90")).backend != "flash3_fp8"
    assert fp8.backward is None


# Arguments by name


def schema(text: str) -> Any:
    return torch._C.parse_schema(text)


def test_arguments_follow_the_order_of_the_schema() -> None:
    other = schema(
        "x::fwd(bool is_causal, Tensor v, Tensor q, Tensor? out, float softmax_scale, Tensor k, Tensor? page_table, "
        "int num_splits=3, float softcap=0.0, Tensor? sinks=None, str extra='as it is') -> (Tensor, Tensor)"
    )
    operator = SimpleNamespace(_schema=other, redispatch=lambda keys, *values: (keys, list(values)))
    run = prepare(operator, {"softmax_scale": 0.25, "is_causal": True, "softcap": 7.0}, ("q", "k", "v", "out"))
    for out in ("OUT", None):
        keys, values = run("Q", "K", "V", out)
        assert values == [True, "V", "Q", out, 0.25, "K", None, 3, 7.0, None, "as it is"]
        assert keys.has(torch._C.DispatchKey.CUDA) and not keys.has(torch._C.DispatchKey.AutogradCUDA)
    with pytest.raises(TypeError, match=r"x::fwd: this build takes no attention_sink, pack"):
        prepare(operator, {"pack": 1, "attention_sink": 2}, ("q", "k", "v"))
    with pytest.raises(KeyError, match="cu_seqlens_q"):
        prepare(operator, {}, ("q", "k", "v", "cu_seqlens_q"))


# The whole path, with a stand-in for the kernel

ARGUMENTS = {
    "forward": (
        "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(out!)? out=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
        "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
        "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
        "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
        "float softcap=0.0, int num_splits=0, bool? pack_gqa=None, int sm_margin=0, Tensor? sinks=None)"
        " -> (Tensor(out!), Tensor, Tensor, Tensor)"
    ),
    "backward": (
        "flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(dq!)? dq, Tensor(dk!)? dk, Tensor(dv!)? dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_q, int? max_seqlen_q, int? max_seqlen_k, float softmax_scale, bool is_causal, "
        "int window_size_left=-1, int window_size_right=-1, float softcap=0.0, bool deterministic=False, "
        "int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
}


class StandIn:
    """An operator that reads its arguments by position, as the kernel does, and computes with the math backend."""

    def __init__(self, direction: str, lacks: tuple[str, ...] = (), text: str | None = None) -> None:
        self._schema, self.direction, self.lacks = schema(text or ARGUMENTS[direction]), direction, lacks
        self.seen: dict[str, Any] = {}

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        names = [argument.name for argument in self._schema.arguments]
        given = self.seen = dict(zip(names, values, strict=True))
        bounded = given["window_size_left"] >= 0 or given["window_size_right"] > 0
        requested = {
            "softcap": given["softcap"] > 0,
            "window": bounded,
            "packed": given["cu_seqlens_q"] is not None and given.get("page_table") is None,
            "paged": given.get("page_table") is not None,
            "float16": given["q"].dtype == torch.float16,
            "fp8": given["q"].dtype == torch.float8_e4m3fn,
            "backward": self.direction == "backward",
        }
        for word in self.lacks:
            if requested.get(word):
                raise RuntimeError(f"This flash attention build does not support {word}.")
        return self.run(given)

    def redispatch(self, keys: Any, *values: Any) -> tuple[Any, ...]:
        with torch.no_grad():  # a kernel below autograd
            return self(*values)

    def run(self, given: dict[str, Any]) -> tuple[Any, ...]:
        if given.get("page_table") is not None:
            return run_in_pages(given)
        inputs = Inputs(
            *(widened(given, name) for name in "qkv"),
            cu_seqlens_q=given["cu_seqlens_q"],
            cu_seqlens_k=given["cu_seqlens_k"],
        )
        spec = spec_of(given, inputs)
        assert all(given[name].stride(-1) == 1 for name in "qkv")
        if self.direction == "forward":
            out, lse = math.forward(spec, inputs)
            out = out if given["out"] is None else given["out"].copy_(out)
            return out, lse, None, None
        saved = (given["out"], given["softmax_lse"], given["dout"])
        actual = math.backward(spec, inputs, *saved, None)
        for name, gradient in zip(("dq", "dk", "dv"), actual):
            given[name].copy_(gradient)
        return (None,) * 5


def run_in_pages(given: dict[str, Any]) -> tuple[Any, ...]:
    """The forward on pages: packed queries, or a batch with one query in each row."""
    q, alone = given["q"], given["cu_seqlens_q"] is None
    table, lengths = given["page_table"], given["seqused_k"]
    paged = PagedKV(num_pages=given["k"].shape[0], page_size=given["k"].shape[1], width=table.shape[1])
    left, right = (None if side < 0 else side for side in (given["window_size_left"], given["window_size_right"]))
    rows = q[:, 0] if alone else q  # [tokens, heads, head_dim]
    spec = AttentionSpec(
        **{"batch": 1, "q_len": len(rows), "kv_len": paged.capacity, "num_heads": rows.shape[1]},
        **{"num_kv_heads": given["k"].shape[2], "head_dim": rows.shape[2], "value_dim": given["v"].shape[3]},
        **{"dtype": str(q.dtype).removeprefix("torch."), "causal": given["is_causal"], "window": (left, right)},
        **{"softcap": given["softcap"] or None, "scale": given["softmax_scale"], "documents": len(lengths)},
        **{"max_len_q": given["max_seqlen_q"], "max_len_k": given["max_seqlen_k"], "paged": paged},
    )
    assert given["cu_seqlens_k"] is None and all(0 <= page < paged.num_pages for page in table.flatten().tolist())
    out, lse = math.forward(spec, PagedInputs(rows, given["k"], given["v"], table, lengths, given["cu_seqlens_q"]))
    out, lse = (out[:, None], lse.T[..., None]) if alone else (out, lse)  # [tokens, 1, heads, dim], [tokens, heads, 1]
    return out if given["out"] is None else given["out"].copy_(out), lse, None, None


def widened(given: dict[str, Any], name: str) -> Any:
    """Converts an e4m3 tensor to bfloat16 with its factors, as the kernel does; returns any other tensor unchanged."""
    tensor, factors = given[name], given.get(f"{name}_descale")
    if tensor.dtype != torch.float8_e4m3fn:
        assert factors is None
        return tensor
    if factors is None:
        return tensor.to(torch.bfloat16)
    offsets = given["cu_seqlens_q" if name == "q" else "cu_seqlens_k"]
    return dequantised(tensor, factors, offsets).to(torch.bfloat16)


def dequantised(tensor: Any, factors: Any, offsets: Any = None) -> Any:
    """The float32 values of ``quantised``'s results, computed by plain loops over documents."""
    heads = factors.repeat_interleave(tensor.shape[-2] // factors.shape[1], dim=1)  # [batch or documents, heads]
    if offsets is None:
        return tensor.float() * heads[:, None, :, None]
    values = tensor.float()
    for at, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        values[start:stop] *= heads[at][:, None]
    return values


def spec_of(given: dict[str, Any], inputs: Inputs) -> AttentionSpec:
    packed = given["cu_seqlens_q"] is not None
    q, k, v = (tensor[None] if packed else tensor for tensor in inputs[:3])
    left, right = (None if side < 0 else side for side in (given["window_size_left"], given["window_size_right"]))
    documents = len(given["cu_seqlens_q"]) - 1 if packed else None
    return AttentionSpec(
        **dict(zip(("batch", "q_len", "num_heads", "head_dim"), q.shape)),
        **{"kv_len": k.shape[1], "num_kv_heads": k.shape[2], "value_dim": v.shape[3]},
        dtype=str(inputs.q.dtype).removeprefix("torch."),
        causal=given["is_causal"],
        window=(left, right),
        softcap=given["softcap"] or None,
        scale=given["softmax_scale"],
        documents=documents,
        max_len_q=given["max_seqlen_q"],
        max_len_k=given["max_seqlen_k"],
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replaces the operators by stand-ins. The function ``build`` then describes the stand-ins."""

    def install_stand_ins(lacks: tuple[str, ...] = (), backward: str | None = None) -> Operators:
        actual = Operators(StandIn("forward", lacks), StandIn("backward", lacks, backward), "stand-in 1.2")
        monkeypatch.setattr(flash3, "operators", lambda: actual)
        ones = first_calls._ones
        monkeypatch.setattr(first_calls, "_ones", lambda spec, device: ones(spec, "cpu"))
        empty_caches()
        return actual

    def empty_caches() -> None:
        for cached in (flash3.build, flash3._operator, flash3._prepared, flash3.rewrites._widened):
            cached.cache_clear()

    yield install_stand_ins
    empty_caches()
    plan.plan.cache_clear()


def test_build_lists_the_missing_features(install: Any) -> None:
    install()
    assert flash3.build() == Build("stand-in 1.2") == fp8.build()
    lacks = ("float16", "window", "softcap", "packed", "paged", "fp8", "backward")
    install(lacks)
    assert flash3.build() == Build("stand-in 1.2", without=lacks)
    install(backward=ARGUMENTS["backward"].replace("-> (", "-> (Tensor, Tensor, Tensor, "))
    assert flash3.build() == Build("stand-in 1.2", without=(flash3.ORDERED,))
    assert flash3.probe() == "stand-in 1.2"


@pytest.mark.parametrize("layout", ["contiguous", "strided", "stepped"])
def test_the_shortcut_gives_the_bits_of_the_forward(install: Any, layout: str) -> None:
    install()
    spec = replace(SPEC, dtype="float32", head_dim=64, value_dim=64, causal=True, window=(40, 0))
    inputs = Inputs(*(torch.randn(2, length, heads, 64) for length, heads in ((131, 8), (257, 2), (257, 2))))
    if layout == "strided":
        inputs = Inputs(*(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs[:3]))
    elif layout == "stepped":
        inputs = Inputs(*(torch.stack((tensor, tensor), -1)[..., 0] for tensor in inputs[:3]))
    run = flash3.shortcut(spec)
    assert run is not None
    for one, two in zip(run(*inputs[:3]), flash3.forward(spec, inputs), strict=True):
        assert torch.equal(one, two)


def test_the_steps_of_a_decoding_loop_share_the_arguments(install: Any) -> None:
    install()
    assert flash3.shortcut(replace(SPEC, q_len=1, kv_len=100)) is not None
    before = flash3._prepared.cache_info().misses
    for kv_len in range(101, 120):
        assert flash3.shortcut(replace(SPEC, q_len=1, kv_len=kv_len)) is not None
    assert flash3._prepared.cache_info().misses == before


@pytest.mark.parametrize("fields", [{"needs_backward": True}, {"head_dim": 60, "value_dim": 60}])
def test_calls_without_a_shortcut(install: Any, fields: dict[str, Any]) -> None:
    install()
    assert flash3.shortcut(replace(SPEC, **fields)) is None


@pytest.mark.parametrize("new", [(1, 1, 1), (3, 0, 5)], ids=["one query each", "chunks"])
@pytest.mark.parametrize("into", [False, True])
def test_paged_results_match_the_reference(install: Any, new: tuple[int, ...], into: bool) -> None:
    install()
    paged = PagedKV(num_pages=40, page_size=3, width=7)
    spec = AttentionSpec(
        **{"batch": 1, "q_len": sum(new), "kv_len": paged.capacity, "num_heads": 4, "num_kv_heads": 2},
        **{"head_dim": 64, "value_dim": 64, "dtype": "float32", "causal": True, "window": (5, 0), "sinks": True},
        **{"documents": 3, "max_len_q": max(new), "max_len_k": paged.capacity, "paged": paged, "return_lse": True},
    )
    drawn = inputs_of(spec, np.random.default_rng(0), (17, 2, 21), new)
    expected, expected_lse = reference.forward(spec, drawn)
    inputs = tensors(drawn, "float32")
    if max(new) == 1:
        inputs = inputs._replace(cu_seqlens_q=None)
    buffers = (torch.empty(spec.out_shape), torch.empty(spec.lse_shape)) if into else None
    out, lse = flash3.forward(spec, inputs, buffers)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(callers_results(spec, drawn, lse)[0], expected_lse, atol=1e-5)


def test_paged_refusals() -> None:
    def reasons(page_size: int, queries: int, **fields: Any) -> str:
        paged = PagedKV(num_pages=9, page_size=page_size, width=2)
        sizes = {"q_len": 3 * queries, "kv_len": paged.capacity, "max_len_q": queries, "max_len_k": paged.capacity}
        spec = AttentionSpec(
            **{"batch": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16"}
            | {"causal": True, "documents": 3, "paged": paged, **sizes, **fields}
        )
        return "; ".join(flash3.refuses(spec, "sm90", None))

    assert not reasons(64, 500) and not reasons(256, 16) and not reasons(1, 1)
    assert reasons(256, 17).startswith("page_size=256 with 17 queries of a sequence: the FlashAttention 3 kernel reads")
    assert "head_dim=128/64: the FlashAttention 3 kernel would need a padded copy" in reasons(16, 1, value_dim=64)
    assert "head_dim=60/60" in reasons(16, 1, head_dim=60, value_dim=60)


def test_a_build_without_scale_arguments_has_no_fp8(install: Any) -> None:
    operators = install()
    text = ARGUMENTS["forward"].replace("Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, ", "")
    operators.forward._schema = schema(text)
    assert flash3.build().without == ("fp8",)


def test_build_finds_the_compiled_widths(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    whole = StandIn.run

    def small(self: StandIn, given: dict[str, Any]) -> tuple[Any, ...]:
        if given["q"].shape[-1] > 128:
            raise RuntimeError("no kernel")
        if given["q"].shape[-1] == 96:  # a build may also leave the output unwritten
            return given["out"], None, None, None
        return whole(self, given)

    monkeypatch.setattr(StandIn, "run", small)
    assert flash3.build() == Build("stand-in 1.2", head_dims=(64, 128))

    def nothing(self: StandIn, given: dict[str, Any]) -> tuple[Any, ...]:
        raise RuntimeError("no kernel")

    flash3.build.cache_clear()
    monkeypatch.setattr(StandIn, "run", nothing)
    with pytest.raises(RuntimeError, match=r"stand-in 1\.2: none of its kernels"):
        flash3.build()

    def full(self: StandIn, given: dict[str, Any]) -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("says nothing about the build")

    monkeypatch.setattr(StandIn, "run", full)
    with pytest.raises(torch.OutOfMemoryError):
        flash3.build()


CASES: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 16, "value_dim": 16},
    "narrow, rows that see nothing": {"causal": True, "q_len": 7, "kv_len": 5},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "sinks": {"sinks": True, "causal": True, "return_lse": True},
    "packed": {"batch": 1, "q_len": 12, "kv_len": 14, "documents": 6, "causal": True, "max_len_q": 6, "max_len_k": 5},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_match_the_reference(install: Any, name: str, dtype: str) -> None:
    operators = install()
    case = make({**CASES[name], "needs_backward": True}, dtype)
    inputs = tensors(case.inputs, dtype)
    assert_right(flash3, case, inputs._replace(q=inputs.q.requires_grad_()))
    forward, backward = operators.forward.seen, operators.backward.seen
    assert (forward["num_splits"], forward["sinks"], backward["deterministic"]) == (0, None, False)


def test_results_are_written_into_buffers_that_the_kernel_accepts(install: Any) -> None:
    install()
    case = make({"head_dim": 16, "value_dim": 16, "needs_backward": True}, "bfloat16")
    assert_writes_into(flash3, case)
    buffer = torch.empty(case.spec.out_shape, dtype=torch.bfloat16)
    assert fp8.forward(case.spec, tensors(case.inputs, "bfloat16"), (buffer, None))[0] is buffer


# e4m3


def error_bound(values: Any, factors_of_elements: Any) -> Any:
    """Half a step of e4m3: 2^-4 of a normal number, 2^-10 of the factor below that; plus the rounding of float32."""
    return torch.maximum(values.abs() * (2.0**-4 + 2.0**-20), factors_of_elements * 2.0**-10 * 1.001)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("offsets", [None, [0, 5, 5, 12, 13]], ids=["dense", "packed"])
def test_quantised_values_are_within_e4m3s_error(offsets: list[int] | None, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 13, 6, 16) if offsets is None else (13, 6, 16)
    values = torch.randn(shape, generator=generator) * torch.tensor([1e-3, 1e-3, 1.0, 7.0, 900.0, 2.0])[:, None]
    values = values.to(getattr(torch, dtype))
    cu = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    rounded, factors = quantise(values, 3, cu)
    assert rounded.dtype == torch.float8_e4m3fn and rounded.shape == values.shape
    assert factors.dtype == torch.float32 and factors.shape == ((3, 3) if offsets is None else (4, 3))
    actual = dequantised(rounded, factors, cu)
    step = dequantised(torch.ones_like(rounded), factors, cu)
    assert ((actual - values.float()).abs() <= error_bound(values.float(), step)).all()
    assert rounded.float().abs().max() == 448  # the largest value of a group becomes the largest e4m3 value
    assert offsets is None or (factors[1] == SMALLEST_FACTOR).all()  # a document without tokens


def test_zeros_and_tiny_values_give_no_nan() -> None:
    values = torch.zeros(2, 5, 4, 16, dtype=torch.bfloat16)
    values[1, :, 2:] = torch.finfo(torch.bfloat16).smallest_normal
    rounded, factors = quantise(values, 2)
    assert (factors > 0).all() and torch.isfinite(factors).all() and torch.isfinite(rounded.float()).all()
    assert (dequantised(rounded, factors) - values.float()).abs().max() <= SMALLEST_FACTOR
    huge = torch.full((1, 3, 2, 16), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    rounded, factors = quantise(huge, 2)
    assert (rounded.float() == 448).all() and torch.isfinite(factors).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_changes_only_its_own_element(value: float) -> None:
    values = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(1))
    clean, factors = quantise(values, 2)
    largest = values[1, :, :2].abs().amax()
    broken = values.clone()
    broken[1, 2, 1, 3] = value
    assert values[1, 2, 1, 3].abs() < largest
    rounded, same = quantise(broken, 2)
    assert torch.equal(factors, same)
    differs = rounded.float() != clean.float()
    assert differs.sum() == 1 and torch.isnan(rounded.float()[1, 2, 1, 3])


def test_tokens_outside_every_document_do_not_affect_the_scale() -> None:
    values = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32)
    _, factors = quantise(values, 2, offsets)
    values[7:] = 1e9
    rounded, same = quantise(values, 2, offsets)
    assert torch.equal(factors, same) and rounded.shape == values.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_fp8_results_are_close_to_the_reference(install: Any, name: str, dtype: str) -> None:
    operators = install()
    case = make(CASES[name], dtype)
    kind, inputs = getattr(torch, dtype), tensors(case.inputs, dtype)
    inputs = inputs._replace(q=inputs.q.transpose(-1, -2).contiguous().transpose(-1, -2))  # the last axis is not dense
    out, lse = fp8.forward(case.spec, inputs)
    assert out.dtype == kind and not torch.isnan(out).any() and lse.dtype == torch.float32
    seen = operators.forward.seen
    assert seen["q"].dtype == seen["v"].dtype == torch.float8_e4m3fn and seen["q"].shape[-1] % 16 == 0
    assert seen["q_descale"].shape == seen["v_descale"].shape == (case.spec.documents or case.spec.batch, 3)
    truth = torch.from_numpy(accuracy.expect(case.spec, case.inputs).truth["out"])
    assert (out.double() - truth).square().mean().sqrt() <= 0.08 * truth.square().mean().sqrt()


def test_float8_tensors_keep_their_numbers_and_factors(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's arguments are the caller's, and the output is attention on the numbers that they stand for."""
    operators = install()
    here = SimpleNamespace(here=lambda framework, _: Target(framework, "sm90"))
    monkeypatch.setattr(plan, "Target", here)
    generator = torch.Generator().manual_seed(0)
    stored = [torch.randn(2, 5, heads, 64, generator=generator).to(torch.float8_e4m3fn) for heads in (4, 2, 2)]
    factors = [torch.rand(2, 2, generator=generator) + 0.5 for _ in stored]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    out, lse = hopper.flash_attn_func(*stored, causal=True, return_attn_probs=True, **named)
    for name, tensor in zip("qkv", stored, strict=True):
        seen = operators.forward.seen
        assert torch.equal(seen[name].float(), tensor.float()) and seen[f"{name}_descale"] is named[f"{name}_descale"]
    exact = [dequantised(*each).to(torch.bfloat16) for each in zip(stored, factors, strict=True)]
    expected, expected_lse = attention(*exact, causal=True, backend="math", return_lse=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert hopper.flash_attn_func(*stored).shape == out.shape and operators.forward.seen["q_descale"] is None
    for wrong, error in (
        ({"q_descale": torch.ones(2, 4)}, ShapeError),
        ({"k_descale": factors[0].double()}, DTypeError),
    ):
        with pytest.raises(error, match=rf"^{next(iter(wrong))}: expected"):
            hopper.flash_attn_func(*stored, **wrong)
    with pytest.raises(ShapeError, match=r"^head_dim=72: the FlashAttention 3 kernel has 80 channels; pad float8"):
        hopper.flash_attn_func(*[torch.zeros(1, 5, 2, 72).to(torch.float8_e4m3fn) for _ in range(3)])


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 300}, {}], ids=str)
def test_long_documents_equal_separate_calls(options: dict[str, Any]) -> None:
    """The documents are so long that a tile holds rows of one head: tiles other than those of a single document."""
    if reason := dict(Target.here("torch", "sm90").unavailable).get("flash3"):
        pytest.skip(reason)
    lengths = [1500, 2600, 1023, 1]
    info = SeqInfo.from_lengths(lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 128, device="cuda", dtype=torch.bfloat16) * 0.7 for heads in (16, 4, 4))
    assert flash3.lower(explained(q, k, v, seq_info=info, **options).spec)["pack_gqa"] is False
    actual = attention(q, k, v, seq_info=info, backend="flash3", **options)
    alone = list(zip(*(each.split(lengths) for each in (q, k, v)), strict=True))
    usual, truth = (
        torch.cat([attention(*(x[None].to(dtype) for x in each), backend=name, **options)[0] for each in alone])
        for dtype, name in ((torch.bfloat16, "flash3"), (torch.float64, "math"))
    )
    usual, error = ((each.double() - truth).abs() for each in (usual, actual))
    assert error.mean() <= 1.5 * usual.mean() and error.max() <= 3 * usual.max()
