"""triton_ordered: its rules, its choice and its code for sm90, and its numbers and bits on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from sm90_code import compiled, is_in_order, loose_operations

from attn_core import AttentionSpec, Target, explain
from attn_core.backends import triton_ordered, triton_splitkv
from attn_core.backends.shared.in_order import order
from attn_core.backends.triton_ordered import launches
from attn_core.selection import preference

GPU = Target("torch", "sm90")


def spec_of(**fields: Any) -> AttentionSpec:
    sizes = {"batch": 4, "q_len": 4096, "kv_len": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    sizes |= {"value_dim": fields.get("head_dim", 128), "dtype": "bfloat16", "causal": True, "needs_backward": True}
    return AttentionSpec(**{**sizes, "invariant": "prefix", **fields})


PACKED = {"batch": 1, "documents": 5, "max_len_q": 4096, "max_len_k": 4096}


# The rules and the choice


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_it_is_the_choice_for_prefix_and_never_without_a_promise(framework: str) -> None:
    for fields in ({}, PACKED, {"softcap": 3.0, "sinks": True, "window": (99, 0)}, {"alibi_shape": (32,)}):
        spec, target = spec_of(**fields), Target(framework, "sm90")
        assert explain(spec, target).backend == "triton_ordered"
        assert "triton_ordered" not in preference.order(replace(spec, invariant=None), framework, "sm90")
        assert explain(replace(spec, invariant=None), target, "triton_ordered").backend == "triton_ordered"
    assert explain(spec_of(invariant="batch"), Target(framework, "sm90")).backend == "flash4"
    assert explain(spec_of(), Target(framework, "cpu")).backend != "triton_ordered"


def test_what_it_refuses() -> None:
    lacks = {
        "mask of shape [1, 1, 4096, 4096]: the Triton kernel of one order has none": {"mask_shape": (1, 1, 4096, 4096)},
        "bias of shape [1, 1, 4096, 4096]: the Triton kernel of one order has none": {"bias_shape": (1, 1, 4096, 4096)},
        "key_ranges of shape [1, 1, 4096, 1, 2]: the Triton kernel of one order has none": {
            "key_ranges_shape": (1, 1, 4096, 1, 2)
        },
        "head_dim=80: the Triton kernel of one order takes powers of two from 16 on": {"head_dim": 80},
        "head_dim=8: the Triton kernel of one order takes powers of two from 16 on": {"value_dim": 8},
        "head_dim=512: the Triton kernel of one order stops at 256": {"head_dim": 512},
        "dtype float32: the Triton kernel of one order takes bfloat16, float16": {"dtype": "float32"},
        "dropout=0.5: the Triton kernel of one order has none": {"dropout": 0.5, "invariant": None},
    }
    for reason, fields in lacks.items():
        assert reason in explain(spec_of(**fields), GPU, "triton_ordered").reasons("triton_ordered")
    for device in ("sm80", "sm100"):
        (reason,) = explain(spec_of(), Target("torch", device), "triton_ordered").reasons("triton_ordered")
        assert reason == f"device {device}: the Triton kernel of one order needs sm90"


def test_grids_that_are_too_large_are_refused() -> None:
    long = {"batch": 1, "q_len": 2**23, "kv_len": 2**24}
    reasons = triton_ordered.refuses(spec_of(**long), "sm90", None)
    assert [reason.partition(":")[0] for reason in reasons] == ["8388608 queries of a row", "16777216 keys of a row"]
    many = spec_of(batch=2**27, q_len=1, kv_len=1)
    assert triton_ordered.refuses(many, "sm90", None)[0].startswith("134217728 rows of 1 queries and 32 heads: ")


def test_the_order_is_that_of_pages() -> None:
    import paged_specs

    for dim in (64, 128, 256):
        spec = spec_of(head_dim=dim)
        paged = paged_specs.spec_of(head_dim=dim, value_dim=dim, invariant="prefix")
        assert order.order(spec) == order.order(paged)
        settings = [backend.lower(each) for backend, each in ((triton_ordered, spec), (triton_splitkv, paged))]
        assert len({(each["tile_keys"], each["share_keys"]) for each in settings}) == 1
    words = " ".join(str(explain(spec_of(), GPU, "triton_ordered")).split())
    assert "in every batch, chunk and page: tiles of 64 keys, added in shares of 1024" in words


def test_widths_alone_choose_the_tiles_of_gradients() -> None:
    specs = [spec_of(), spec_of(batch=1), spec_of(**PACKED), spec_of(q_len=7), spec_of(window=(9, 0), sinks=True)]
    assert {launches.tiles(spec) for spec in specs} == {launches.TILES[128]}
    assert launches.tiles(spec_of(value_dim=256)) == launches.TILES[256]


# The code


def operands(spec: AttentionSpec) -> tuple[Any, ...]:
    """q, k, v, out and lse without memory."""
    rows = () if spec.packed else (spec.batch,)
    sizes = (
        (*rows, spec.q_len, spec.num_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim),
        *(spec.out_shape, spec.lse_shape),
    )
    return tuple(torch.empty(size, device="meta") for size in sizes)


def kinds_of(spec: AttentionSpec) -> dict[str, str]:
    stored = {"bfloat16": "bf16", "float16": "fp16"}[spec.dtype]
    return dict.fromkeys("qkv", stored) | {"dout": stored, "shift": "fp32", "delta": "fp32"}


def forward_for_sm90(spec: AttentionSpec) -> Any:
    from attn_core.backends.triton_ordered import kernels

    q, k, v, out, lse = operands(spec)
    way, stored = order.how(spec, 132), kinds_of(spec)["q"]
    if way.shares:
        tokens = spec.batch * spec.q_len
        out = torch.empty(way.shares, tokens, spec.num_heads, spec.value_dim, device="meta")
        lse = torch.empty(way.shares, spec.num_heads, tokens, device="meta")
    kinds = dict.fromkeys("qkv", stored) | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "i32")
    kinds |= {"sinks": stored, "alibi_slopes": "fp32", "out": "fp32" if way.shares else stored, "lse": "fp32"}
    how = launches.attend(spec, (q, k, v, q, q, q, q, out, lse), launches.settings_of(spec), way)
    return compiled(kernels.attend, kinds, how, divisible=True)


def gradients_for_sm90(spec: AttentionSpec) -> dict[str, Any]:
    from attn_core.backends.triton_ordered import kernels as modules

    q, k, v, out, lse = operands(spec)
    settings, tiles, kinds = launches.settings_of(spec), launches.tiles(spec), kinds_of(spec)
    stored = kinds["q"]
    kinds |= {"cu_seqlens_q": "i32", "cu_seqlens_k": "i32", "alibi_slopes": "fp32"}
    read = (q, k, v, out, lse, lse, q, q, q)
    sums = {"out": stored, "dout": stored} | dict.fromkeys(("lse", "dlse", "shift", "delta"), "fp32")
    of_rows = modules.row_sums, sums, launches.row_sums(spec, (out, out, lse), True)
    keys, queries = modules.of_keys, modules.of_queries
    of_keys = keys, kinds | {"dk": stored, "dv": stored}, launches.of_keys(spec, (*read, k, v), settings, tiles[0])
    of_queries = queries, kinds | {"dq": stored}, launches.of_queries(spec, (*read, q), settings, tiles[1])
    kernels = {"row_sums": of_rows, "of_keys": of_keys, "of_queries": of_queries}
    return {name: compiled(*each, divisible=True) for name, each in kernels.items()}


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(),
        spec_of(head_dim=64, **PACKED),
        spec_of(q_len=1, kv_len=4096),
        spec_of(q_len=99, window=(99, 0), softcap=3.0, sinks=True, alibi_shape=(32,), dtype="float16"),
        spec_of(head_dim=256),
    ],
    ids=["training", "packed", "decode", "options", "wide"],
)
def test_a_row_of_any_launch_adds_its_keys_within_a_warp(spec: AttentionSpec) -> None:
    code = forward_for_sm90(spec)
    assert is_in_order(code, order.how(spec, 132).tiles.warps)
    assert code.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(),
        spec_of(head_dim=64, window=(99, 0), softcap=3.0, alibi_shape=(32,), dtype="float16", **PACKED),
        spec_of(head_dim=256),
    ],
    ids=["training", "options", "wide"],
)
def test_the_gradients_for_sm90(spec: AttentionSpec) -> None:
    for name, code in gradients_for_sm90(spec).items():
        assert code.metadata.shared <= 227 * 1024, name
        assert not loose_operations(code), name
        if name != "row_sums":
            assert "wgmma.mma_async" in code.asm["ptx"], name


# On a GPU

SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"q_len": 1500, "kv_len": 1500},
    "chunk": {"q_len": 77, "kv_len": 2500},
    "decode": {"q_len": 1, "kv_len": 3000},
    "window": {"q_len": 1300, "kv_len": 1300, "window": (200, 0), "head_dim": 64},
    "softcap": {"q_len": 700, "kv_len": 700, "softcap": 5.0, "sinks": True, "dtype": "float16"},
    "wide": {"q_len": 300, "kv_len": 1200, "head_dim": 256},
}


def tensors_of(spec: AttentionSpec, *, seed: int = 0) -> list[Any]:
    """q, k, v and dout on the GPU, and sinks."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [tuple(each.shape) for each in operands(spec)[:4]]
    arrays = [torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, spec.dtype)) for shape in shapes]
    return [*arrays, torch.linspace(-1.0, 1.0, spec.num_heads, device="cuda") if spec.sinks else None]


def trained(spec: AttentionSpec, tensors: list[Any], **options: Any) -> list[Any]:
    """out, lse and the gradients of q, k and v."""
    import torch_frontend

    learned = [each.detach().clone().requires_grad_() for each in tensors[:3]]
    keywords = {"causal": True, "window": spec.window, "softcap": spec.softcap, "sinks": tensors[4], **options}
    out, lse = torch_frontend.attention(*learned, return_lse=True, **keywords)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, learned, tensors[3].to(out.dtype))]


@pytest.mark.cuda
@pytest.mark.parametrize("name", SHAPES)
def test_numbers_and_gradients_on_a_gpu(name: str) -> None:
    """Beside the math backend in float64."""
    spec = spec_of(**{"batch": 2, "num_heads": 8, "num_kv_heads": 2, **SHAPES[name]})
    tensors = tensors_of(spec)
    actual = trained(spec, tensors, backend="triton_ordered", invariant="prefix")
    assert all(map(torch.equal, actual, trained(spec, tensors, backend="triton_ordered", invariant="prefix")))
    exact = trained(spec, [each if each is None else each.double() for each in tensors], backend="math")
    for result, right in zip(actual, exact, strict=True):
        error = (result.double() - right).norm() / right.norm()
        assert error < (1e-5 if result.dtype == torch.float32 else 1e-2 if spec.dtype == "bfloat16" else 2e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_document_alone_has_the_gradients_of_a_packed_batch_on_a_gpu(dim: int) -> None:
    from torch_frontend import SeqInfo

    lengths = (700, 1, 1500, 64, 333)
    spec = spec_of(batch=1, q_len=sum(lengths), kv_len=sum(lengths), head_dim=dim)
    tensors = tensors_of(spec)
    options = {"backend": "triton_ordered", "invariant": "prefix"}
    whole = trained(spec, tensors, seq_info=SeqInfo.from_lengths(lengths), **options)
    ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    for start, stop in pairwise(ends):
        part = [each if each is None else each[:, start:stop].contiguous() for each in tensors]
        alone = trained(spec, part, **options)
        assert torch.equal(alone[1][0], whole[1][:, start:stop])
        for one, other in zip((alone[0], *alone[2:]), (whole[0], *whole[2:]), strict=True):
            assert torch.equal(one, other[:, start:stop])
