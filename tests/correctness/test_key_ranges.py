"""Tests key ranges in both frontends against masks written out here, and that planted faults are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from both_frontends import FRAMEWORKS, attend, judge, run, same_bits
from frameworks import BOTH, Framework, as_numpy
from spec_strategies import Call, make_call

import jax_frontend
import torch_frontend
from attn_core import (
    AttentionSpec,
    CheckWarning,
    DeviceError,
    DTypeError,
    SeqInfo,
    ShapeError,
    SpecError,
    checks,
    masks,
)
from attn_core.backends import jax_xla
from attn_core.backends.jax_xla import tiles
from attn_core.backends.shared import row_blocks
from attn_core.backends.shared.plain import blocks
from attn_core.call.tensors import Inputs

TOKENS = 12
Q, K = np.mgrid[:TOKENS, :TOKENS]
SAME_THIRD = np.repeat(range(3), 4)[Q] == np.repeat(range(3), 4)[K]
OF_Q, OF_K = Q % 6 // 2, K % 6 // 2
"""The block of each token of block diffusion."""
WRITTEN = {
    "prefix-LM": np.stack([(K < 5) | (K <= Q), K <= Q])[:, None],
    "shared prefix": (K <= Q) & ((K < 4) | SAME_THIRD),
    "image blocks": (K <= Q) | (SAME_THIRD & (Q // 4 == 1)),
    "block diffusion": np.where(K < 6, (Q < 6) & (OF_Q == OF_K), np.where(Q < 6, OF_Q > OF_K, OF_Q >= OF_K)),
    "global and window": (Q < 2) | (K < 2) | ((Q - K <= 1) & (K - Q <= 2)),
    "documents": SAME_THIRD,
}
CONSTRUCTED = {
    "prefix-LM": masks.prefix_lm([5, 0], TOKENS),
    "shared prefix": masks.shared_prefix(4, [4, 4]),
    "image blocks": masks.blocks([0, 4, 8], [False, True, False], TOKENS),
    "block diffusion": masks.block_diffusion(6, 2),
    "global and window": masks.global_and_window(2, (1, 2), TOKENS),
    "documents": masks.documents([4, 4, 4]),
}
SIZES = {"batch": 2, "q_len": TOKENS, "kv_len": TOKENS, "num_heads": 6, "num_kv_heads": 3, "head_dim": 5}
SIZES |= {"value_dim": 5, "dtype": "float32", "needs_backward": True, "return_lse": True}


def call_with(ranges: np.ndarray, **fields: Any) -> Call:
    """A call with these key ranges."""
    call = make_call(7, **{**SIZES, **fields}, key_ranges_shape=ranges.shape)
    return replace(call, inputs=call.inputs._replace(key_ranges=ranges))


def masked(call: Call, mask: np.ndarray) -> Call:
    """The call with a mask in the place of its key ranges."""
    spec = replace(call.spec, key_ranges_shape=None, mask_shape=mask.shape)
    return replace(call, spec=spec, inputs=call.inputs._replace(key_ranges=None, mask=mask))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mask_of_the_gallery(name: str) -> None:
    """The output, the log-sum-exp and the gradients, judged with the mask that the test writes out. On math both
    frameworks have the same bits, on ranges and on the mask."""
    call = call_with(CONSTRUCTED[name])
    on_mask = masked(call, np.broadcast_to(WRITTEN[name], (2, 1, TOKENS, TOKENS)))
    results = run("torch", call, "math")
    assert judge("torch", on_mask, results).ok
    assert same_bits(results, run("jax", call, "math")) == []
    assert same_bits(results, run("torch", on_mask, "math")) == []
    assert judge("jax", on_mask, run("jax", call, "jax_xla")).ok


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_documents_as_ranges_are_those_of_seq_info(framework: str) -> None:
    lengths = (3, 4, 5)
    others = {name: value for name, value in SIZES.items() if name not in ("batch", "q_len", "kv_len")}
    packed = make_call(7, (lengths, lengths), **others)
    ranges = masks.documents(lengths)
    spec = replace(packed.spec, documents=None, max_len_q=None, max_len_k=None, key_ranges_shape=ranges.shape)
    rows = {name: getattr(packed.inputs, name)[None] for name in "qkv"}
    inputs = packed.inputs._replace(**rows, cu_seqlens_q=None, cu_seqlens_k=None, key_ranges=ranges)
    dense = replace(packed, spec=spec, inputs=inputs, dout=packed.dout[None], dlse=packed.dlse[None])
    assert judge(framework, packed, run(framework, packed)).ok
    results = run(framework, dense)
    assert judge(framework, dense, results).ok
    as_packed = {name: array[0] for name, array in results.items()}
    assert judge(framework, packed, as_packed).ok


FAULTS = {
    "stop one too early": lambda ranges: np.maximum(ranges - np.array([0, 1], np.int32), ranges[..., :1]),
    "start one too late": lambda ranges: np.minimum(ranges + np.array([1, 0], np.int32), ranges[..., 1:]),
    "the batch forgotten": lambda ranges: np.broadcast_to(ranges[:1], ranges.shape),
    "the kv heads forgotten": lambda ranges: np.broadcast_to(ranges[:, :1], ranges.shape),
    "the second range forgotten": lambda ranges: ranges[..., :1, :].repeat(2, -2),
    "queries taken for keys": lambda ranges: _transposed(ranges),
}


def _transposed(ranges: np.ndarray) -> np.ndarray:
    """The ranges of keys that each query sees, as if they were the ranges of queries: their hull."""
    rows = np.arange(TOKENS)[:, None, None]
    shown = ((rows >= ranges[:, :, None, :, :, 0]) & (rows < ranges[:, :, None, :, :, 1])).any(-1)
    first, stop = shown.argmax(-1), TOKENS - shown[..., ::-1].argmax(-1)
    hull = np.where(shown.any(-1)[..., None], np.stack((first, stop), -1), 0).astype(np.int32)
    return np.stack((hull, np.zeros_like(hull)), -2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_wrong_reading_of_the_ranges_fails(framework: str) -> None:
    call = make_call(11, **SIZES, key_ranges_shape=(2, 3, TOKENS, 2, 2))
    assert judge(framework, call, run(framework, call)).ok
    for fault, wrong in FAULTS.items():
        ranges = np.ascontiguousarray(wrong(call.inputs.key_ranges))
        faulty = replace(call, inputs=call.inputs._replace(key_ranges=ranges))
        assert not judge(framework, call, run(framework, faulty)).ok, fault


@pytest.mark.parametrize("shift", [(0, 1), (1, 0)])
def test_a_kernel_that_is_off_by_one_fails(shift: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.contains
    monkeypatch.setattr(blocks, "contains", lambda table, rows: right(table - table.new_tensor(shift), rows))
    call = make_call(11, **SIZES, key_ranges_shape=(2, 3, TOKENS, 2, 2))
    assert not judge("torch", call, run("torch", call, "math")).ok


LONG = 2**16


def long_spec(**fields: Any) -> AttentionSpec:
    """65536 tokens with documents as ranges, heads and widths as small as can be."""
    sizes = {"batch": 1, "q_len": LONG, "kv_len": LONG, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    return AttentionSpec(**sizes, value_dim=8, dtype="float32", key_ranges_shape=(1, 1, LONG, 1, 2), **fields)


def test_torch_reads_no_more_keys_than_a_block_sees() -> None:
    q = torch.zeros(1, LONG, 1, 8)
    ranges = torch.from_numpy(masks.documents([512] * (LONG // 512)))
    read = [
        (block.rows.stop - block.rows.start, block.keys.stop - block.keys.start)
        for block in row_blocks.blocks(long_spec(), Inputs(q, q, q, key_ranges=ranges), 128)
    ]
    assert read == [(128, 512)] * (LONG // 128)


def sizes_in(jaxpr: Any) -> list[int]:
    """The numbers of elements of all arrays in a program, those inside loops and branches included."""
    found = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            found += sizes_in(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_xla_holds_no_table_of_queries_and_keys(direction: str) -> None:
    spec = long_spec(needs_backward=True, return_lse=True)
    shape = jax.ShapeDtypeStruct((1, LONG, 1, 8), jnp.float32)
    inputs = Inputs(shape, shape, shape, key_ranges=jax.ShapeDtypeStruct((1, 1, LONG, 1, 2), jnp.int32))
    rows = jax.ShapeDtypeStruct((1, 1, LONG), jnp.float32)
    programs = {
        "forward": lambda: jax.make_jaxpr(lambda x: jax_xla.forward(spec, x))(inputs),
        "backward": lambda: jax.make_jaxpr(lambda x, out, lse, dout: jax_xla.backward(spec, x, out, lse, dout, None))(
            inputs, shape, rows, shape
        ),
    }
    largest = max(sizes_in(programs[direction]().jaxpr))
    assert LONG * 8 <= largest <= 1024 * 1024 * 2  # a tile of a GPU, or the tensors; a table has 4096 times as many


def test_xla_skips_blocks_of_keys_that_no_query_of_a_block_sees() -> None:
    spec = AttentionSpec(**{**SIZES, "batch": 1, "num_heads": 1, "num_kv_heads": 1}, key_ranges_shape=(1, 1, 12, 1, 2))
    q = jnp.zeros((1, TOKENS, 1, 5))
    inputs = Inputs(q, q, q, key_ranges=jnp.asarray(masks.documents([4, 4, 4])))
    call = tiles.arrange(spec, inputs, tiles.BlockSizes(4, 2))
    rows = tiles.rows_of(spec)
    found = [tiles.key_blocks(spec, call, tiles.cut_rows(rows, start, 4), start) for start in (0, 4, 8)]
    assert [(int(first), int(stop)) for first, stop in found] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_on_the_host_are_checked(framework: str) -> None:
    good = make_call(11, **SIZES, key_ranges_shape=(2, 3, TOKENS, 2, 2))
    for value, text in ((-1, "got start -1"), (TOKENS + 1, "q_len \\(12\\)")):
        ranges = good.inputs.key_ranges.copy()
        ranges[1, 2, 7, 1] = (value, TOKENS + 1)
        bad = replace(good, inputs=good.inputs._replace(key_ranges=ranges))
        with pytest.raises(ValueError, match=f"{text}.*key 7 \\(batch row 1, kv head 2, range 1\\)"):
            attend(framework, bad.inference)


def test_wrong_values_on_a_device_only_hide_keys() -> None:
    """Traced values are compared and never used as an index."""
    call = make_call(11, **SIZES, key_ranges_shape=(2, 3, TOKENS, 2, 2))
    wrong = call.inputs.key_ranges.copy()
    wrong[:, :, ::2] = [[-(2**31), 2**31 - 1], [2**31 - 1, -(2**31)]]
    usual = np.where(wrong > TOKENS, TOKENS, np.maximum(wrong, 0))
    q, k, v = (jnp.asarray(call.arrays()[name], "float32") for name in "qkv")
    attend = jax.jit(lambda ranges: jax_frontend.attention(q, k, v, key_ranges=ranges, backend="jax_xla"))
    clamped = np.minimum(usual, usual[..., 1:])
    assert np.array_equal(attend(jnp.asarray(wrong)), attend(jnp.asarray(clamped)))


def test_seq_info_and_ranges_count_queries_in_the_whole_row() -> None:
    """Two documents; the ranges show each key of the second one to the last query alone."""
    ranges = np.zeros((1, 1, 7, 1, 2), np.int32)
    ranges[0, 0, :3, 0], ranges[0, 0, 3:, 0] = (0, 7), (6, 7)
    q = torch.zeros(7, 1, 8)
    v = torch.eye(7, 8)[:, None]
    out = torch_frontend.attention(q, q, v, key_ranges=ranges, seq_info=SeqInfo.from_lengths([3, 4]))
    expected = np.zeros((7, 7), bool)
    expected[:3, :3], expected[6, 3:] = True, True
    assert np.array_equal(out[:, 0, :7].numpy() > 0, expected)


GOOD = np.zeros((2, 3, TOKENS, 2, 2), np.int32)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "axes": (GOOD[0], ShapeError, r"key_ranges: expected shape \[batch or 1, kv_heads or 1, kv_len, ranges, 2\] = "),
    "batch": (GOOD[[0, 0, 0]], ShapeError, r"\[2 or 1, 3 or 1, 12, 1 or 2, 2\], got \[3, 3, 12, 2, 2\]"),
    "query heads": (GOOD[:, [0, 0, 0, 0, 0, 0]], ShapeError, r"got \[2, 6, 12, 2, 2\]"),
    "keys": (GOOD[:, :, :1], ShapeError, r"got \[2, 3, 1, 2, 2\]"),
    "three ranges": (GOOD[:, :, :, [0, 0, 0]], ShapeError, r"got \[2, 3, 12, 3, 2\]"),
    "no range": (GOOD[:, :, :, :0], ShapeError, r"got \[2, 3, 12, 0, 2\]"),
    "three ends": (GOOD[..., [0, 0, 0]], ShapeError, r"got \[2, 3, 12, 2, 3\]"),
    "int16": (GOOD.astype(np.int16), DTypeError, "key_ranges: expected dtype int32, got int16; cast it"),
    "float32": (GOOD.astype(np.float32), DTypeError, "key_ranges: expected dtype int32, got float32; cast it"),
    "a list": ([[0, 1]], TypeError, "key_ranges: expected a (torch.Tensor|jax.Array), got builtins.list"),
}


@pytest.mark.parametrize("in_numpy", [True, False])
@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_key_ranges_are_named(name: str, framework: Framework, in_numpy: bool) -> None:
    given, error, message = BAD[name]
    if not in_numpy and isinstance(given, np.ndarray):
        given = framework.array(given)
    q, k = (framework.zeros(2, TOKENS, heads, 5) for heads in (6, 3))
    for function in (framework.frontend.attention, framework.frontend.explain):
        with pytest.raises(error, match=message):
            function(q, k, k, key_ranges=given)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_named_backend_runs_ranges_in_arrays_in_parts(framework: Framework) -> None:
    """As it runs numpy's: the values of a framework's own arrays on a CPU can be read, too."""
    arrays = {"q": np.random.default_rng(0).standard_normal((1, 12, 2, 8), np.float32)}
    q, ranges = framework.array(arrays["q"]), masks.documents([4, 8])

    def run(ranges: Any, backend: str) -> list[np.ndarray]:
        """The output of a call without gradients, then that of one with them, squared, and the gradient."""

        def attention(q: Any) -> Any:
            return framework.frontend.attention(q, q, q, key_ranges=ranges, backend=backend)

        trained = framework.gradients(lambda q: attention(q) ** 2, arrays, np.ones(q.shape, np.float32))
        return [as_numpy(attention(q)), *trained]

    own = framework.array(ranges)
    results = run(own, "sdpa_flash")
    assert all(map(np.array_equal, results, run(ranges, "sdpa_flash")))
    for one, other in zip(results, run(ranges, "math"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert "parts:" in str(framework.frontend.explain(q, q, q, key_ranges=own, backend="sdpa_flash"))


def test_ranges_on_another_device_are_named() -> None:
    q = torch.zeros(1, TOKENS, 1, 8)
    elsewhere = torch.zeros(1, 1, TOKENS, 1, 2, dtype=torch.int32, device="meta")
    with pytest.raises(DeviceError, match=r"key_ranges: expected the device of q \(cpu\), got meta"):
        torch_frontend.explain(q, q, q, key_ranges=elsewhere)


def test_a_program_traced_under_checks_warns_of_wrong_ranges() -> None:
    q = jnp.zeros((1, TOKENS, 1, 8))
    wrong = jnp.full((1, 1, TOKENS, 1, 2), TOKENS + 1, jnp.int32)
    with checks(True):
        attend = jax.jit(lambda ranges: jax_frontend.attention(q, q, q, key_ranges=ranges))
        with pytest.warns(CheckWarning, match=r"key_ranges: expected 0 <= start <= stop <= q_len \(12\)"):
            attend(wrong).block_until_ready()
            jax.effects_barrier()


def test_nested_tensors_refuse_key_ranges() -> None:
    rows = torch.nested.nested_tensor([torch.zeros(3, 1, 8), torch.zeros(2, 1, 8)], layout=torch.jagged)
    with pytest.raises(SpecError, match="key_ranges: expected None with nested q, k and v"):
        torch_frontend.attention(rows, rows, rows, key_ranges=np.zeros((1, 1, 5, 1, 2), np.int32))
