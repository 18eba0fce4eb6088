"""Context parallelism in JAX on four devices: refusals, arguments, and what ``explain_context_parallel`` says."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_jax_cases import DOCUMENTS, NEAR, Case, from_shards, program, reference_results, sharded_arrays
from jax.sharding import PartitionSpec as P

from attn_core import SeqInfo, masks
from attn_core.context_parallel import request
from attn_core.errors import ShapeError, SpecError
from jax_frontend import (
    attention,
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
    unshard_sequence,
)

pytestmark = pytest.mark.usefixtures("four_devices", "x64")


def call_on_four(**keywords: Any) -> Any:
    case = Case("ring", (4,), lengths=(24, 24))
    given = sharded_arrays(case, case.arrays())
    options = {"mesh": case.mesh, "axis_name": "outer", "layout": "zigzag", **keywords}
    return context_parallel_attention(*(given[name] for name in "qkv"), **options)


REFUSED = {
    "dropout": ({"dropout": 0.1}, SpecError, "dropout=0.1: expected 0 in context parallelism"),
    "mask": ({"mask": np.ones((24, 24), bool)}, SpecError, "mask: expected None in context parallelism"),
    "bias": ({"bias": np.ones((24, 24))}, SpecError, "bias: expected None in context parallelism"),
    "alibi_slopes": ({"alibi_slopes": np.ones(4)}, SpecError, "alibi.*: expected None in context parallelism"),
    "shard": ({"length": 17}, ShapeError, r"q: expected shards of \d+ positions, 17 over 4 ranks"),
    "length": ({"length": (1, 2, 3)}, SpecError, r"length=\(1, 2, 3\): expected the positions of the"),
    "layout": ({"layout": "diagonal"}, SpecError, "layout='diagonal': expected one of"),
    "layout of documents": (
        {"layout": "documents"},
        SpecError,
        "layout='documents': expected seq_info with the row's packed documents, got None",
    ),
    "layout of key_ranges": (
        {"layout": "documents", "key_ranges": masks.documents([3, 21])},
        SpecError,
        "layout='documents': expected another layout beside key_ranges, such as 'zigzag'",
    ),
    "strategy": ({"strategy": "tree"}, SpecError, "strategy='tree': expected one of"),
    "head_groups": ({"strategy": "ring", "head_groups": 3}, SpecError, "head_groups=3: expected a divisor of the 2"),
    "head_groups kind": ({"head_groups": 1.5}, SpecError, "head_groups=1.5: expected the number of groups"),
    "axis": ({"axis_name": "cp"}, SpecError, "axis_name='cp': expected axes of the mesh"),
    "mesh": ({"mesh": 4, "axis_name": None}, SpecError, "mesh=4: expected a jax.sharding.Mesh"),
    "no mesh": ({"mesh": None}, SpecError, "axis_name='outer': expected axes of the mesh"),
    "partition": ({"partition_spec": P("model")}, SpecError, "partition_spec=.*: expected a jax.sharding.Partition"),
    "backend": ({"backend": "flash3"}, NotImplementedError, "flash3"),
}


@pytest.mark.parametrize(("keywords", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(keywords, error, words):
    # key_ranges stay in numpy, because they decide what is sent where.
    converted = {name for name, each in keywords.items() if isinstance(each, np.ndarray)} - {"key_ranges"}
    arrays = {name: jnp.asarray(each) if name in converted else each for name, each in keywords.items()}
    with pytest.raises(error, match=words):
        call_on_four(**arrays)


def test_heads_that_cannot_be_shared_are_refused():
    case = Case("ulysses", (3,))
    with pytest.raises(NotImplementedError, match="q: expected heads that 3 ranks can share, got 4 heads over 2"):
        program(case)(sharded_arrays(case, case.arrays()))


def test_documents_must_be_known_on_the_host():
    case = Case("ring", (4,), documents=DOCUMENTS)
    given = [sharded_arrays(case, case.arrays())[name] for name in "qkv"]
    call = partial(context_parallel_attention, *given, mesh=case.mesh, axis_name="outer", layout="zigzag", causal=True)
    offsets = jnp.asarray(DOCUMENTS, jnp.int32)
    traced = jax.jit(lambda offsets: call(seq_info=SeqInfo(offsets, offsets, 11, 11)))
    with pytest.raises(SpecError, match=r"seq_info.cu_seqlens_q: expected offsets on the host.* got traced ones"):
        traced(offsets)
    other = np.asarray((0, 6, 6, 16, 23), np.int32)
    with pytest.raises(SpecError, match=r"seq_info: expected the same documents for queries and keys"):
        call(seq_info=SeqInfo(np.asarray(DOCUMENTS, np.int32), other, 11, 11))
    with pytest.raises(SpecError, match="length=24: expected the 23 positions of seq_info"):
        call(seq_info=case.info, length=24)
    # The shards are those of 23 positions.
    with pytest.raises(ShapeError, match=r"q: expected shards of 7 positions, 27 over 4 ranks in a documents layout"):
        call(seq_info=SeqInfo.from_lengths((20, 7)), layout="documents")


def test_a_list_of_lengths_is_as_good_as_a_tuple():
    np.testing.assert_array_equal(call_on_four(length=[24, 24]), call_on_four(length=(24, 24)))
    call, explain = (inspect.signature(each) for each in (context_parallel_attention, explain_context_parallel))
    assert list(explain.parameters) == [*call.parameters, "needs_backward"]


def test_an_eager_call_builds_its_spec_once(monkeypatch):
    built, right = [], request.build_spec
    monkeypatch.setattr(request, "build_spec", lambda *given: built.append(given) or right(*given))
    call = partial(call_on_four, strategy="ring", scale=0.375)  # a scale that no other test has
    call()
    assert len(built) == 1
    call()
    assert len(built) == 1


def test_a_choice_says_why():
    case = Case("ring", (4,), lengths=(24, 24))
    given = [jax.ShapeDtypeStruct(sharded_arrays(case, case.arrays())[name].shape, jnp.float32) for name in "qkv"]
    said = str(explain_context_parallel(*given, mesh=case.mesh, causal=True, needs_backward=True))
    assert all(name in said for name in ("all_gather", "ulysses", "ring", "selected", "zigzag", "backends: ")), said


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_rows_below_the_number_of_devices_and_windows_above_the_row_are_valid(layout):
    options = {"causal": True, "window": (500, 0)}
    for length in (1, 3, 23):
        case = Case("ring", (4,), layout, lengths=(length, length), options=options)
        arrays = case.arrays()
        right = reference_results(case, arrays)
        out = program(case)(sharded_arrays(case, arrays))["out"]
        np.testing.assert_allclose(from_shards(out, case.table(0), length, 1), right["out"], rtol=0, atol=NEAR)


def test_documents_longer_than_the_row_are_refused():
    case = Case("ring", (4,), documents=DOCUMENTS)
    shards = [sharded_arrays(case, case.arrays())[name] for name in "qkv"]
    call = partial(context_parallel_attention, *shards, mesh=case.mesh, axis_name="outer", layout="zigzag", causal=True)
    with pytest.raises(SpecError, match="length=23: expected the 28 positions of seq_info"):
        call(seq_info=SeqInfo.from_lengths((3, 25)), length=23)
    with pytest.raises(ShapeError, match=r"q: expected shards of \d+ positions, 43 over 4 ranks"):
        call(seq_info=SeqInfo.from_lengths((3, 40)))


def test_explain_chooses_the_layout_of_whole_rows():
    case = Case("ring", (2,))
    rows = [jax.ShapeDtypeStruct((320, heads, 5), jnp.float32) for heads in (4, 2, 2)]
    dealt = {"mesh": case.mesh, "causal": True, "seq_info": SeqInfo.from_lengths((200, 60, 60))}
    chosen = explain_context_parallel(*rows, layout=None, **dealt)
    assert {each.layout for each in chosen.layouts} == {"zigzag", "contiguous", "documents"}
    assert "\n  layouts: " in str(chosen) and chosen.choice == chosen.layouts[0]
    shards = chosen.call.plan.q_layout.shard * 2
    cut = [jax.ShapeDtypeStruct((shards, *row.shape[1:]), row.dtype) for row in rows]
    named = explain_context_parallel(*cut, layout=chosen.choice.layout, **dealt)
    assert (named.call, named.choice) == (chosen.call, chosen.choice)
    chooses = r"explain_context_parallel\(\.\.\., layout=None\) chooses one$"
    with pytest.raises(SpecError, match=f"^layout=None: outside jax.shard_map expected the layout of .*; {chooses}"):
        context_parallel_attention(*(jnp.zeros(row.shape) for row in cut), layout=None, **dealt)
    with pytest.raises(SpecError, match=r"^layout=5: expected the layout that shard_sequence cut, got builtins.int$"):
        context_parallel_attention(*(jnp.zeros(row.shape) for row in cut), layout=5, **dealt)
    short = [jax.ShapeDtypeStruct((9, *row.shape[1:]), row.dtype) for row in rows]
    with pytest.raises(ShapeError, match=r"^q, k, v: expected rows of \(320, 320\) positions with layout=None, got"):
        explain_context_parallel(*short, layout=None, **dealt)


def test_whole_rows_need_the_layout_that_they_are_in():
    """Rows in their natural order would be read as shards of the default layout, and give wrong numbers."""
    case = Case("ring", (2,), lengths=(24, 24))
    given = case.arrays()
    rows = [jnp.asarray(given[name]) for name in "qkv"]
    spread_call = partial(context_parallel_attention, *rows, mesh=case.mesh, causal=True)
    natural = r"expected the layout of the whole rows: .* or 'contiguous' for rows in their natural order"
    for call in (spread_call, jax.jit(spread_call)):
        with pytest.raises(SpecError, match=f"^layout=None: outside jax.shard_map {natural}"):
            call()
    right = attention(*rows, causal=True)
    np.testing.assert_allclose(spread_call(layout="contiguous"), right, rtol=0, atol=NEAR)
    shards = [shard_sequence(row, case.mesh) for row in rows]
    found = context_parallel_attention(*shards, mesh=case.mesh, layout="zigzag", causal=True)
    np.testing.assert_allclose(unshard_sequence(found, case.mesh), right, rtol=0, atol=NEAR)
