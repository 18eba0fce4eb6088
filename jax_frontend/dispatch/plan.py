"""From arrays to a backend: the plan of a call. The twin of torch_frontend.dispatch.plan, at trace time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.errors import DTypeError, SpecError
from attn_core.selection import Selection, Target, explain, select
from jax_frontend.bridge import compiled_lane


class Plan(NamedTuple):
    """A call that has been checked and given to a backend."""

    spec: AttentionSpec
    backend: str
    device: str
    one_row: bool
    """Whether packed arrays came as ``[1, tokens, ...]`` and go back so."""
    as_one: bool = False
    """Whether q, k and v are one array, ``[..., tokens, 3, heads, head_dim]``."""
    beside: bool = False
    """See ``BridgedCall``."""
    requested: tuple[str, ...] | None = None
    """The backends that the caller named, or None for automatic choice."""


Metadata = tuple[tuple[int, ...], np.dtype]


@lru_cache(maxsize=4096)
def plan(
    metadata: tuple[Metadata | None, ...],
    device: str,
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
) -> Plan:
    """Checks a call and chooses its backend; the same question is answered once.

    Args:
        metadata: (shape, dtype) for each field of ``arguments.Arrays``, None where there is no array.
        device: as ``device_name`` gives it.
        requested: ``backend=`` of the call, or what ``use_backend`` asks for.
    """
    selection = select(*question(metadata, device, options, needs_backward, bias_gradient, requested))
    spec = selection.spec
    one_row = spec.packed and metadata[0] is not None and len(metadata[0][0]) == 4
    return Plan(spec, selection.backend or "", device, one_row, requested=selection.requested)


def explanation(*arguments: Any) -> Selection:
    """The Selection behind ``plan``, whether or not a backend can run the call."""
    return compiled_lane.told(explain(*question(*arguments)))


def question(
    metadata: tuple[Metadata | None, ...],
    device: str,
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
) -> tuple[AttentionSpec, Target, str | tuple[str, ...] | None]:
    """What ``select`` is asked: the spec, the target and the requested backends."""
    facts = Arrays(*(entry and ArrayFacts(tuple(entry[0]), str(entry[1]), device) for entry in metadata))  # type: ignore[arg-type]
    spec = build_spec(facts, options, needs_backward=needs_backward, bias_gradient=bias_gradient)
    return spec, Target.here("jax", device), requested


def metadata(inputs: Inputs) -> tuple[Metadata | None, ...]:
    """(shape, dtype) of every array that ``arguments.Arrays`` names; k and v of none are q's, in one array."""
    if inputs.k is None:
        one = jax.ShapeDtypeStruct((*inputs.q.shape[:-3], *inputs.q.shape[-2:]), inputs.q.dtype)
        inputs = inputs._replace(q=one, k=one, v=one)
    given = inputs[: len(Arrays._fields)]
    return tuple(None if array is None else (tuple(array.shape), np.dtype(array.dtype)) for array in given)


def device_name(array: Any) -> str:
    """``"cpu"`` or ``"sm90"`` for where an array is, or where a traced one will be: JAX's default device."""
    device = _device(array)
    if device.platform not in ("gpu", "cuda"):
        return str(device.platform)
    return "sm" + str(device.compute_capability).replace(".", "")


def device_index(array: Any) -> int:
    """Which of this process's devices of a kind that is; torch counts GPUs the same way."""
    return int(_device(array).local_hardware_id or 0)


def _device(array: Any) -> Any:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    return jax.devices(device)[0] if isinstance(device, str) else device


def check_key(key: Any) -> None:
    """Raises SpecError unless ``key`` is one PRNG key: of ``jax.random.key``, or the raw words of one."""
    expected = "dropout_rng: expected one PRNG key such as jax.random.key(0), got"
    if not isinstance(key, jax.Array):
        raise SpecError(f"{expected} {key!r}")
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if typed else 1) or not (typed or key.dtype == np.uint32):
        raise SpecError(f"{expected} an array of shape {list(key.shape)} and dtype {key.dtype}")


def checked_arrays(arrays: tuple[Any, ...], *, shapes_only: bool = False) -> Inputs:
    """The first fields of Inputs, each checked by itself: q, k, v, and of the others those that there are."""
    for name, array in zip(Inputs._fields, arrays, strict=False):
        if array is not None or name in ("q", "k", "v"):
            check_array(name, array, shapes_only=shapes_only)
    return Inputs(*arrays)


def check_array(name: str, value: Any, *, shapes_only: bool = False) -> None:
    """Raises TypeError unless ``value`` is a JAX array of numbers (or a ShapeDtypeStruct, where only shapes count)."""
    if isinstance(value, jax.Array) or (shapes_only and isinstance(value, jax.ShapeDtypeStruct)):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            raise DTypeError(f"{name}: expected numbers, got dtype {value.dtype}")
        return
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    remedy = "use torch_frontend.attention for torch tensors" if module == "torch" else "use jnp.asarray"
    raise TypeError(f"{name}: expected a jax.Array, got {kind.__module__}.{kind.__qualname__}; {remedy}")
