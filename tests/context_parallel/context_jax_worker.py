"""Context parallelism on four devices: run by ``test_context_jax`` in a process of its own that has them.

Every result is held to the float64 reference on the whole row. Shards are filled with NaN wherever they hold no
position, and so are the gradients that come in there: nothing of it may reach anything.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx as flax_nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core import SeqInfo
from attn_core.backends.shared.jax_offsets import ended
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.options import Options, checked
from attn_core.call.tensors import Inputs
from attn_core.context_parallel import places, request
from attn_core.context_parallel.layout import build_layout
from attn_core.context_parallel.on_torch import step as step_torch
from attn_core.correctness import reference
from attn_core.errors import BridgeError, ShapeError, SpecError
from jax_frontend import (
    attention,
    context_parallel_attention,
    explain_context_parallel,
    linen,
    nnx,
    shard_sequence,
    unshard_sequence,
)
from jax_frontend.bridge import bridged_run, targets
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel import step as context_step
from jax_frontend.dispatch import platforms
from jax_frontend.export import export_checks
from torch_frontend.context_parallel import exchange as torch_exchange
from torch_frontend.context_parallel import forward as torch_forward
from torch_frontend.context_parallel import keys as torch_keys
from torch_frontend.context_parallel import program as torch_program

COLLECTIVES = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
NEAR = 1e-9
DOCUMENTS = (0, 5, 5, 16, 23)

assert jax.device_count() == 4 and jax.config.jax_enable_x64  # type: ignore[attr-defined]


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
        return Mesh(np.array(jax.devices()[:count]).reshape(self.sizes), ("outer", "inner")[: len(self.sizes)])

    @property
    def axis_name(self) -> Any:
        return "outer" if len(self.sizes) == 1 else ("outer", "inner")

    @property
    def info(self) -> SeqInfo | None:
        return None if self.documents is None else SeqInfo.from_lengths(np.diff(self.documents).tolist())

    def table(self, side: int) -> np.ndarray:
        """``[world * shard]``: the position at every place."""
        documents = self.documents if self.layout == "zigzag" else None
        sizes = self.sizes if len(self.sizes) == 2 else (*self.sizes, 1)
        return places.positions_by_shard(build_layout(self.layout, self.lengths[side], *sizes, documents)).ravel()

    def row(self, seed: int, side: int, heads: int, dim: int) -> np.ndarray:
        shape = (self.lengths[side], heads, dim) if self.documents else (self.batch, self.lengths[side], heads, dim)
        return np.random.default_rng(seed).standard_normal(shape)

    def arrays(self) -> dict[str, np.ndarray]:
        (heads, kv_heads), (dim, value_dim) = self.heads, self.dims
        found = {
            "q": self.row(0, 0, heads, dim),
            "k": self.row(1, 1, kv_heads, dim),
            "v": self.row(2, 1, kv_heads, value_dim),
            "dout": self.row(3, 0, heads, value_dim),
        }
        if self.sinks:
            found["sinks"] = np.random.default_rng(4).standard_normal(heads)
        if self.options.get("return_lse"):
            found["dlse"] = np.moveaxis(self.row(5, 0, heads, 1)[..., 0], -1, -2)  # [batch, heads, length]
        return found


def cut(array: np.ndarray, table: np.ndarray, axis: int) -> np.ndarray:
    """Shards end to end, NaN where they hold nothing."""
    padded = np.concatenate([array, np.full_like(array.take([0], axis), np.nan)], axis)
    return padded.take(table, axis)


def back(array: Any, table: np.ndarray, length: int, axis: int, padding: float = 0.0) -> np.ndarray:
    """A row of shards in the order of positions; what lies in places that hold none is ``padding``."""
    found, index = np.asarray(array, np.float64), np.argsort(table, kind="stable")
    rest = found.take(index[length:], axis)
    assert (rest == padding).all(), f"places without a position hold {rest}"
    return found.take(index[:length], axis)


def expected(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reference's results on the whole row."""
    facts = {
        name: ArrayFacts(arrays[name].shape, "float64", "cpu") for name in ("q", "k", "v", "sinks") if name in arrays
    }
    options, inputs = (
        checked(Options(**case.options)),
        Inputs(*(arrays[name] for name in "qkv"), sinks=arrays.get("sinks")),
    )
    if case.info is not None:
        offsets = np.asarray(case.documents, np.int32)
        facts |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ArrayFacts(offsets.shape, "int32", "cpu"))
        options = options._replace(max_len_q=case.info.max_len_q, max_len_k=case.info.max_len_k)
        inputs = inputs._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    spec = build_spec(Arrays(**facts), options, needs_backward=True)
    out, lse = reference.forward(spec, inputs)
    gradients = reference.backward(spec, inputs, out, lse, arrays["dout"], arrays.get("dlse"))
    return {"out": out, "lse": lse} | {name: each for name, each in gradients._asdict().items() if each is not None}


def program(case: Case, call: Any = None, **keywords: Any) -> Any:
    """A function of shards end to end that gives out, lse, dq, dk, dv and dsinks by name."""
    options = {"strategy": case.strategy, "layout": case.layout, "seq_info": case.info, **case.options, **case.keywords}
    options |= {"length": None if case.documents else case.lengths, "mesh": case.mesh, "axis_name": case.axis_name}
    call = call or partial(context_parallel_attention, **options | keywords)

    def run(given: dict[str, Any]) -> dict[str, Any]:
        learned = {name: given[name] for name in ("q", "k", "v", "sinks") if name in given}
        found, pull = jax.vjp(lambda learned: call(**learned), learned)
        cotangents = (given["dout"], given["dlse"]) if "dlse" in given else given["dout"]
        (gradients,) = pull(cotangents)
        out, lse = found if "dlse" in given else (found, None)
        return {"out": out, "lse": lse} | {f"d{name}": each for name, each in gradients.items()}

    return jax.jit(run)


def shards(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    packed = case.documents is not None
    axes = {
        "q": (0, 1 - packed),
        "k": (1, 1 - packed),
        "v": (1, 1 - packed),
        "dout": (0, 1 - packed),
        "dlse": (0, 2 - packed),
    }
    return {
        name: jnp.asarray(cut(array, case.table(axes[name][0]), axes[name][1]) if name in axes else array)
        for name, array in arrays.items()
    }


def differences(case: Case, found: dict[str, Any], right: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of each result from the reference's."""
    packed, worst = case.documents is not None, {}
    for name, array in found.items():
        if array is None:
            continue
        if name != "dsinks":
            side, axis = int(name in ("dk", "dv")), (2 if name == "lse" else 1) - packed
            array = back(array, case.table(side), case.lengths[side], axis, -np.inf if name == "lse" else 0.0)
        array, truth = np.asarray(array), right[name]
        assert array.shape == truth.shape and (np.isfinite(array) == np.isfinite(truth)).all(), name
        seen = np.isfinite(truth)
        worst[name] = float(abs(array[seen] - truth[seen]).max(initial=0.0))
    return worst


def check(case: Case, **keywords: Any) -> None:
    arrays = case.arrays()
    worst = differences(case, program(case, **keywords)(shards(case, arrays)), expected(case, arrays))
    assert max(worst.values()) < NEAR, worst


FULL = {"layout": "contiguous", "lengths": (13, 23), "dims": (5, 3)}
CAUSAL = {"options": {"causal": True}}
BAND = {"layout": "striped", "lengths": (22, 22), "options": {"window": (4, 2)}}
SCORES = {"sinks": True, "options": {"causal": True, "softcap": 2.0, "scale": 0.7, "return_lse": True}}
ROWS = {"layout": "contiguous", "documents": DOCUMENTS, "options": {"causal": True, "window": 4}}
ZIGZAG_ROWS = {"documents": DOCUMENTS, "sinks": True, "options": {"causal": True, "return_lse": True}}
UNEVEN = {"layout": "contiguous", "lengths": (23, 11), "sinks": True}  # rows that see none
UNEVEN |= {"options": {"causal": True, "return_lse": True}}
CASES = {
    "ring-4-full": Case("ring", (4,), **FULL),
    "ring-3-causal": Case("ring", (3,), **CAUSAL),
    "ring-4-band": Case("ring", (4,), **BAND),
    "ring-2-scores": Case("ring", (2,), **SCORES),
    "ring-3-rows": Case("ring", (3,), **ROWS),
    "ring-4-zigzag-rows": Case("ring", (4,), **ZIGZAG_ROWS),
    "ring-4-uneven": Case("ring", (4,), **UNEVEN),
    "ring-4-halo": Case("ring", (4,), "contiguous", options={"causal": True, "window": 5}),
    "all_gather-3-full": Case("all_gather", (3,), **FULL),
    "all_gather-4-causal": Case("all_gather", (4,), **CAUSAL, keywords={"head_groups": 2}),
    "all_gather-2-band": Case("all_gather", (2,), **BAND),
    "all_gather-4-scores": Case("all_gather", (4,), **SCORES),
    "all_gather-3-zigzag-rows": Case("all_gather", (3,), **ZIGZAG_ROWS),
    "all_gather-2-uneven": Case("all_gather", (2,), **UNEVEN),
    "ulysses-2-full": Case("ulysses", (2,), **FULL),
    "ulysses-4-causal": Case("ulysses", (4,), heads=(8, 2), **CAUSAL),  # each kv head on two devices
    "ulysses-3-scores": Case("ulysses", (3,), heads=(6, 2), **SCORES),  # three copies of each kv head
    "ulysses-4-rows": Case("ulysses", (4,), heads=(8, 8), **ROWS, keywords={"head_groups": 2}),
    "ulysses-2-zigzag-rows": Case("ulysses", (2,), **ZIGZAG_ROWS),
    "ring-2x2-causal": Case("ring", (2, 2), **CAUSAL),
    "ring-2x2-scores": Case("ring", (2, 2), heads=(8, 4), **SCORES, keywords={"head_groups": 2}),
    "ring-2x2-band": Case("ring", (2, 2), **BAND),
    "ring-2x2-zigzag-rows": Case("ring", (2, 2), **ZIGZAG_ROWS),
    "all_gather-2x2-full": Case("all_gather", (2, 2), heads=(4, 1), **FULL),
    "all_gather-2x2-zigzag-rows": Case("all_gather", (2, 2), **ZIGZAG_ROWS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_strategy_gives_what_one_device_gives(case):
    check(case)


@pytest.mark.parametrize(
    "name", ["ring-4-band", "ring-3-rows", "ring-4-uneven", "all_gather-4-scores", "ring-2x2-causal"]
)
def test_operations_of_xla_take_branches(name):
    """XLA's own need no host to launch them, and a branch of them costs little."""
    case = CASES[name]
    check(case, backend="jax_xla")
    traced = jax.make_jaxpr(program(case, backend="jax_xla"))(shards(case, case.arrays())).jaxpr
    names = {name for name, _ in operations(traced)}
    assert "cond" in names and "attn_step" not in names


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_kernel_behind_the_bridge_runs_the_tiles(strategy):
    case = Case(strategy, (2, 2)[: 1 + (strategy == "ring")], **CAUSAL)
    check(case, backend="math")
    wanted = {"strategy": strategy, "mesh": case.mesh, "axis_name": case.axis_name, "length": 23, "backend": "math"}
    given = shards(case, case.arrays())
    assert "backends: math" in str(explain_context_parallel(*(given[name] for name in "qkv"), causal=True, **wanted))


def test_bfloat16_is_as_near_as_on_one_device():
    """Mean error within 1.5 times, and the largest within 3 times, that of the same backend on one device."""
    options = {"causal": True, "return_lse": True}
    case = Case("ring", (4,), lengths=(61, 61), dims=(16, 16), sinks=True, options=options)
    arrays = {name: np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64) for name, array in case.arrays().items()}
    right = expected(case, arrays)
    low, plain = (
        {name: jnp.asarray(array, jnp.float32 if name == "dlse" else jnp.bfloat16) for name, array in each.items()}
        for each in (shards(case, arrays), arrays)
    )
    alone = program(case, partial(attention, **options, backend="math"))(plain)
    found = program(case, backend="math")(low)
    for name, truth in right.items():
        one, array = np.asarray(alone[name], np.float64), np.asarray(found[name], np.float64)
        if name != "dsinks":
            array = back(array, case.table(0), 61, 2 if name == "lse" else 1, -np.inf if name == "lse" else 0.0)
        errors, usual = abs(array - truth), abs(one - truth)
        assert errors.mean() <= 1.5 * usual.mean() + 1e-5, (name, errors.mean(), usual.mean())
        assert errors.max() <= 3 * usual.max() + 1e-5, (name, errors.max(), usual.max())
        assert found[name].dtype == alone[name].dtype


# Collectives: how many of each a compiled program has.


def counted(case: Case, *, forward_alone: bool = False) -> Counter[str]:
    given = shards(case, case.arrays())
    if not forward_alone:
        return Counter(COLLECTIVES.findall(program(case).lower(given).compile().as_text()))
    options = {"strategy": case.strategy, "layout": case.layout, "length": 24, "mesh": case.mesh, **case.options}
    run = jax.jit(partial(context_parallel_attention, axis_name=case.axis_name, **options))
    return Counter(COLLECTIVES.findall(run.lower(*(given[name] for name in "qkv")).compile().as_text()))


def test_a_ring_sends_one_time_less_than_it_has_parts_and_leaves_out_what_nobody_sees():
    ring = Case("ring", (4,), lengths=(24, 24), **CAUSAL)
    assert counted(ring, forward_alone=True) == {"collective-permute": 3}
    # Both halves send keys and values; their gradients begin at the second step, and go home. On CPUs JAX 0.10's XLA
    # drops barriers before it looks for what is the same, and sends them once.
    assert counted(ring) == {"collective-permute": (3 if jax.__version_info__ < (0, 11) else 6) + 3}
    halo = Case("ring", (4,), "contiguous", (24, 24), options={"causal": True, "window": 5})
    assert counted(halo, forward_alone=True) == {"collective-permute": 1}
    apart = Case("ring", (4,), "contiguous", (24, 24), dims=(5, 3))
    assert counted(apart, forward_alone=True) == {"collective-permute": 6}  # k and v do not fit into one array


def sent(case: Case) -> Counter[str]:
    """How many of each collective a program has as it is traced, before XLA leaves out what it finds to be the same."""
    jaxpr = jax.make_jaxpr(program(case))(shards(case, case.arrays())).jaxpr
    names = [name for name, _ in operations(jaxpr)]
    return Counter(name for name in names if name in ("all_gather", "ppermute", "all_to_all"))


def test_what_is_gathered_is_kept_for_the_backward_where_it_is_small_and_sent_again_elsewhere():
    many = Case("all_gather", (4,), lengths=(24, 24), dims=(5, 5), **CAUSAL)
    assert sent(many) == {"all_gather": 2, "all_to_all": 1}
    few = replace(many, heads=(8, 1))
    assert sent(few) == {"all_gather": 1, "all_to_all": 1}
    check(few)
    ring = Case("ring", (4,), lengths=(24, 24), **CAUSAL)
    assert sent(ring)["ppermute"] == 3 + 3 + 3
    names = [name for name, _ in operations(jax.make_jaxpr(program(ring))(shards(ring, ring.arrays())).jaxpr)]
    hops = [at for at, name in enumerate(names) if name == "ppermute"]
    assert "optimization_barrier" in names[hops[2] : hops[3]]  # or XLA would keep every block until the backward


def test_the_other_strategies_exchange_once_each_way():
    gathered = counted(Case("all_gather", (4,), lengths=(24, 24), **CAUSAL))
    assert gathered.keys() == {"all-gather", "all-to-all"} and max(gathered.values()) <= 2, gathered
    heads = counted(Case("ulysses", (2,), lengths=(24, 24), **CAUSAL), forward_alone=True)
    assert heads.keys() == {"all-to-all"} and heads["all-to-all"] <= 4, heads  # q, k, v and the output


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

UNEQUAL = {
    "lengths": Case("all_gather", (4,), "zigzag", (23, 31), options={"causal": True}),
    "lengths-wide": Case("all_gather", (3,), "zigzag", (23, 23), dims=(5, 3), options={"causal": True}),
    "a-row-of-each": Case("all_gather", (4,), "striped", (24, 24), batch=1, options={"causal": True}),
    "window": Case("ring", (4,), "contiguous", (29, 29), options={"causal": True, "window": 9}, sinks=True),
    "window-both-sides": Case("ring", (3,), "zigzag", (29, 31), options={"window": (4, 6), "return_lse": True}),
    "documents": Case("ring", (4,), "contiguous", (23, 23), batch=1, documents=(0, 1, 7, 8, 23)),
    "documents-causal": Case(
        "all_gather", (3,), "striped", (23, 23), batch=1, documents=(0, 2, 11, 23), options={"causal": True}
    ),
    "documents-zigzag": Case(
        "all_gather", (2, 2), "zigzag", (24, 24), batch=1, documents=(0, 9, 24), options={"causal": True}
    ),
}


@pytest.mark.parametrize("case", [*CALLED.values(), *UNEQUAL.values()], ids=[*CALLED, *UNEQUAL])
def test_kernels_called_back_take_no_branches_forward(case):
    """The host runs each part's own tiles."""
    check(case, backend="math")
    given = shards(case, case.arrays())
    options = {"strategy": case.strategy, "layout": case.layout, "mesh": case.mesh, "backend": "math", **case.options}
    options |= {"seq_info": case.info} if case.documents else {"length": case.lengths}
    call = partial(context_parallel_attention, axis_name=case.axis_name, **options)
    names = [name for name, _ in operations(jax.make_jaxpr(call)(*(given[name] for name in "qkv")).jaxpr)]
    assert "attn_step" in names and "cond" not in names


def forward_of(case: Case, **keywords: Any) -> Any:
    """A forward of shards end to end: q, k and v."""
    options = {"strategy": case.strategy, "layout": case.layout, "mesh": case.mesh, "axis_name": case.axis_name}
    options |= {"seq_info": case.info} if case.documents else {"length": case.lengths}
    return partial(context_parallel_attention, **{**options, **case.options, "backend": "math", **keywords})


def test_eager_gradients_on_explicit_axes():
    """They need ``jax.set_mesh`` where those of JAX do: JAX itself makes the 1 that a gradient begins with."""
    case = CALLED["ring-zigzag-2"]
    mesh = jax.make_mesh((2,), (case.axis_name,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    given = [shards(case, case.arrays())[key] for key in "qkv"]
    placed = [jax.device_put(array, NamedSharding(mesh, P(None, case.axis_name))) for array in given]
    call = forward_of(case, mesh=mesh)

    def loss(*qkv):
        return (call(*qkv) ** 2).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    right = jax.jit(gradient)(*placed)
    out, pull = jax.vjp(call, *placed)  # whose cotangent is the caller's
    with jax.set_mesh(mesh):
        inside = gradient(*placed)
    for found in (inside, pull(2 * out)):
        for one, other in zip(found, right, strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, 4)
            assert np.abs(np.asarray(one) - np.asarray(other)).max() < NEAR
    try:
        jax.grad(lambda q: (q * q).sum())(placed[0])
    except ValueError as error:
        assert "jax.set_mesh" in str(error)
        with pytest.raises(ValueError, match=r"jax\.set_mesh"):
            gradient(*placed)
    else:
        gradient(*placed)


EQUAL = {
    "ring-alike": Case("ring", (3,), "zigzag", (48, 48)),
    "ring-alike-wide": Case("ring", (4,), "contiguous", (64, 64), dims=(5, 3)),
    "ring-striped": Case("ring", (4,), "striped", (24, 24), options={"causal": True}),
}
BITS = [
    "all_gather-zigzag-2",
    "all_gather-zigzag-4",
    "a-row-of-each",
    "documents-causal",
    "ring-zigzag-2",
    "window",
    *EQUAL,
]


@pytest.mark.parametrize("name", BITS)
def test_the_bits_are_those_that_a_rank_of_torch_computes(name, monkeypatch):
    """Of one plan, on the same keys: the same kernels on the same tiles, put together in the same order."""
    case = replace((CALLED | UNEQUAL | EQUAL)[name], sinks=False)
    given = {key: jnp.asarray(array, jnp.float32) for key, array in shards(case, case.arrays()).items()}
    run = forward_of(case)
    found = run(*(given[key] for key in "qkv"))
    found = np.asarray(found[0] if case.options.get("return_lse") else found)
    steps = equations(jax.make_jaxpr(run)(*(given[key] for key in "qkv")).jaxpr)
    call = next(each.params["call"].step.call for each, _ in steps if each.primitive.name == "attn_step")
    plan = call.plan
    rows = [torch.from_numpy(np.array(given[key])) for key in "qkv"]
    rows = [row if row.ndim == 4 else row[None] for row in rows]
    found = found if found.ndim == 4 else found[None]
    blocks = list(zip(*(row.chunk(plan.outer, 1) for row in rows), strict=True))

    def arrived(work, keys):
        for step, runs in work.program.steps:
            source = plan.k_blocks.index(plan.key_block(step, work.program.part)) if not step.gathered else None
            yield step, runs, rows[1:] if step.gathered else blocks[source][1:]

    monkeypatch.setattr(torch_forward, "blocks", arrived)
    for part, (mine, own) in enumerate(zip(blocks, np.split(found, plan.outer, 1), strict=True)):
        one = torch_program.program(call, part, torch.device("cpu"))
        work = torch_program.Work(one, torch_exchange.Axis("", plan.outer, part), torch_exchange.Axis("", 1, 0))
        out, _ = torch_forward._attend(work, mine, torch_keys.Keys(mine[1:]))
        held = plan.q_layout.position_count(part)
        assert np.array_equal(out.numpy()[:, :held], own[:, :held])


DEVICES = {
    "in order": ((4,), ("outer",), (0, 1, 2, 3)),
    "turned": ((4,), ("outer",), (3, 1, 0, 2)),
    "beside data": ((2, 2), ("data", "outer"), (0, 1, 2, 3)),
    "before data": ((2, 2), ("outer", "data"), (2, 3, 1, 0)),
}


@pytest.fixture
def as_at_home(monkeypatch):
    """What was planned for these CPUs counts as planned for the platform that it is lowered for, as GPUs' would."""
    for module in (context_step, platforms):
        monkeypatch.setattr(module, "at_home", lambda call, platform: True)


def test_a_program_for_another_platform_takes_branches_of_xla_s_operations():
    case, row = CALLED["ring-zigzag-2"], P(None, "outer")
    mesh = Mesh(np.array(jax.devices())[:2], ("outer",))
    inside = forward_of(case, mesh=None, axis_name="outer", backend=None)
    run = jax.shard_map(inside, mesh=mesh, in_specs=(row,) * 3, out_specs=row)
    given = [jax.device_put(shards(case, case.arrays())[key], NamedSharding(mesh, row)) for key in "qkv"]
    assert "attn_core.callback" in jax.jit(run).trace(*given).lower().as_text()
    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "attn_core.callback" not in text and "stablehlo.case" in text


@pytest.mark.parametrize(("sizes", "names", "order"), DEVICES.values(), ids=DEVICES)
def test_a_program_for_gpus_knows_which_device_is_which_part(sizes, names, order, as_at_home):
    """What is known of devices when it is lowered, for the host to find its part by."""
    mesh = Mesh(np.array(jax.devices())[list(order)].reshape(sizes), names)
    case = Case("ring", (mesh.shape["outer"],), "zigzag", (32, 32), options={"causal": True})
    given = shards(case, case.arrays())
    placed = [jax.device_put(given[key], NamedSharding(mesh, P(None, "outer"))) for key in "qkv"]
    inside, row = forward_of(case, mesh=None, axis_name="outer"), P(None, "outer")
    run = jax.shard_map(inside, mesh=mesh, in_specs=(row,) * 3, out_specs=row)
    text = jax.jit(run).trace(*placed).lower(lowering_platforms=("cuda",)).as_text()
    tokens = re.findall(r'attn_core.callback.step.v1.*call = "([^"]{7})"', text)
    assert len(tokens) == mesh.shape["outer"] - 1 and "stablehlo.case" not in text
    right = np.moveaxis(mesh.devices, names.index("outer"), 0)
    for token in tokens:
        parts = dict(targets.call_of(token).parts)
        assert parts == {device.id: part for part, devices in enumerate(right) for device in np.ravel(devices)}
        here = bridged_run.parts_by_device(tuple(parts.items()), jax.devices())
        assert here == {device.local_hardware_id: parts[device.id] for device in jax.devices()}
    truth = jax.jit(forward_of(case))(*(given[key] for key in "qkv"))
    assert np.abs(np.asarray(jax.jit(run)(*placed)) - np.asarray(truth)).max() < NEAR


def test_an_exported_program_runs_on_devices_in_another_order():
    """It takes branches, for it knows no devices."""
    case, row = CALLED["all_gather-zigzag-2"], P(None, "outer")
    given = [shards(case, case.arrays())[key] for key in "qkv"]
    here, there = (Mesh(np.array(jax.devices())[list(order)], ("outer",)) for order in ((0, 1), (3, 1)))
    inside = forward_of(case, mesh=None, axis_name="outer")
    run = jax.jit(jax.shard_map(inside, mesh=here, in_specs=(row,) * 3, out_specs=row))
    right = np.asarray(run(*given))
    placed = [jax.device_put(array, NamedSharding(here, row)) for array in given]
    exported = jax.export.export(run, disabled_checks=export_checks())(*placed)
    assert "callback.step" not in exported.mlir_module() and "stablehlo.case" in exported.mlir_module()
    elsewhere = [jax.device_put(array, NamedSharding(there, row)) for array in given]
    assert np.abs(np.asarray(jax.jit(exported.call)(*elsewhere)) - right).max() < NEAR


def test_a_program_traced_under_one_mesh_and_lowered_under_another_takes_branches(as_at_home):
    """JAX runs it on the devices of the first, and names those of the second when it lowers it."""
    case, row = CALLED["ring-zigzag-2"], P(None, "outer")
    given = [shards(case, case.arrays())[key] for key in "qkv"]
    one, other = (
        Mesh(np.array(jax.devices())[list(order)], ("outer",), axis_types=(AxisType.Auto,))
        for order in ((0, 1), (1, 0))
    )
    for later, taken in ((one, True), (other, False)):
        jax.clear_caches()  # what was lowered under the first stays right
        inside = forward_of(case, mesh=None, axis_name="outer")
        run = jax.jit(jax.shard_map(inside, in_specs=(row,) * 3, out_specs=row))
        with jax.set_mesh(one):
            traced = run.trace(*given)
        with jax.set_mesh(later):
            assert ("callback.step" in traced.lower(lowering_platforms=("cuda",)).as_text()) == taken


def test_a_device_that_a_program_was_not_compiled_for_is_named(monkeypatch):
    case = CALLED["ring-zigzag-2"]
    traced = jax.make_jaxpr(forward_of(case))(*(shards(case, case.arrays())[key] for key in "qkv"))
    step = next(each.params["call"] for each, _ in equations(traced.jaxpr) if each.primitive.name == "attn_step")
    monkeypatch.setattr(jax, "local_devices", lambda backend: jax.devices()[:1])
    run = bridged_run.run_of(step._replace(parts=((jax.devices()[0].id, 1),)))
    with pytest.raises(
        BridgeError, match=r"GPU -1: expected one of .* that this program with context parallelism was compiled for"
    ):
        run((torch.zeros(1),))


def test_a_program_for_gpus_without_devices_takes_branches(as_at_home):
    case = CALLED["ring-zigzag-2"]
    run, row = forward_of(case, mesh=None, axis_name="outer"), P(None, "outer")
    mesh = jax.sharding.AbstractMesh((2,), ("outer",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(row,) * 3, out_specs=row)
    given = [jax.ShapeDtypeStruct(shards(case, case.arrays())[key].shape, jnp.float32) for key in "qkv"]
    text = jax.jit(mapped).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert "callback.step" not in text and "stablehlo.case" in text


def test_kernels_beside_an_exchange_give_it_a_head_start():
    """In a ring all but the last step's; a call on one device does not."""

    def of(call, given):
        return [
            getattr(each.params["call"], "call", each.params["call"]).overlaps_exchange
            for each, _ in equations(jax.make_jaxpr(call)(*(given[name] for name in "qkv")).jaxpr)
            if each.primitive.name in ("attn_forward", "attn_step")
        ]

    case = CALLED["ring-zigzag-4-wide"]
    options = {"strategy": "ring", "layout": "zigzag", "length": 32, "mesh": case.mesh, "axis_name": case.axis_name}
    ring = partial(context_parallel_attention, causal=True, backend="math", **options)
    assert of(ring, shards(case, case.arrays())) == [True, True, True, False]
    assert of(partial(attention, backend="math"), case.arrays()) == [False]


def operations(jaxpr: Any) -> Iterator[tuple[str, bool]]:
    """(name, whether in a branch) of every operation of a traced program, in the order in which it is written."""
    return ((equation.primitive.name, branch) for equation, branch in equations(jaxpr))


def equations(jaxpr: Any, branch: bool = False) -> Iterator[tuple[Any, bool]]:
    """The same, each operation whole."""
    for equation in jaxpr.eqns:
        inner = [
            each for each in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")) if each is not None
        ]
        yield equation, branch
        if equation.primitive.name not in ("attn_forward", "attn_backward", "attn_step"):
            for each in inner:
                if hasattr(each, "eqns"):
                    yield from equations(each, branch or equation.primitive.name == "cond")


def test_the_next_block_is_sent_before_this_one_computes():
    case = Case("ring", (4,), "contiguous", (16, 24), dims=(5, 3))
    given = shards(case, case.arrays())
    call = partial(
        context_parallel_attention, mesh=case.mesh, strategy="ring", layout="contiguous", length=case.lengths
    )
    traced = jax.make_jaxpr(partial(call, backend="math"))(*(given[name] for name in "qkv")).jaxpr
    wanted = ("ppermute", "attn_forward", "attn_step")
    found = [name for name, _ in operations(traced) if name in wanted]
    hops = ["ppermute", "ppermute"]
    assert found == [*hops, "attn_forward", *hops, "attn_step", *hops, "attn_step", "attn_step"]


@pytest.mark.parametrize("case", ["ring-3-causal", "ring-2x2-causal", "all_gather-2x2-zigzag-rows"])
def test_no_collective_is_in_a_branch(case):
    case = CASES[case]
    traced = jax.make_jaxpr(program(case))(shards(case, case.arrays())).jaxpr
    found = list(operations(traced))
    names = ("ppermute", "all_to_all", "all_gather", "reduce_scatter", "psum", "psum_invariant")
    assert ("attn_backward", True) in found or ("attn_forward", True) in found, "ranks take branches"
    assert any(name in names for name, _ in found) and not [name for name, inside in found if inside and name in names]


# Inside jax.shard_map, beside other axes of a mesh, and under JAX's transformations.


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_inside_shard_map_beside_data_parallelism(strategy, check_vma):
    """Sinks are the same on every device: their gradient is summed over both axes."""
    case = Case(strategy, (2,), sinks=True, **CAUSAL)
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    options = {"axis_name": "cp", "strategy": strategy, "length": 23, "causal": True, "backend": "math"}

    def call(q, k, v, sinks):
        inside = lambda q, k, v, sinks: context_parallel_attention(q, k, v, sinks=sinks, **options)  # noqa: E731
        row = P("data", "cp")
        specs = (row, row, row, P())
        return jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=row, check_vma=check_vma)(q, k, v, sinks)

    arrays = case.arrays()
    worst = differences(case, program(case, call)(shards(case, arrays)), expected(case, arrays))
    assert max(worst.values()) < NEAR, worst


BESIDE = {"batch": P("data", "cp"), "heads": P(None, "cp", "data")}


@pytest.mark.parametrize("spec", BESIDE.values(), ids=BESIDE)
def test_outside_shard_map_beside_data_and_tensor_parallelism(spec):
    """On Auto axes the caller says how arrays are split; of Explicit ones their types do. A kernel sees its part."""
    case = Case("all_gather", (2,), sinks=True, **CAUSAL)
    arrays = case.arrays()
    right, given = expected(case, arrays), shards(case, arrays)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            known = {"partition_spec": spec} if kind is AxisType.Auto else {}
            keywords = {"mesh": mesh if known else None, "axis_name": "cp", "backend": "math", **known}
            split = {name: spec if name != "sinks" else P() for name in given}
            placed = {name: jax.device_put(array, NamedSharding(mesh, split[name])) for name, array in given.items()}
            found = program(case, **keywords)(placed)
            worst = differences(case, found, right)
        assert max(worst.values()) < NEAR, worst
        assert tuple(found["out"].sharding.spec)[: len(spec)] == tuple(spec)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_sinks_of_no_mesh_beside_arrays_on_one_with_explicit_axes(strategy):
    case = Case(strategy, (2,), heads=(8, 4), sinks=True, **CAUSAL)
    arrays = case.arrays()
    mesh = jax.make_mesh((2, 2), ("cp", "model"), axis_types=(AxisType.Explicit,) * 2)
    given = {
        name: array if name == "sinks" else jax.device_put(array, NamedSharding(mesh, P(None, "cp", "model")))
        for name, array in shards(case, arrays).items()
    }
    found = program(case, mesh=mesh, axis_name="cp", backend="math")(given)
    assert max(differences(case, found, expected(case, arrays)).values()) < NEAR


def test_shards_of_other_documents_or_another_axis_are_refused():
    x, mesh = jnp.ones((1, 23)), Case("ring", (2,)).mesh
    with pytest.raises(ShapeError, match=r"seq_info: expected offsets that rise from 0 to the row's 23 positions"):
        shard_sequence(x, mesh, layout="striped", seq_info=SeqInfo.from_lengths((5,)))
    with pytest.raises(ShapeError, match="dim=2: expected one of the 2 axes of x"):
        shard_sequence(x, mesh, dim=2)
    with pytest.raises(SpecError, match=r"length=23\.0: expected the positions of the whole row"):
        unshard_sequence(x, mesh, length=23.0)


def test_axes_that_stay_automatic_beside_it():
    case = Case("ulysses", (2,), heads=(4, 4), **CAUSAL)
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    given = {
        name: jax.device_put(array, NamedSharding(mesh, P("data", "cp")))
        for name, array in shards(case, case.arrays()).items()
    }
    found = program(case, mesh=mesh, axis_name="cp", backend="jax_xla")(given)
    assert max(differences(case, found, expected(case, case.arrays())).values()) < NEAR
    with pytest.raises(jax.errors.JaxRuntimeError, match="q: expected to be whole along every mesh axis that"):
        program(case, mesh=mesh, axis_name="cp", backend="math")(given)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_ring_inside_shard_map_over_one_of_two_axes(kind):
    """What is sent is split over the other axis, as its arrays are."""
    case = Case("ring", (2,), "contiguous", (24, 24), dims=(5, 5))
    arrays = case.arrays()
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(kind, kind))
    call = partial(context_parallel_attention, axis_name="cp", strategy="ring", layout="contiguous", length=24)
    with jax.set_mesh(mesh):
        row = P(None, "cp")
        mapped = jax.shard_map(partial(call, backend="jax_xla"), in_specs=(row,) * 3, out_specs=row, axis_names={"cp"})
        given = [jax.device_put(arrays[name], NamedSharding(mesh, P("data", "cp"))) for name in "qkv"]
        out = jax.jit(mapped)(*given)
    assert np.abs(np.asarray(out) - expected(case, arrays)["out"]).max() < NEAR


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_documents_beside_an_axis_that_stays_automatic(strategy):
    case = Case(strategy, (2,), **ZIGZAG_ROWS)
    arrays = case.arrays()
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    found = program(case, mesh=mesh, axis_name="cp", backend="jax_xla")(shards(case, arrays))
    assert max(differences(case, found, expected(case, arrays)).values()) < NEAR


@pytest.mark.parametrize("axes", [{"cp"}, {"data", "cp"}], ids=["one axis", "both"])
@pytest.mark.parametrize("own", [False, True], ids=["the same", "each its own"])
def test_the_document_of_a_place_inside_shard_map(axes, own):
    """Also where a document is empty, ends outside of the row, or stands in another order."""
    ends = np.array([[3, 3, 7, 11], [9, 0, 12, -1]])
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    split = P("cp") if own else P()
    mapped = jax.shard_map(lambda ends: ended(ends[0], 9)[None], in_specs=split, out_specs=split, axis_names=axes)
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(jnp.asarray(ends if own else ends[:1]))
    for one, row in zip(np.asarray(found), ends, strict=False):
        np.testing.assert_array_equal(one, np.searchsorted(np.sort(row), np.arange(9), side="right"))


def test_layers_under_scan_and_remat():
    """Three layers, each recomputed in the backward."""
    case = Case("ring", (2,), heads=(2, 2), **CAUSAL)
    arrays = {name: jnp.asarray(array) for name, array in case.arrays().items()}
    weights = jnp.asarray(np.random.default_rng(6).standard_normal((3, 5, 5)))
    spread_call = partial(
        context_parallel_attention, mesh=case.mesh, axis_name="outer", strategy="ring", length=23, causal=True
    )

    def loss(call: Any, x: Any, weights: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, weight: Any) -> Any:
            q = x @ weight
            return x + call(q, x, q * x), None

        return jax.lax.scan(layer, x, weights)[0]

    def trained(call: Any, x: Any, dout: Any) -> Any:
        out, pull = jax.vjp(partial(loss, call), x, weights)
        return out, *pull(dout)

    right = jax.jit(partial(trained, partial(attention, causal=True)))(arrays["q"], arrays["dout"])
    split = partial(shard_sequence, mesh=case.mesh, layout="zigzag")
    found = jax.jit(partial(trained, spread_call))(split(arrays["q"]), split(arrays["dout"]))
    for at, (one, other) in enumerate(zip(found, right, strict=True)):
        one = one if at == 2 else unshard_sequence(one, case.mesh, length=23)
        size = np.abs(other).max()  # sums of large terms of both signs: a small element may lose as much as a large one
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=NEAR, atol=NEAR * size)


# Shards.


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_shards_hold_what_the_layout_says_and_go_back(layout, sizes):
    case = Case("ring", sizes, layout)
    tokens = jnp.arange(1, 24)[None]
    options = {"axis_name": case.axis_name, "layout": layout}
    cut_up = shard_sequence(tokens, case.mesh, **options)
    np.testing.assert_array_equal(np.asarray(cut_up)[0], np.where(case.table(0) < 23, case.table(0) + 1, 0))
    assert cut_up.sharding.shard_shape(cut_up.shape)[1] == len(case.table(0)) // int(np.prod(sizes))
    np.testing.assert_array_equal(unshard_sequence(cut_up, case.mesh, length=23, **options), tokens)

    def inside(tokens: Any) -> Any:
        mine = shard_sequence(tokens, **options)
        return mine, unshard_sequence(mine, length=23, **options)[None]

    row = P(None, tuple(case.mesh.axis_names))
    mapped = jax.shard_map(inside, mesh=case.mesh, in_specs=P(), out_specs=(row, P(row[1])))
    mine, whole = jax.jit(mapped)(tokens)
    np.testing.assert_array_equal(mine, cut_up)
    assert (np.asarray(whole) == np.asarray(tokens)).all() and len(whole) == int(np.prod(sizes))


# Layers of Flax, inside jax.shard_map.


def rotated(q: Any, k: Any, positions: Any) -> Any:
    """Something that depends on positions as rotary embeddings do: on each place's own."""
    angle = positions[..., None, None] * 0.3
    return q * jnp.cos(angle), k * jnp.sin(1 + angle)


LAYER = {"num_kv_heads": 2, "head_dim": 5, "causal": True, "sinks": True, "rotary": rotated}
SPREAD = {"context_axis": "cp", "context_strategy": "ring"}
ROWS_OF_LAYERS = {"whole rows": None, "documents": SeqInfo.from_lengths([7, 0, 16])}


def layer_of(kind: str, **options: Any) -> tuple[Any, Any]:
    """A function of (parameters, x, seq_info), and parameters."""
    options = {**LAYER, **options, "dtype": jnp.float64, "param_dtype": jnp.float64}
    if kind == "linen":
        layer = linen.Attention(4, **options)
        params = layer.init(jax.random.key(0), jnp.zeros((1, 23, 6)))
        return lambda params, x, info: layer.apply(params, x, seq_info=info), params
    graph, params = flax_nnx.split(nnx.Attention(4, 6, **options, rngs=flax_nnx.Rngs(0)))
    return lambda params, x, info: flax_nnx.merge(graph, params)(x, seq_info=info), params


@pytest.mark.parametrize("info", ROWS_OF_LAYERS.values(), ids=ROWS_OF_LAYERS)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_layer_with_a_context_axis(kind, info):
    """Parameters are those of the plain layer, and so are the results and the gradients."""
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(AxisType.Auto,) * 2)
    plain, params = layer_of(kind)
    apply, alike = layer_of(kind, **SPREAD, context_length=None if info else 23)
    same = jax.tree.map(lambda one, other: (one == other).all(), params, alike)
    assert jax.tree.all(same)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # sinks and biases of 0 would hide much
    random = np.random.default_rng(0)
    x, dout = (jnp.asarray(random.standard_normal((1 if info else 2, 23, 6))) for _ in range(2))
    row = P(None if info else "data", "cp")
    mapped = jax.shard_map(lambda params, x: apply(params, x, info), mesh=mesh, in_specs=(P(), row), out_specs=row)

    def trained(call: Any, x: Any, dout: Any) -> Any:
        out, pull = jax.vjp(call, params, x)
        dparams, dx = pull(dout)
        return (out, dx), dparams

    (out, dx), dparams = jax.jit(partial(trained, lambda params, x: plain(params, x, info)))(x, dout)
    split = partial(shard_sequence, mesh=mesh, axis_name="cp", seq_info=info)
    found, found_params = jax.jit(partial(trained, mapped))(split(x), split(dout))
    rows = [unshard_sequence(each, mesh, axis_name="cp", length=23, seq_info=info) for each in found]
    for one, other in zip(jax.tree.leaves((rows, found_params)), jax.tree.leaves(([out, dx], dparams)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=NEAR, atol=NEAR)


def test_a_layer_refuses_what_spread_rows_do_not_have():
    _, params = layer_of("linen", **SPREAD)
    options = {**LAYER, **SPREAD, "dtype": jnp.float64, "param_dtype": jnp.float64}
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(AxisType.Auto,))

    def call(x: Any, more: Any = None, **given: Any) -> Any:
        return linen.Attention(4, **options, **more or {}).apply(params, x, **given)

    def spread_call(**given: Any) -> Any:
        row = P(None, "cp")
        return jax.shard_map(partial(call, **given), mesh=mesh, in_specs=row, out_specs=row)(jnp.zeros((1, 24, 6)))

    with pytest.raises(SpecError, match="mask: expected None in context parallelism"):
        spread_call(mask=jnp.ones((24, 24)))
    dropping = {"more": {"dropout_rate": 0.1}, "deterministic": False, "dropout_rng": jax.random.key(0)}
    with pytest.raises(SpecError, match=r"dropout=0\.1: expected 0 in context parallelism"):
        spread_call(**dropping)
    with pytest.raises(SpecError, match="axis_name='cp': expected axes of the mesh"):
        call(jnp.zeros((1, 24, 6)))


# Refusals.


def four(**keywords: Any) -> Any:
    case = Case("ring", (4,), lengths=(24, 24))
    given = shards(case, case.arrays())
    options = {"mesh": case.mesh, "axis_name": "outer", **keywords}
    return context_parallel_attention(*(given[name] for name in "qkv"), **options)


REFUSED = {
    "dropout": ({"dropout": 0.1}, SpecError, "dropout=0.1: expected 0 in context parallelism"),
    "mask": ({"mask": np.ones((24, 24), bool)}, SpecError, "mask: expected None in context parallelism"),
    "bias": ({"bias": np.ones((24, 24))}, SpecError, "bias: expected None in context parallelism"),
    "alibi_slopes": ({"alibi_slopes": np.ones(4)}, SpecError, "alibi.*: expected None in context parallelism"),
    "shard": ({"length": 17}, ShapeError, r"q: expected shards of \d+ positions, 17 over 4 ranks"),
    "length": ({"length": (1, 2, 3)}, SpecError, r"length=\(1, 2, 3\): expected the positions of the"),
    "layout": ({"layout": "diagonal"}, SpecError, "layout='diagonal': expected one of"),
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
    arrays = {name: jnp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in keywords.items()}
    with pytest.raises(error, match=words):
        four(**arrays)


def test_heads_that_cannot_be_shared_are_refused():
    case = Case("ulysses", (3,))
    with pytest.raises(NotImplementedError, match="q: expected heads that 3 ranks can share, got 4 heads over 2"):
        program(case)(shards(case, case.arrays()))


def test_documents_must_be_known_on_the_host():
    case = Case("ring", (4,), documents=DOCUMENTS)
    given = [shards(case, case.arrays())[name] for name in "qkv"]
    call = partial(context_parallel_attention, *given, mesh=case.mesh, axis_name="outer", causal=True)
    offsets = jnp.asarray(DOCUMENTS, jnp.int32)
    traced = jax.jit(lambda offsets: call(seq_info=SeqInfo(offsets, offsets, 11, 11)))
    with pytest.raises(SpecError, match=r"seq_info.cu_seqlens_q: expected offsets on the host.* got traced ones"):
        traced(offsets)
    other = np.asarray((0, 6, 6, 16, 23), np.int32)
    with pytest.raises(SpecError, match=r"seq_info: expected the same documents for queries and keys"):
        call(seq_info=SeqInfo(np.asarray(DOCUMENTS, np.int32), other, 11, 11))
    with pytest.raises(SpecError, match="length=24: expected the 23 positions of seq_info"):
        call(seq_info=case.info, length=24)


def test_a_list_of_lengths_is_as_good_as_a_tuple():
    np.testing.assert_array_equal(four(length=[24, 24]), four(length=(24, 24)))
    call, explain = (inspect.signature(each) for each in (context_parallel_attention, explain_context_parallel))
    assert list(explain.parameters) == [*call.parameters, "needs_backward"]


def test_an_eager_call_builds_its_spec_once(monkeypatch):
    built, right = [], request.build_spec
    monkeypatch.setattr(request, "build_spec", lambda *given: built.append(given) or right(*given))
    call = partial(four, strategy="ring", scale=0.375)  # a scale that no other test has
    call()
    assert len(built) == 1
    call()
    assert len(built) == 1


def test_a_choice_says_why():
    case = Case("ring", (4,), lengths=(24, 24))
    given = [jax.ShapeDtypeStruct(shards(case, case.arrays())[name].shape, jnp.float32) for name in "qkv"]
    said = str(explain_context_parallel(*given, mesh=case.mesh, causal=True, needs_backward=True))
    assert all(name in said for name in ("all_gather", "ulysses", "ring", "selected", "zigzag", "backends: ")), said


# Planted faults: the checks above must see them.


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    jax.clear_caches()
    monkeypatch.setattr(targets, "_callbacks", {})  # what they have prepared goes with them
    yield monkeypatch
    jax.clear_caches()


def test_planted_a_merge_with_a_wrong_log_sum_exp(planted):
    """In branches, by XLA's operations; and where kernels are called back, by torch's."""
    for module, name, backend in ((tiles, "merge", "jax_xla"), (step_torch, "merge", "math")):
        right = getattr(module, name)
        planted.setattr(module, name, lambda *arrays, right=right: right(*arrays[:3], arrays[3] + 1e-6))
        with pytest.raises(AssertionError):
            check(CASES["ring-3-causal"], backend=backend)


def test_planted_a_host_that_takes_a_device_for_another_part(planted):
    right = step_torch.prepare_part
    planted.setattr(step_torch, "prepare_part", lambda call, part, device: right(call, 1 - part, device))
    with pytest.raises(AssertionError):
        check(replace(CASES["ring-2-scores"], batch=1), backend="math")


def test_planted_gradients_that_are_not_brought_home(planted):
    right = exchange.Pair.hop
    planted.setattr(exchange.Pair, "hop", lambda pair, axes, far: pair if far < 0 else right(pair, axes, far))
    with pytest.raises(AssertionError):
        check(CASES["ring-3-causal"])


def test_planted_sinks_in_every_tile(planted):
    right = tiles.with_sinks
    planted.setattr(tiles, "with_sinks", lambda out, lse, sinks: right(*right(out, lse, sinks), sinks))
    with pytest.raises(AssertionError):
        check(CASES["ulysses-2-zigzag-rows"])
