"""Calls with context parallelism in JAX on meshes of CPU devices, held to the float64 reference on the whole row.

Shards are filled with NaN wherever they hold no position, and so are the gradients that come in there: no NaN may reach
a result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from attn_core import SeqInfo, masks
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.options import Options, check_options
from attn_core.call.tensors import Inputs
from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.layout import build_layout
from attn_core.correctness import reference
from jax_frontend import context_parallel_attention

COLLECTIVES = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
NEAR = 1e-9
DOCUMENTS = (0, 5, 5, 16, 23)


@dataclass(frozen=True)
class Case:
    """A call over ``sizes`` ranks: one axis, or (outer, inner)."""

    strategy: str
    sizes: tuple[int, ...]
    layout: str = "zigzag"
    lengths: tuple[int, int] = (23, 23)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (5, 5)
    batch: int = 2
    documents: tuple[int, ...] | None = None
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        count = int(np.prod(self.sizes))
        return Mesh(np.array(cpu_meshes.devices(count)).reshape(self.sizes), ("outer", "inner")[: len(self.sizes)])

    @property
    def axis_name(self) -> Any:
        return "outer" if len(self.sizes) == 1 else ("outer", "inner")

    @property
    def info(self) -> SeqInfo | None:
        return None if self.documents is None else SeqInfo.from_lengths(np.diff(self.documents).tolist())

    def table(self, side: int) -> np.ndarray:
        """``[world * shard]``: the position at every place."""
        documents = self.documents if self.layout in ("zigzag", "documents") else None
        sizes = self.sizes if len(self.sizes) == 2 else (*self.sizes, 1)
        return index_arrays.positions_by_shard(build_layout(self.layout, self.lengths[side], *sizes, documents)).ravel()

    def row(self, seed: int, side: int, heads: int, dim: int) -> np.ndarray:
        shape = (self.lengths[side], heads, dim) if self.documents else (self.batch, self.lengths[side], heads, dim)
        return np.random.default_rng(seed).standard_normal(shape)

    def arrays(self) -> dict[str, np.ndarray]:
        (heads, kv_heads), (dim, value_dim) = self.heads, self.dims
        arrays = {
            "q": self.row(0, 0, heads, dim),
            "k": self.row(1, 1, kv_heads, dim),
            "v": self.row(2, 1, kv_heads, value_dim),
            "dout": self.row(3, 0, heads, value_dim),
        }
        if self.sinks:
            arrays["sinks"] = np.random.default_rng(4).standard_normal(heads)
        if self.options.get("return_lse"):
            arrays["dlse"] = np.moveaxis(self.row(5, 0, heads, 1)[..., 0], -1, -2)  # [batch, heads, length]
        return arrays


def to_shards(array: np.ndarray, table: np.ndarray, axis: int) -> np.ndarray:
    """Returns the shards of an array end to end, with NaN in places that hold no position."""
    padded = np.concatenate([array, np.full_like(array.take([0], axis), np.nan)], axis)
    return padded.take(table, axis)


def from_shards(array: Any, table: np.ndarray, length: int, axis: int, padding: float = 0.0) -> np.ndarray:
    """Returns shards as a row in the order of positions, after checking that other places hold ``padding``."""
    row, index = np.asarray(array, np.float64), np.argsort(table, kind="stable")
    rest = row.take(index[length:], axis)
    assert (rest == padding).all(), f"places without a position hold {rest}"
    return row.take(index[:length], axis)


def reference_results(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the reference's output, log-sum-exp and gradients on the whole row."""
    facts = {
        name: ArrayFacts(arrays[name].shape, "float64", "cpu") for name in ("q", "k", "v", "sinks") if name in arrays
    }
    options = check_options(Options(**case.options))
    inputs = Inputs(*(arrays[name] for name in "qkv"), sinks=arrays.get("sinks"))
    if case.info is not None:
        offsets = np.asarray(case.documents, np.int32)
        facts |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ArrayFacts(offsets.shape, "int32", "cpu"))
        options = options._replace(max_len_q=case.info.max_len_q, max_len_k=case.info.max_len_k)
        inputs = inputs._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    key_ranges = case.keywords.get("key_ranges")
    if key_ranges is not None:
        facts["key_ranges"] = ArrayFacts(key_ranges.shape, "int32", "cpu")
        inputs = inputs._replace(key_ranges=key_ranges)
    spec = build_spec(Arrays(**facts), options, needs_backward=True)
    out, lse = reference.forward(spec, inputs)
    gradients = reference.backward(spec, inputs, out, lse, arrays["dout"], arrays.get("dlse"))
    return {"out": out, "lse": lse} | {name: each for name, each in gradients._asdict().items() if each is not None}


def program(case: Case, call: Any = None, **keywords: Any) -> Any:
    """Returns a compiled function from shards end to end to out, lse, dq, dk, dv and dsinks, all by name."""
    options = {"strategy": case.strategy, "layout": case.layout, "seq_info": case.info, **case.options, **case.keywords}
    options |= {"length": None if case.documents else case.lengths, "mesh": case.mesh, "axis_name": case.axis_name}
    call = call or partial(context_parallel_attention, **options | keywords)

    def run(arrays: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: arrays[name] for name in ("q", "k", "v", "sinks") if name in arrays}
        result, pull = jax.vjp(lambda inputs: call(**inputs), inputs)
        cotangents = (arrays["dout"], arrays["dlse"]) if "dlse" in arrays else arrays["dout"]
        (gradients,) = pull(cotangents)
        out, lse = result if "dlse" in arrays else (result, None)
        return {"out": out, "lse": lse} | {f"d{name}": each for name, each in gradients.items()}

    return jax.jit(run)


def sharded_arrays(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns every array as shards end to end; the sinks stay whole."""
    packed = case.documents is not None
    axes = {
        "q": (0, 1 - packed),
        "k": (1, 1 - packed),
        "v": (1, 1 - packed),
        "dout": (0, 1 - packed),
        "dlse": (0, 2 - packed),
    }
    return {
        name: jnp.array(to_shards(array, case.table(axes[name][0]), axes[name][1]) if name in axes else array)
        for name, array in arrays.items()
    }


def differences(case: Case, results: dict[str, Any], right: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the largest difference of each result from the reference's."""
    packed, worst = case.documents is not None, {}
    for name, array in results.items():
        if array is None:
            continue
        if name != "dsinks":
            side, axis = int(name in ("dk", "dv")), (2 if name == "lse" else 1) - packed
            array = from_shards(array, case.table(side), case.lengths[side], axis, -np.inf if name == "lse" else 0.0)
        array, truth = np.asarray(array), right[name]
        assert array.shape == truth.shape and (np.isfinite(array) == np.isfinite(truth)).all(), name
        finite = np.isfinite(truth)
        worst[name] = float(abs(array[finite] - truth[finite]).max(initial=0.0))
    return worst


def check(case: Case, **keywords: Any) -> None:
    """Raises AssertionError unless every result is within NEAR of the reference's."""
    arrays = case.arrays()
    worst = differences(case, program(case, **keywords)(sharded_arrays(case, arrays)), reference_results(case, arrays))
    assert max(worst.values()) < NEAR, worst


FULL = {"layout": "contiguous", "lengths": (13, 23), "dims": (5, 3)}
CAUSAL = {"options": {"causal": True}}
BAND = {"layout": "striped", "lengths": (22, 22), "options": {"window": (4, 2)}}
SCORES = {"sinks": True, "options": {"causal": True, "softcap": 2.0, "scale": 0.7, "return_lse": True}}
ROWS = {"layout": "contiguous", "documents": DOCUMENTS, "options": {"causal": True, "window": 4}}
ZIGZAG_ROWS = {"documents": DOCUMENTS, "sinks": True, "options": {"causal": True, "return_lse": True}}
DEALT = {**ZIGZAG_ROWS, "layout": "documents"}
UNEVEN = {"layout": "contiguous", "lengths": (23, 11), "sinks": True}  # rows that see none
UNEVEN |= {"options": {"causal": True, "return_lse": True}}
SHARED_PREFIX = {"sinks": True, "options": {"softcap": 2.0, "return_lse": True}}
SHARED_PREFIX |= {"keywords": {"key_ranges": masks.shared_prefix(9, [5, 4, 5])}}
IMAGES = {"options": {"window": (7, 5)}}
IMAGES |= {"keywords": {"key_ranges": masks.blocks([0, 6, 11, 19], [True, False, True, False], 23)}}
CASES = {
    "ring-4-full": Case("ring", (4,), **FULL),
    "ring-3-causal": Case("ring", (3,), **CAUSAL),
    "ring-4-band": Case("ring", (4,), **BAND),
    "ring-2-scores": Case("ring", (2,), **SCORES),
    "ring-3-rows": Case("ring", (3,), **ROWS),
    "ring-4-zigzag-rows": Case("ring", (4,), **ZIGZAG_ROWS),
    "ring-4-dealt": Case("ring", (4,), **DEALT),
    "ring-2-dealt": Case(
        *("ring", (2,), "documents", (45, 45)),
        **{"documents": (0, 9, 11, 31, 37, 45), "options": {"causal": True, "window": 9, "softcap": 2.0}},
    ),
    "ring-4-uneven": Case("ring", (4,), **UNEVEN),
    "ring-4-halo": Case("ring", (4,), "contiguous", options={"causal": True, "window": 5}),
    "ring-4-borders": Case(
        "ring", (4,), "contiguous", (46, 46), sinks=True, options={"window": (5, 3), "return_lse": True}
    ),
    "ring-2-borders": Case("ring", (2,), "contiguous", (31, 31), dims=(5, 3), options={"window": (5, 3)}),
    "ring-4-block-and-border": Case("ring", (4,), "contiguous", (46, 46), options={"causal": True, "window": 15}),
    "ring-3-zigzag-borders": Case("ring", (3,), lengths=(45, 45), options={"causal": True, "window": 4}),
    "ring-2x2-borders": Case("ring", (2, 2), "contiguous", (45, 45), options={"causal": True, "window": 6}),
    # Batches of 1 pack both pieces of a device into one call.
    "ring-2-window": Case("ring", (2,), "window:9", (45, 45), batch=1, options={"causal": True, "window": 9}),
    "ring-4-window": Case("ring", (4,), "window:9", (46, 46), sinks=True, options={"causal": True, "window": 9}),
    "all_gather-2-window": Case(
        "all_gather", (2,), "window:5", (31, 31), batch=1, options={"causal": True, "window": 5}
    ),
    "ring-2x2-window": Case("ring", (2, 2), "window:6", (45, 45), batch=1, options={"causal": True, "window": 6}),
    "all_gather-3-full": Case("all_gather", (3,), **FULL),
    "all_gather-4-causal": Case("all_gather", (4,), **CAUSAL, keywords={"head_groups": 2}),
    "all_gather-2-band": Case("all_gather", (2,), **BAND),
    "all_gather-4-scores": Case("all_gather", (4,), **SCORES),
    "all_gather-3-zigzag-rows": Case("all_gather", (3,), **ZIGZAG_ROWS),
    "all_gather-3-dealt": Case("all_gather", (3,), **DEALT),
    "all_gather-2-uneven": Case("all_gather", (2,), **UNEVEN),
    "ulysses-2-full": Case("ulysses", (2,), **FULL),
    "ulysses-4-causal": Case("ulysses", (4,), heads=(8, 2), **CAUSAL),  # each kv head on two devices
    "ulysses-3-scores": Case("ulysses", (3,), heads=(6, 2), **SCORES),  # three copies of each kv head
    "ulysses-4-rows": Case("ulysses", (4,), heads=(8, 8), **ROWS, keywords={"head_groups": 2}),
    "ulysses-2-zigzag-rows": Case("ulysses", (2,), **ZIGZAG_ROWS),
    "ulysses-2-dealt": Case("ulysses", (2,), **DEALT),
    "ring-2x2-causal": Case("ring", (2, 2), **CAUSAL),
    "ring-2x2-scores": Case("ring", (2, 2), heads=(8, 4), **SCORES, keywords={"head_groups": 2}),
    "ring-2x2-band": Case("ring", (2, 2), **BAND),
    "ring-2x2-zigzag-rows": Case("ring", (2, 2), **ZIGZAG_ROWS),
    "ring-2x2-dealt": Case("ring", (2, 2), **DEALT),
    "all_gather-2x2-full": Case("all_gather", (2, 2), heads=(4, 1), **FULL),
    "all_gather-2x2-zigzag-rows": Case("all_gather", (2, 2), **ZIGZAG_ROWS),
    "ring-3-prefix": Case("ring", (3,), batch=1, **SHARED_PREFIX),
    "all_gather-4-prefix": Case("all_gather", (4,), batch=1, **SHARED_PREFIX),
    "ulysses-2-prefix": Case("ulysses", (2,), batch=1, **SHARED_PREFIX),
    "ring-2x2-images": Case("ring", (2, 2), "contiguous", **IMAGES),
    "all_gather-2-images": Case("all_gather", (2,), "striped", **IMAGES),
}
CALLED = {
    f"{strategy}-{layout}-{'x'.join(map(str, sizes))}{'-wide' if dims[0] != dims[1] else ''}": Case(
        strategy, sizes, layout, (32, 32), batch=1, dims=dims, sinks=sinks, options={"causal": True, **options}
    )
    for strategy, layout, sizes, dims, sinks, options in (
        ("all_gather", "zigzag", (2,), (5, 5), False, {}),
        ("all_gather", "zigzag", (4,), (5, 5), True, {"return_lse": True}),
        ("all_gather", "zigzag", (4,), (5, 3), False, {}),
        ("all_gather", "zigzag", (2, 2), (5, 5), False, {"softcap": 2.0}),
        ("ring", "zigzag", (2,), (5, 5), False, {}),
        ("ring", "zigzag", (4,), (5, 3), False, {}),
        ("ring", "zigzag", (2, 2), (5, 5), True, {}),
    )
}


def forward_call(case: Case, **keywords: Any) -> Any:
    """Returns a function from shards of q, k and v to the forward's result."""
    options = {"strategy": case.strategy, "layout": case.layout, "mesh": case.mesh, "axis_name": case.axis_name}
    options |= {"seq_info": case.info} if case.documents else {"length": case.lengths}
    return partial(context_parallel_attention, **{**options, **case.options, "backend": "math", **keywords})


def operations(jaxpr: Any) -> Iterator[tuple[str, bool]]:
    """Yields (name, whether in a branch) of every operation of a traced program, in program order."""
    return ((equation.primitive.name, branch) for equation, branch in equations(jaxpr))


def equations(jaxpr: Any, branch: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yields (equation, whether in a branch) of every operation of a traced program, in program order."""
    for equation in jaxpr.eqns:
        inner = [
            each for each in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")) if each is not None
        ]
        yield equation, branch
        if equation.primitive.name not in ("attn_forward", "attn_backward", "attn_step"):
            for each in inner:
                if hasattr(each, "eqns"):
                    yield from equations(each, branch or equation.primitive.name == "cond")
