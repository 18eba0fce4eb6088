"""Tells XLA how to split a call over a mesh: by batch, by heads and by vmap's axes. Each device runs its own part.

XLA cannot split a custom call and would gather its operands on every device. ``custom_partitioning`` names the axes
that may be split. Any other axis is gathered if it was sharded; the split axes stay split. JAX's own backends use the
same rule: XLA could split their operations, but would gather every array whose split their shapes cannot express.
Packed documents lie in one row, so packed calls are split by heads alone.

If the mesh axis of the heads does not divide the kv heads, every device keeps all kv heads and picks those that its
query heads read; the gradients of the kv heads are summed over the devices. Gradients that sum over a split axis (of
sinks, of a bias shared by the batch or the heads) are summed over the devices, too. All these sums are in float32.

Calls with dropout never come here: in JAX only the XLA path has dropout (``attn_core.selection``). XLA splits its
operations itself, with indices in the whole call, so that the same weights are dropped under any sharding.

Inside a ``jax.shard_map`` over some axes of a mesh, JAX does not say how the other axes split an array. There, kernels
accept only arrays that are whole along the other axes. On a mesh with Explicit axes, these are Auto inside a call, and
its results get explicit shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core.call.functions import AUX, by_row, reads
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from jax_frontend.dispatch.vmap import MappedCall, resized

_AXES = {
    "q": ("batch", "queries", "heads", "dim"),
    "k": ("batch", "keys", "kv_heads", "dim"),
    "v": ("batch", "keys", "kv_heads", "dim"),
    "qkv": ("batch", "queries", "three", "heads", "dim"),
    "mask": ("batch", "heads", "queries", "keys"),
    "bias": ("batch", "heads", "queries", "keys"),
    "alibi_slopes": ("batch", "heads"),
    "key_ranges": ("batch", "kv_heads", "keys", "ranges", "ends"),
    **{name: ("first", "second", "third", "fourth") for name in AUX},
    "sinks": ("heads",),
    "cu_seqlens_q": ("documents",),
    "cu_seqlens_k": ("documents",),
    "rng": ("words",),
    "block_table": ("documents", "width"),
    "seq_lens": ("documents",),
    "kv_lengths": ("batch",),
    "kv_starts": ("batch",),
    "cache_index": ("batch",),
    "k_scales": ("pages", "slots", "kv_heads"),  # scales by page have no slots
    "v_scales": ("pages", "slots", "kv_heads"),
    "out": ("batch", "queries", "heads", "dim"),
    "lse": ("batch", "heads", "queries"),
    "row_maximum": ("batch", "heads", "queries"),
}
"""The axes of every operand and of its gradient. Packed arrays have no batch axis, and slopes may have none."""
_POOL = ("pages", "slots", "kv_heads", "dim")
"""The axes of k and v in pages."""
_BROADCAST = ("mask", "bias", "alibi_slopes", "key_ranges")

Known = Sequence[tuple[str, Sequence[int], P]]
"""(name, shape, PartitionSpec) of every array with a known sharding; if two disagree, the earlier one counts."""


Array = jax.Array
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Shapes = Sequence[jax.ShapeDtypeStruct]


class Split(NamedTuple):
    """The mesh axes that split each of a call's axes, major to minor; () for a whole axis."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    mapped: tuple[tuple[str, ...], ...] = ()
    """The mesh axes of each axis that vmap has put in front."""

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes that split the axis of this name."""
        if axis.startswith("mapped"):
            return self.mapped[int(axis.removeprefix("mapped"))]
        return getattr(self, axis, ())

    def spec(self, axes: Sequence[str]) -> P:
        """Returns the PartitionSpec of an array with the named axes."""
        return P(*(self.mesh_axes(axis) or None for axis in axes))


class Part(NamedTuple):
    """One device's part of a call."""

    whole: MappedCall
    local: MappedCall
    split: Split

    @property
    def picks_kv_heads(self) -> bool:
        """Whether the device has all kv heads and picks those that its query heads read."""
        return bool(self.split.heads) and not self.split.kv_heads


def axes_of(call: MappedCall, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of an operand's or a result's axes; "one" for an axis of size 1 that broadcasts."""
    at = call.names.index(name) if name in call.names else None
    mapped = range(len(call.sizes)) if at is None else call.axes_in_front(at)
    own = shape[len(mapped) :]
    like = name.removeprefix("d")
    # Packed arrays, and slopes of heads alone, lack the first axis, the batch.
    axes = _AXES[like][len(_AXES[like]) - len(own) :]
    if call.call.spec.paged is not None:  # the rows of a paged call are documents in one row of tokens
        axes = _POOL if like in ("k", "v") else tuple("documents" if axis == "batch" else axis for axis in axes)
    elif like in ("k", "v") and "cache_index" in call.names:  # any row of the batch may read any row of the cache
        axes = ("cache", *axes[1:])
    if like in AUX and AUX.index(like) in (by_row(call.call.spec) or ()):
        axes = ("batch", *axes[1:])
    # Then kv heads are query heads, and one factor splits both.
    if call.call.spec.group_size == 1:
        axes = tuple("heads" if axis == "kv_heads" else axis for axis in axes)
    if like in _BROADCAST:
        axes = tuple("one" if size == 1 else axis for axis, size in zip(axes, own, strict=True))
    return (*(f"mapped{axis}" for axis in mapped), *axes)


def split_of(call: MappedCall, mesh: Mesh, known: Known) -> Split:
    """Returns how a mesh splits a call.

    If arrays shard one axis differently, the first array counts. A mesh axis that does not divide an axis is not used.
    """
    spec, taken = call.call.spec, set[str]()

    # Each mesh axis can split one axis of the call only, so axes used earlier are no longer free.
    def first(axis: str, size: int) -> tuple[str, ...]:
        free = ([name for name in entry if name not in taken] for entry in _entries(call, known, axis))
        candidates = (_dividing(names, size, mesh) for names in free)
        chosen = next((axes for axes in candidates if axes), ())
        taken.update(chosen)
        return chosen

    mapped = tuple(first(f"mapped{axis}", size) for axis, size in enumerate(call.sizes))
    # A function that counts rows or heads needs all of them, unless it only looks its own row up.
    batch = () if by_row(spec) is None else first("batch", spec.batch)
    # If only k and v are split by heads, their mesh axes split the query heads as well.
    heads = () if reads(spec, "h") else first("heads", spec.num_heads) or first("kv_heads", spec.num_kv_heads)
    # kv heads are split as the query heads are, or stay whole: then each device picks those that it reads.
    return Split(batch, heads, heads if spec.num_kv_heads % shards(mesh, heads) == 0 else (), mapped)


def part_of(call: MappedCall, mesh: Mesh, split: Split) -> Part:
    """Returns one device's part of a call.

    Raises:
        SpecError: if the backend can run the whole call but not the part.
    """
    sizes = tuple(size // shards(mesh, over) for size, over in zip(call.sizes, split.mapped, strict=True))
    local = call._replace(call=call.call._replace(spec=_local_spec(call.call.spec, mesh, split)), sizes=sizes)
    # A part has fewer heads and rows, so another rule of the backend may refuse it (a group that becomes uneven).
    reasons = local.refusals()
    if reasons:
        raise SpecError(
            f"sharding: expected a part that {call.call.backend} can run, got {local.spec} on each device of the mesh "
            f"{dict(mesh.shape)}, refused: {'; '.join(reasons)}"
        )
    return Part(call, local, split)


def _local_spec(spec: AttentionSpec, mesh: Mesh, split: Split) -> AttentionSpec:
    heads, kv_heads = spec.num_heads // shards(mesh, split.heads), spec.num_kv_heads // shards(mesh, split.kv_heads)
    if split.heads and not split.kv_heads:
        # The device's query heads share one kv head if a group is a multiple of them. Else each reads its own copy,
        # because their groups may start and end inside the device's range.
        kv_heads = 1 if spec.group_size % heads == 0 else heads
    return resized(spec, spec.batch // shards(mesh, split.batch), heads, kv_heads)


def _entries(call: MappedCall, known: Known, axis: str) -> Iterator[tuple[str, ...]]:
    """Yields, for each array with this axis sharded, the mesh axes that shard it."""
    for name, shape, spec in known:
        entries = (*spec, *(None,) * (len(shape) - len(spec)))
        for at, entry in zip(axes_of(call, name, shape), entries, strict=True):
            if at == axis and entry is not None and entry is not P.UNCONSTRAINED:
                yield (entry,) if isinstance(entry, str) else tuple(entry)


def _dividing(axes: Sequence[str], size: int, mesh: Mesh) -> tuple[str, ...]:
    """Returns the longest prefix of the mesh axes whose number of shards divides the size."""
    # Ends at the latest without axes, because one part divides every size.
    prefix = tuple(axes)
    while size % shards(mesh, prefix):
        prefix = prefix[:-1]
    return prefix


def shards(mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns the number of parts that the mesh axes split an axis into."""
    return prod(mesh.shape[axis] for axis in axes)


# Cached, because jax.jit finds an earlier trace by the function: equal calls must share one function object.
@lru_cache(maxsize=4096)
def jit_partitionable(call: MappedCall, partly_manual: bool) -> Any:
    """Jits a call as a function of its operands that XLA can split over a mesh, without a vmap rule."""

    def whole(*operands: Array) -> list[Array]:
        # custom_partitioning accepts no captured array constants; the inner jit holds them.
        return list(jax.jit(call.run)(*operands))

    function = custom_partitioning(whole)
    function.def_partition(
        partial(_partition, call),
        # Inside such a shard_map the mesh is unknown, so there is nothing to decode for; see _keep_whole.
        decode_shardings=not partly_manual,
        infer_sharding_from_operands=partial(_results_sharding, call),
        sharding_rule=partial(_rule, call),
    )
    return jax.jit(function)


def partly_manual() -> bool:
    """Returns whether JAX is tracing inside a ``jax.shard_map`` over some, but not all, axes of a mesh."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Manual in types and any(kind is not AxisType.Manual for kind in types)


def _known_shardings(call: MappedCall, operands: Shapes, results: Shapes) -> Known:
    # Not strict: _results_sharding has no results yet.
    arrays = zip((*call.names, *call.call.results), (*operands, *results), strict=False)
    return [(name, array.shape, array.sharding.spec) for name, array in arrays if array.sharding is not None]


def _shardings(call: MappedCall, mesh: Mesh, split: Split, names: Sequence[str], arrays: Shapes) -> list[NamedSharding]:
    return [
        NamedSharding(mesh, split.spec(axes_of(call, name, array.shape)))
        for name, array in zip(names, arrays, strict=True)
    ]


def _partition(
    call: MappedCall, mesh: jax.sharding.Mesh, operands: Shapes, results: Shapes
) -> tuple[Any, Any, list[Any], tuple[Any, ...]]:
    """Returns (mesh, function of one device's operands, result shardings, operand shardings), as XLA expects them."""
    if not all(isinstance(array.sharding, NamedSharding) for array in operands):
        return _keep_whole(call, mesh, operands, results)
    split = split_of(call, mesh, _known_shardings(call, operands, results))
    run = _without_mesh(partial(_run_part, part_of(call, mesh, split)))
    result_shardings = _shardings(call, mesh, split, call.call.results, results)
    return mesh, run, result_shardings, tuple(_shardings(call, mesh, split, call.names, operands))


def _without_mesh(run: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """Runs a device's part without a mesh; JAX would otherwise type its arrays for the mesh that the caller has set."""

    def outside(*operands: Array) -> list[Array]:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return run(*operands)

    return outside


def _keep_whole(
    call: MappedCall, mesh: jax.sharding.Mesh, operands: Shapes, results: Shapes
) -> tuple[Any, Any, list[Any], tuple[Any, ...]]:
    """Runs the whole call on every device, because its mesh is unknown.

    The mesh is unknown inside a ``jax.shard_map`` over some of its axes, and if no array has one.

    Raises:
        SpecError: if an operand is split.
    """
    for name, array in zip(call.names, operands, strict=True):
        if not array.sharding.is_fully_replicated:
            raise SpecError(
                f"{name}: expected to be whole along every mesh axis that jax.shard_map does not map over, got "
                f'{array.sharding}; let it map over every axis, or use backend="jax_xla"'
            )
    shardings = [[array.sharding for array in arrays] for arrays in (operands, results)]
    return mesh, _without_mesh(call.run), shardings[1], tuple(shardings[0])


def _results_sharding(
    call: MappedCall, mesh: jax.sharding.Mesh, operands: Shapes, results: Shapes
) -> list[NamedSharding]:
    """Returns the results' shardings, for GSPMD, the propagation that JAX used before Shardy."""
    split = split_of(call, mesh, _known_shardings(call, operands, ()))
    return _shardings(call, mesh, split, call.call.results, results)


def _rule(call: MappedCall, mesh: jax.sharding.Mesh, operands: Any, results: Any) -> tuple[str, dict[str, object]]:
    """Returns Shardy's rule: batch and heads are one factor each in all arrays, and every other axis must be whole.

    Query heads are the factors (kv heads, group) if every choice of mesh axes splits the kv heads evenly. An uneven
    choice would make Shardy split one mesh axis between both factors, which no PartitionSpec can express; kv heads
    are then a factor of their own, and ``_partition`` makes both agree. A single kv head is its own factor, too,
    because Shardy does not accept a factor of size 1 in a compound axis.
    """
    spec = call.call.spec
    factors = {
        "batch": "b",
        "heads": "h",
        "kv_heads": "k",
        **{f"mapped{at}": f"m{at}" for at in range(len(call.sizes))},
    }
    whole_axes = {
        "batch": by_row(spec) is None,
        "heads": reads(spec, "h"),
        "kv_heads": reads(spec, "h"),
    }  # as in ``split_of``
    factors = {axis: factor for axis, factor in factors.items() if not whole_axes.get(axis)}
    whole: list[str] = []
    sizes = {}
    if (
        "heads" in factors
        and spec.group_size > 1
        and spec.num_kv_heads > 1
        and spec.num_kv_heads % max(mesh.size, 1) == 0
    ):
        factors["heads"], sizes = "(k g)", {"g": spec.group_size}

    def factor(axis: str) -> str:
        if axis not in factors:
            whole.append(f"w{len(whole)}")
        return factors.get(axis) or whole[-1]

    def side(names: Sequence[str], types: Any) -> str:
        shapes = [tuple(kind.shape) for kind in types]
        axes = (axes_of(call, name, shape) for name, shape in zip(names, shapes, strict=True))
        return ", ".join(" ".join(map(factor, each)) for each in axes)

    text = f"{side(call.names, operands)} -> {side(call.call.results, results)}"
    return text, {"need_replication_factors": tuple(whole), **sizes}


def _run_part(part: Part, *operands: Array) -> list[Array]:
    """Runs the local call on one device's operands, and sums gradients over devices if their axis is split."""
    call = part.whole
    arrays = dict(zip(call.names, operands, strict=True))
    picked = _kv_heads_read(part) if part.picks_kv_heads else None
    if picked is not None:
        per_head = [name for name in ("k", "v", "dk", "dv") if name in arrays]
        arrays |= {name: jnp.take(arrays[name], picked, axis=-2) for name in per_head}
        scales = [name for name in ("k_scales", "v_scales") if name in arrays]
        arrays |= {name: jnp.take(arrays[name], picked, axis=-1) for name in scales}
        if (call.call.spec.key_ranges_shape or (1, 1))[1] > 1:
            arrays["key_ranges"] = jnp.take(arrays["key_ranges"], picked, axis=-4)
    results = dict(zip(call.call.results, part.local.run(*arrays.values()), strict=True))
    if call.call.direction != "backward":
        return list(results.values())
    for name, gradient in results.items():
        if picked is not None and name in ("dk", "dv"):
            results[name] = _sum_over(_scatter_kv_heads(part, gradient, picked), part.split.heads, gradient.dtype)
        elif name in ("dbias", "dsinks") and (over := _broadcast_axes(part, name)):
            results[name] = _sum_over(gradient, over, gradient.dtype)
        elif name.removeprefix("d") in AUX:  # every device has the whole array, or its own rows of it
            has_rows = AUX.index(name.removeprefix("d")) in (by_row(call.call.spec) or ())
            over = (*(() if has_rows else part.split.batch), *part.split.heads)
            results[name] = _sum_over(gradient, over, gradient.dtype) if over else gradient
    return list(results.values())


def _kv_heads_read(part: Part) -> Array:
    """Returns the kv heads that a device's query heads read: int32 ``[num_kv_heads of the local call]``."""
    local = part.local.call.spec
    first = jax.lax.axis_index(part.split.heads) * local.num_heads
    read_by = first + local.group_size * jnp.arange(local.num_kv_heads, dtype=jnp.int32)
    return read_by // part.whole.call.spec.group_size


def _scatter_kv_heads(part: Part, gradient: Array, picked: Array) -> Array:
    """Scatters ``[..., local kv heads, channels]`` into ``[..., kv heads, channels]``; the other heads are 0."""
    wide = (*gradient.shape[:-2], part.whole.call.spec.num_kv_heads, gradient.shape[-1])
    # add, not set: several local heads may be copies of one kv head.
    return jnp.zeros(wide, _sum_dtype(gradient)).at[..., picked, :].add(gradient.astype(_sum_dtype(gradient)))


def _broadcast_axes(part: Part, name: str) -> tuple[str, ...]:
    """Returns the mesh axes that split a call but not its bias or sinks; their gradient is a sum over these axes."""
    spec = part.whole.call.spec
    shape = spec.bias_shape or () if name == "dbias" else (spec.num_heads,)
    axes = axes_of(part.whole, name, (*part.whole.sizes, *shape))
    over = {"batch": part.split.batch, "heads": part.split.heads}
    return tuple(mesh_axis for axis, names in over.items() if axis not in axes for mesh_axis in names)


def _sum_over(gradient: Array, over: tuple[str, ...], dtype: np.dtype) -> Array:
    """Sums over the devices of mesh axes in float32, because a sum of bfloat16 values would be rounded at each step."""
    return jax.lax.psum(gradient.astype(_sum_dtype(gradient)), over).astype(dtype)


def _sum_dtype(array: Array) -> np.dtype:
    return jnp.promote_types(array.dtype, jnp.float32)


def run_under_auto_axes(run: Callable[..., list[Array]], call: MappedCall, operands: Sequence[Array]) -> list[Array]:
    """Runs a call. Explicit mesh axes become Auto inside it, and its results get explicit shardings.

    Results are split as the call is; a gradient has the sharding of its operand.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return run(*operands)
    own, split = dict(zip(call.names, map(spec_of, operands), strict=True)), split_on(mesh, call, operands)
    rows = call.call.spec.lse_shape
    shapes = {"out": call.call.spec.out_shape, "lse": rows, "row_maximum": rows}
    specs = own | {name: split.spec(axes_of(call, name, shape)) for name, shape in shapes.items()}
    # Without its d, the name of a gradient is that of its operand.
    names = [name if name in shapes else name[1:] for name in call.call.results]
    return as_auto(run, mesh, [specs[name] for name in names])(*operands)  # type: ignore[no-any-return]


def split_on(mesh: Mesh, call: MappedCall, operands: Sequence[Array]) -> Split:
    """Returns how a mesh splits a call whose operands have types on it."""
    return split_of(call, mesh, [(name, a.shape, spec_of(a)) for name, a in zip(call.names, operands, strict=True)])


def run_like(run: Callable[..., Any], like: Any, *arrays: Any) -> Any:
    """Runs a function of arrays as if Explicit mesh axes were Auto; its results get the shardings of ``like``."""
    mesh = explicit_mesh(arrays)
    return run(*arrays) if mesh is None else as_auto(run, mesh, jax.tree.map(spec_of, like))(*arrays)


def split_as(array: Array, like: Array) -> Array:
    """Returns an array whose axes are split as the first of another's, if a mesh with Explicit axes splits one."""
    mesh = explicit_mesh((array, like))
    if mesh is None:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, P(*spec_of(like)[: array.ndim])))


def spec_of(array: Array) -> P:
    """Returns the PartitionSpec in an array's type."""
    return jax.typeof(array).sharding.spec  # type: ignore[attr-defined]


def explicit_mesh(arrays: object) -> jax.sharding.AbstractMesh | None:
    """Returns the mesh of the first array on a mesh with Explicit axes, or None."""
    meshes = (jax.typeof(array).sharding.mesh for array in jax.tree.leaves(arrays))  # type: ignore[attr-defined]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def as_auto(run: Callable[..., Any], mesh: Mesh, specs: object) -> Callable[..., Any]:
    """Returns a function in which the mesh's Explicit axes are Auto, and whose results have these PartitionSpecs."""
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    results = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=results)  # type: ignore[no-any-return]
