"""Plans a call: checks its arrays and chooses a backend, while JAX traces. The twin of torch_frontend.dispatch.plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.call import observe
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.hints import remedy_of
from attn_core.call.kinds import check_int32
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.errors import DTypeError, SpecError
from attn_core.selection import (
    Selection,
    Target,
    explain,
    forward_mode,
    new_plans,
    preference,
    refusals,
    select,
)
from attn_core.selection.target import jax_device_name
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.forked import check_process

ArrayOrShape = jax.Array | jax.ShapeDtypeStruct
"""An argument of a function that runs nothing."""


class Plan(NamedTuple):
    """A checked call and the backend that runs it: all of a call that JAX knows while it traces."""

    spec: AttentionSpec
    backend: str
    device: str
    one_row: bool
    """Whether packed arrays came as ``[1, tokens, ...]``; the output then has the same form."""
    as_one: bool = False
    """Whether q, k and v are one array, ``[..., tokens, 3, heads, head_dim]``."""
    overlaps_exchange: bool = False
    """See ``BridgedCall.overlaps_exchange``."""
    requested: tuple[str, ...] | None = None
    """The backends that the caller named, or None for automatic choice."""
    tables_checked: bool = False
    """See ``BridgedCall.tables_checked``."""
    checked: bool = False
    """Whether the program warns of NaN in the call's results when it runs, see ``value_checks.report_results``."""
    documents: int | None = None
    """How many documents the caller's offsets have. The documents that ``offsets`` adds for other tokens follow."""
    with_maximum: bool = False
    """Whether the results end with the largest logits."""


Metadata = tuple[tuple[int, ...], np.dtype]


@from_records(maxsize=4096)
def plan(
    metadata: tuple[Metadata | None, ...], device: str, options: Options, requested: tuple[str, ...] | None
) -> Plan:
    """Checks a call that needs no gradient and chooses its backend; cached by the arguments.

    Args:
        metadata: (shape, dtype) for each field of ``arguments.Arrays``, None for an absent array.
        device: the device's name, from ``device_name``.
        requested: the names in ``backend=`` of the call, or from ``use_backend``.
    """
    new_plans.evicted(plan)
    call_spec = spec(metadata, device, options)
    backend, one_row = backend_of(call_spec, device, requested), has_one_row(call_spec, metadata)
    return Plan(call_spec, backend, device, one_row, requested=requested)


def with_gradient(call: Plan, bias_gradient: bool, aux_gradients: tuple[int, ...]) -> Plan:
    """Returns the plan of the same call with a backward, on a backend that has one.

    JAX says only while it differentiates that a call needs a gradient.

    Args:
        aux_gradients: the numbers of the aux arrays that have a gradient.
    """
    needed = replace(call.spec, needs_backward=True, bias_gradient=bias_gradient, aux_gradients=aux_gradients)
    return call._replace(spec=needed, backend=backend_of(needed, call.device, call.requested))


def with_tangents(call: Plan, *, again: bool = False) -> Plan:
    """Returns the plan of a call's tangents, which another backend than that of its results may compute.

    Args:
        call: its ``aux_gradients`` are the arrays that have tangents.
        again: whether the tangents will be differentiated.

    Raises:
        SpecError: if no backend, or not the requested one, can compute them; the message has every reason.
    """
    requested = call.requested
    if again:  # only the gradients and tangents of JAX's operations have derivatives
        plain = backends.plain_backend("jax")
        if requested is not None and plain not in requested:
            raise SpecError(
                f"backend={', '.join(requested)!r}: expected first derivatives, its kernels have no others; "
                f'backend="{plain}" has a derivative of its forward mode'
            )
        requested = (plain,)
    spec, backend = _forward_mode(call.spec, call.device, requested)
    if backend == call.backend:
        return call
    return call._replace(spec=spec, backend=backend, overlaps_exchange=False)


@from_records(maxsize=4096)
def _forward_mode(spec: AttentionSpec, device: str, requested: tuple[str, ...] | None) -> tuple[AttentionSpec, str]:
    """Returns the spec of a call's tangents, and the backend that computes them."""
    order = requested or backends.forward_mode_order("jax", backends.kind_of(device))
    choice = choice_beside(
        lambda target: forward_mode.choose(spec, target, requested, spec.aux_gradients), order, device
    )
    return choice.spec, forward_mode.noted(choice)


def choice_beside(choose: Callable[[Target], Any], order: Sequence[str], device: str) -> Any:
    """Returns the choice of what computes tangents or largest logits, from a function of the target.

    If JAX's own operations come first and serve, it does not matter what is installed; to look imports torch.

    Args:
        order: the candidates.
    """
    choice = choose(Target("jax", device))
    if order[0] == choice.backend == backends.plain_backend("jax"):
        return choice
    return choose(Target.here("jax", device))


@from_records(maxsize=4096)
def backend_of(call_spec: AttentionSpec, device: str, requested: tuple[str, ...] | None) -> str:
    """Returns the name of the backend that runs a call."""
    new_plans.evicted(backend_of)
    plain = backends.plain_backend("jax")
    if _takes(plain, call_spec, device, requested):
        new_plans.planned(call_spec, Target("jax", device), requested, plain, fell_back=False)
        return plain
    selection = select(call_spec, Target.here("jax", device), requested)
    new_plans.selected(selection)
    return selection.backend or ""


def _takes(plain: str, spec: AttentionSpec, device: str, names: tuple[str, ...] | None) -> bool:
    """Returns whether the backend of JAX's operations is the first choice and can run the call.

    ``select`` would choose it, too. But it looks for every installed backend first, and so imports torch.
    """
    if spec.invariant is not None:  # which backend keeps it depends on those that are installed
        return False
    preferred = preference.order(spec, "jax", device) if names is None else names
    if preferred[:1] != (plain,) or backends.availability(plain)[1] is not None:
        return False
    return not refusals(plain, spec, Target("jax", device))


def explanation(call_spec: AttentionSpec, device: str, requested: tuple[str, ...] | None) -> Selection:
    """Returns the Selection of a call, whether or not a backend can run it, with the faults of its programs."""
    return compiled_lane.with_program_reasons(explain(call_spec, Target.here("jax", device), requested))


def spec(
    metadata: tuple[Metadata | None, ...],
    device: str,
    options: Options,
    *,
    needs_backward: bool = False,
    bias_gradient: bool = False,
) -> AttentionSpec:
    """Returns the spec of a call; the arguments are those of ``plan``."""
    return build_spec(
        Arrays(*facts_of(metadata, device)), options, needs_backward=needs_backward, bias_gradient=bias_gradient
    )


def has_one_row(call_spec: AttentionSpec, metadata: tuple[Metadata | None, ...]) -> bool:
    """Returns whether the arrays of a packed call came as ``[1, tokens, ...]``."""
    return call_spec.packed and metadata[0] is not None and len(metadata[0][0]) == 4


def metadata(inputs: Inputs) -> tuple[Metadata | None, ...]:
    """Returns (shape, dtype) of each field of ``arguments.Arrays``. If k is None, q holds q, k and v in one array."""
    if inputs.k is None:
        one = jax.ShapeDtypeStruct((*inputs.q.shape[:-3], *inputs.q.shape[-2:]), inputs.q.dtype)
        inputs = inputs._replace(q=one, k=one, v=one)
    return metadata_of(inputs[: len(Arrays._fields)])


def metadata_of(arrays: Iterable[ArrayOrShape | np.ndarray | None]) -> tuple[Metadata | None, ...]:
    """Returns (shape, dtype) of each array or shape; None for an absent array."""
    # One function for all, because every eager call runs it.
    return tuple(None if array is None else (tuple(array.shape), np.dtype(array.dtype)) for array in arrays)


def facts_of(metadata: tuple[Metadata | None, ...], device: str) -> list[Any]:
    """Returns the facts of arrays on a device, None for an absent array."""
    return [entry and ArrayFacts(tuple(entry[0]), str(entry[1]), device) for entry in metadata]


def device_name(array: object) -> str:
    """Returns the name of an array's device, such as "cpu" or "sm90". A traced array has JAX's default device."""
    return jax_device_name(_device(array))


def is_on_host(array: object, *, or_elsewhere: bool = False) -> bool:
    """Returns whether the values of an array can be read without waiting: numpy's, and untraced ones on the CPU.

    Args:
        or_elsewhere: also True for an array on a GPU, which the caller then waits for.
    """
    if isinstance(array, np.ndarray):
        return True
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return False
    return or_elsewhere or device_name(array) == "cpu"


def device_index(array: object) -> int:
    """Returns the index of an array's device among this process's devices of its kind; torch counts the same way."""
    return int(_device(array).local_hardware_id or 0)


def _device(array: object) -> jax.Device:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    # A traced array has no device yet. ``local_call`` corrects the guess if the program is lowered for another one.
    device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    # jax_default_device may also be the name of a platform.
    return jax.devices(device)[0] if isinstance(device, str) else device


def check_key(key: object) -> None:
    """Raises SpecError unless ``key`` is one PRNG key, from ``jax.random.key`` or as raw uint32 words."""
    expected = "dropout_rng: expected one PRNG key such as jax.random.key(0), got"
    if not isinstance(key, jax.Array):
        raise SpecError(f"{expected} {key!r}")
    typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if typed else 1) or not (typed or key.dtype == np.uint32):
        raise SpecError(f"{expected} an array of shape {list(key.shape)} and dtype {key.dtype}")


def check_arrays(inputs: Inputs, *, shapes_only: bool = False) -> None:
    """Checks each array of floats and the mask by itself: q, k, v and every other that is present."""
    for name in ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks"):
        array = getattr(inputs, name)
        if array is not None or name in ("q", "k", "v"):
            check_array(name, array, shapes_only=shapes_only)


def ranges_as_array(key_ranges: ArrayOrShape | np.ndarray, *, shapes_only: bool = False) -> Any:
    """Returns key ranges as a JAX array, or with ``shapes_only`` as its shape; ``attn_core.masks`` builds numpy's."""
    if isinstance(key_ranges, np.ndarray):
        check_int32("key_ranges", key_ranges.dtype)
    return moved_array("key_ranges", key_ranges, shapes_only=shapes_only)


def moved_array(name: str, array: ArrayOrShape | np.ndarray, *, shapes_only: bool = False) -> Any:
    """Returns an argument as a JAX array, or with ``shapes_only`` as its shape; an array of numpy moves to a device."""
    if isinstance(array, np.ndarray):
        return jax.device_put(array)  # explicitly, which ``jax.transfer_guard`` allows
    check_array(name, array, shapes_only=shapes_only)
    # JAX differentiates a Python number as an object without a shape, which becomes an array with its dtype fixed.
    typed = isinstance(array, jax.core.Tracer) and jax.typeof(array).weak_type  # type: ignore[attr-defined]
    return jnp.asarray(array, array.dtype) if typed else array


def as_array(name: str, value: Any) -> jax.Array:
    """Returns anything that JAX takes for an array. Raises TypeError that names the argument for other values.

    Copies numpy arrays: JAX might share their memory, which the caller may write to before the call runs. A copy needs
    no program, either: ``jnp.asarray`` compiles one for each new shape.
    """
    if isinstance(value, jax.Array):
        check_array(name, value)
    try:
        return jnp.array(value) if type(value) is np.ndarray else jnp.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = type(value)
        raise TypeError(f"{name}: expected an array, got {kind.__module__}.{kind.__qualname__}") from None


def check_array(name: str, value: object, *, shapes_only: bool = False) -> None:
    """Raises TypeError or DTypeError unless ``value`` is a JAX array of numbers, and RuntimeError if JAX would hang.

    With ``shapes_only`` a ShapeDtypeStruct is accepted, too, and nothing will run.
    """
    if not shapes_only:
        check_process()
    if isinstance(value, jax.Array) or (shapes_only and isinstance(value, jax.ShapeDtypeStruct)):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            raise DTypeError(f"{name}: expected numbers, got dtype {value.dtype}")
        if not shapes_only and not isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct) and value.is_deleted():
            raise SpecError(
                f"{name}: expected an array with data, got a deleted one; a jit may have donated its buffer"
            )
        return
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    usual = "use torch_frontend.attention for torch tensors" if module == "torch" else "use jnp.asarray"
    remedy = remedy_of(value) or usual
    raise TypeError(f"{name}: expected a jax.Array, got {kind.__module__}.{kind.__qualname__}; {remedy}")


observe.watch("jax", plan, backend_of)
