"""The launches of the kernels that add in one order: what chooses them, what they refuse, and their code for sm90."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import paged_specs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from sm90_code import compiled, is_in_order, loose_operations

from attn_core import AttentionSpec, SpecError, Target, explain
from attn_core.backends import triton_splitkv
from attn_core.backends.shared.in_order import order

GPU = Target("torch", "sm90")


spec_of = partial(paged_specs.spec_of, invariant="prefix")


def reasons(spec: AttentionSpec, device: str = "sm90") -> tuple[str, ...]:
    return explain(spec, Target("torch", device), "triton_splitkv").reasons("triton_splitkv")


@pytest.mark.parametrize("invariant", ["batch", "prefix"])
def test_what_keeps_the_promise_and_what_is_refused(invariant: str) -> None:
    spec = spec_of(invariant=invariant)
    assert spec.paged is not None
    assert reasons(spec) == reasons(replace(spec, sinks=True, softcap=3.0, window=(99, 0), alibi_shape=(64, 32))) == ()
    lacks = {
        "key_ranges": replace(spec, key_ranges_shape=(1, 1, 64, 1, 2)),
        "head_dim=256": replace(spec, head_dim=256, value_dim=256),
        "pages in int8": replace(spec, paged=replace(spec.paged, dtype="int8", scales="token")),
    }
    for what, refused in lacks.items():
        assert f"{what} with invariant={invariant!r}: the Triton split-KV kernel has none" in reasons(refused)
    for device in ("sm80", "sm100"):
        assert any(why.startswith(f"device {device} with invariant=") for why in reasons(spec, device))


def test_prefix_needs_causal_attention() -> None:
    with pytest.raises(SpecError, match="keys behind a query"):
        spec_of(causal=False)
    assert reasons(spec_of(causal=False, invariant="batch")) == ()


def test_only_widths_choose_the_order() -> None:
    calls = [
        spec_of(),
        spec_of(new=700),
        spec_of(batch=1),
        spec_of(tokens=100),
        spec_of(page_size=1),
        spec_of(sinks=True),
    ]
    assert {order.order(spec) for spec in calls} == {order.NARROW}
    assert {triton_splitkv.lower(spec)["share_keys"] for spec in calls} == {order.NARROW.share}
    assert {order.how(spec, 132) for spec in calls} != {order.how(calls[0], 132)}, "launches differ"
    for sums in (order.NARROW, order.WIDE):
        assert sums.share % sums.keys == 0
        assert {(tiles.keys, tiles.rows // tiles.warps) for tiles in sums.launches} == {(sums.keys, 16)}


def test_explain_shows_the_order() -> None:
    same_bits = "in every batch, chunk and page: tiles of 64 keys, added in shares of 1024"
    assert same_bits in " ".join(str(explain(spec_of(), GPU, "triton_splitkv")).split())


def test_a_row_has_a_program_for_each_share_only_if_programs_are_few() -> None:
    assert order.how(spec_of(batch=1, tokens=131072), 132).shares == 128
    assert order.how(spec_of(batch=1, tokens=131072, window=(4095, 0)), 132).shares == 6
    assert order.how(spec_of(batch=512), 132).shares == 0, "there are programs enough"
    assert order.how(spec_of(batch=4, tokens=2**20, new=64), 132).shares == 0, "partial results of 4 GB"
    assert order.how(spec_of(batch=1, tokens=1024), 132) == (order.NARROW.launches[0], 0, 1024, True)


def test_a_program_for_jax_has_the_launches_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_core.backends.shared import kernel_programs
    from attn_core.backends.shared.in_order import rows
    from attn_core.backends.triton_splitkv import kernels

    monkeypatch.setattr(kernel_programs, "step", lambda kernel, reads, writes, kinds, how: (kernel, reads, writes, how))
    spec = spec_of(batch=2, sinks=True)
    way = order.how(spec, 132)
    built = triton_splitkv.program_of(spec, triton_splitkv.lower(spec), way.tiles, 1, way)
    names = [buffer.name for buffer in built.buffers]
    (attend, reads, writes, how), (merge, *merged, _) = built.steps
    assert (attend, merge) == (kernels.attend_in_order, rows.merge_in_order)
    tables = ("block_table", "seq_lens", "seq_lens", "sinks", "q", "seq_lens")
    assert [names[at] for at in reads] == ["q", "k", "v", *tables]
    assert len(reads) + len(writes) + len(how[1]) + len(how[2]) - 3 == len(attend.arg_names)  # 3 are options
    parts, results = [names.index(name) for name in ("sinks", "out", "lse")], built.buffers
    assert merged == [(*writes, parts[0]), tuple(parts[1:])] and results[writes[0]].shape == (8, *spec.out_shape)


# The code


def attend_for_sm90(spec: AttentionSpec, multiprocessors: int = 132) -> Any:
    from attn_core.backends.triton_splitkv import kernels

    way = order.how(spec, multiprocessors)
    paged = spec.paged
    assert paged is not None
    pool = torch.empty(paged.num_pages, paged.page_size, spec.num_kv_heads, spec.head_dim, device="meta")
    q = torch.empty(spec.q_len, spec.num_heads, spec.head_dim, device="meta")
    table = torch.empty(spec.documents or 0, paged.width, device="meta")
    results = [
        torch.empty(*([way.shares] if way.shares else []), *s, device="meta") for s in (spec.out_shape, spec.lse_shape)
    ]
    operands = (q, pool, pool, table, *[q] * 5, *results)
    stored = {"bfloat16": "bf16", "float16": "fp16"}[spec.dtype]
    kinds = dict.fromkeys(("q", "k_pages", "v_pages"), stored)
    kinds |= dict.fromkeys(("block_table", "seq_lens", "cu_seqlens_q"), "i32")
    kinds |= {"sinks": stored, "alibi_slopes": "fp32", "kv_starts": "i32"}
    kinds |= {"out": "fp32" if way.shares else stored, "lse": "fp32"}
    settings = triton_splitkv.lower(spec)
    how = triton_splitkv._describe_in_order(spec, operands, settings, way)
    return compiled(kernels.attend_in_order, kinds, how)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(tokens=4096),
        spec_of(batch=4, tokens=2048, new=2048),
        spec_of(batch=4, new=99, window=(99, 0), softcap=3.0, sinks=True, alibi_shape=(32,), dtype="float16"),
        spec_of(head_dim=256, value_dim=256, new=40),
    ],
    ids=["decode", "prefill", "options", "wide"],
)
def test_a_row_of_any_launch_adds_its_keys_within_a_warp(spec: AttentionSpec) -> None:
    code = attend_for_sm90(spec)
    assert is_in_order(code, order.how(spec, 132).tiles.warps)
    assert code.metadata.shared <= 227 * 1024


def test_a_tile_with_warps_along_the_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton lays two warps along the keys of a tile of 32 rows, so such a launch would have other bits."""
    two = order.Tiles(32, 64, 2, 2)
    monkeypatch.setattr(order, "NARROW", order.NARROW._replace(launches=(two,)))
    order.how.cache_clear()
    code = attend_for_sm90(spec_of(tokens=4096, new=8))
    order.how.cache_clear()
    assert not is_in_order(code, 2)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_merge_for_sm90(sinks: bool) -> None:
    from attn_core.backends.shared.in_order import rows

    spec = spec_of(sinks=sinks)
    out, lse = (torch.empty(shape, device="meta") for shape in (spec.out_shape, spec.lse_shape))
    parts = [torch.empty(8, *each.shape, device="meta") for each in (out, lse)]
    kinds = {"parts": "fp32", "part_lse": "fp32", "sinks": "bf16", "out": "bf16", "lse": "fp32"}
    code = compiled(rows.merge_in_order, kinds, order.describe_merge(spec, (*parts, out, out, lse), 8))
    assert not loose_operations(code)
