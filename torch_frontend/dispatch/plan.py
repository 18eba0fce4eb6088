"""Plans a call: from tensors to a backend's forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attn_core import backends
from attn_core.call import observe
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.functions import AUX
from attn_core.call.hints import remedy_of
from attn_core.call.mask_objects import Visible, as_options
from attn_core.call.options import Options, requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import SpecError, shown
from attn_core.selection import Selection, Target, explain, new_plans, select
from torch_frontend.dispatch import cudnn_plans, sdpa_flags, tensor_kinds
from torch_frontend.dispatch.wrappers import on_device, with_four_axes

Tensor = torch.Tensor


class Plan(NamedTuple):
    """A checked call with the functions of its backend."""

    spec: AttentionSpec
    backend: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Gradients]
    one_row: bool
    """Whether the packed tensors and results are ``[1, tokens, ...]``."""
    shortcut: Callable[..., tuple[Any, Any] | None] | None = None
    """The backend's function that autograd can differentiate, see ``Backend.shortcut_of``; None if it has none.

    It takes the mask and the bias as the caller passed them."""
    writes_into: bool = False
    """Whether the backend's functions accept ``into``, buffers for their results."""
    in_parts: bool = False
    """Whether the backend computes the call's key ranges in parts, see ``in_parts``."""


Metadata = tuple[torch.Size, torch.dtype, torch.device]


@lru_cache(maxsize=4096)
def plan(
    metadata: tuple[Metadata | None, ...],
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    switches: sdpa_flags.Switches | None = None,
) -> Plan:
    """Checks a call and chooses its backend; results are cached.

    Args:
        metadata: (shape, dtype, device) for each field of ``arguments.Arrays``, None for an absent tensor.
        requested: the backends that the call's ``backend=`` or ``use_backend`` names.
        switches: torch's flags during the call, ``sdpa_flags.now()``.
    """
    new_plans.evicted(plan)
    selection = select(*request(metadata, options, needs_backward, bias_gradient, requested, switches))
    new_plans.selected(selection)
    if selection.requested is None and switches is None:
        cudnn_plans.chosen(selection.spec, selection.backend or "")
    spec = selection.spec
    one_row = spec.packed and len(metadata[0][0]) == 4 if metadata[0] else False
    device = metadata[0][2] if metadata[0] else torch.device("cpu")
    return plan_on(selection.backend or "", spec, selection.target, device, metadata[3], metadata[4], one_row)


def plan_on(
    name: str,
    spec: AttentionSpec,
    target: Target,
    device: torch.device,
    mask: Metadata | None,
    bias: Metadata | None,
    one_row: bool,
) -> Plan:
    """Returns the plan of a call on the chosen backend."""
    if spec.empty:
        return Plan(spec, name, empty_forward, _empty_backward, one_row)
    record = backends.load(name, target.kind)
    shortcut = with_four_axes(record.shortcut_of(spec), mask, bias)
    forward, backward = (on_device(function, device) for function in (record.forward, record.backward))
    return Plan(spec, name, forward, backward, one_row, on_device(shortcut, device), bool(record.writes_into))


def explanation(*arguments: Any) -> Selection:
    """Returns the Selection for the arguments of ``plan``, also if no backend can run the call."""
    return explain(*request(*arguments))


def request(
    metadata: tuple[Metadata | None, ...],
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    switches: sdpa_flags.Switches | None = None,
) -> tuple[AttentionSpec, Target, str | tuple[str, ...] | None]:
    """Returns the arguments of ``select``: the spec, the target and the requested backends."""
    arrays = Arrays(*(entry and facts(*entry) for entry in metadata))  # type: ignore[arg-type]
    spec = build_spec(arrays, options, needs_backward=needs_backward, bias_gradient=bias_gradient)
    device = metadata[0][2] if metadata[0] else torch.device("cpu")
    target = sdpa_flags.limited(Target.here("torch", device_name(device)), switches)
    names = requested_names(requested) or sdpa_flags.preferred(switches)
    if names is None and switches is None:  # torch's flags may leave cuDNN alone
        target = cudnn_plans.limited(target, spec)
    return spec, target, names


def check(entries: tuple[Metadata | None, ...], options: Options) -> None:
    """Checks a call that becomes one op, if its sizes are ints; the op checks the rest when it runs.

    Only the op checks the longest documents, because it completes the offsets first.

    Args:
        entries: ``metadata`` of the call's tensors.
    """
    if torch.compiler.is_compiling():
        return
    if all(type(size) is int for entry in entries if entry for size in entry[0]):
        arrays = Arrays(*(entry and facts(*entry) for entry in entries))  # type: ignore[arg-type]
        if arrays.cu_seqlens_q is not None and len(arrays.q.shape) > 2 and len(arrays.k.shape) > 2:
            options = options._replace(max_len_q=arrays.q.shape[-3], max_len_k=arrays.k.shape[-3])
        build_spec(arrays, options)


def metadata(inputs: Inputs) -> tuple[Metadata | None, ...]:
    """Returns (shape, dtype, device) of every tensor that ``arguments.Arrays`` names."""
    return tuple(None if t is None else (t.shape, t.dtype, t.device) for t in inputs[: len(Arrays._fields)])


def facts(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> ArrayFacts:
    """Returns a tensor's shape, dtype and device as attn_core's checks expect them."""
    if not isinstance(dtype, torch.dtype):  # numpy arrays also have a shape, a dtype and the device "cpu"
        raise TypeError(f"expected a torch.dtype, got {dtype!r}")
    return ArrayFacts(tuple(shape), str(dtype).removeprefix("torch."), str(device))


def device_of(device: Any) -> torch.device:
    """Returns a device. Raises SpecError for a value that names none."""
    if not isinstance(device, torch.device | str | int):
        raise SpecError(f"device={shown(device)}: expected a torch.device or its name")
    try:
        return torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(f"device={shown(device)}: expected a torch.device or its name; {error}") from None


def device_name(device: torch.device) -> str:
    """Returns ``"cpu"``, ``"sm90"`` and the like, an AMD GPU's architecture, or the type of any other device."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def empty_forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call without queries or without keys: zeros and -inf, without a kernel."""
    lse_dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    return inputs.q.new_zeros(spec.out_shape), inputs.q.new_full(spec.lse_shape, -torch.inf, dtype=lse_dtype)


def _empty_backward(spec: AttentionSpec, inputs: Inputs, *_: Any) -> Gradients:
    """Returns the gradients of a call without queries or without keys: zeros."""
    dbias = torch.zeros_like(inputs.bias) if spec.bias_gradient else None
    dsinks = torch.zeros_like(inputs.sinks) if spec.sinks else None
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in inputs[:3])
    arrays = {name: getattr(inputs, name) for name in (AUX[number] for number in spec.aux_gradients)}
    daux = {f"d{name}": torch.zeros_like(array) for name, array in arrays.items()}
    return Gradients(dq, dk, dv, dbias, dsinks, **daux)


def check_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a torch tensor, SpecError unless it is plain data."""
    if isinstance(value, Tensor):
        tensor_kinds.check(name, value)
        return
    kind = type(value)
    usual = "use jax_frontend.attention for JAX arrays" if kind.__module__.startswith("jax") else "use torch.as_tensor"
    remedy = remedy_of(value) or usual
    raise TypeError(f"{name}: expected a torch.Tensor, got {kind.__module__}.{kind.__qualname__}; {remedy}")


def read_mask_object(q: Any, k: Any, visible: tuple[Any, ...]) -> Visible:
    """Returns the options that say what is visible, with those that a mask object means in its place.

    Args:
        visible: causal, alignment, window, mask, bias, seq_info; the mask or the bias ``is_object``.
    """
    check_tensor("q", q)
    check_tensor("k", k)
    q_len, kv_len = (tensor.shape[-3] if tensor.dim() > 2 else None for tensor in (q, k))
    return as_options(Visible(*visible), q_len, kv_len, q.device)


def check_gradient_free(name: str, value: Tensor | None) -> None:
    """Raises SpecError if the tensor has a gradient or a tangent, for arguments without a defined derivative."""
    if value is not None and tensor_kinds.is_trained(value):
        kind, what = ("requires_grad=False", "gradient") if value.requires_grad else ("no tangent", "derivative")
        raise SpecError(f"{name}: expected {kind}, its {what} is not defined here; pass {name}.detach()")


def smaller(one: Any, other: Any) -> Any:
    """Returns the smaller of two lengths without a guard on symbols; Dynamo converts ``min`` of symbols likewise."""
    return (
        torch.sym_min(one, other)
        if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt)
        else min(one, other)
    )


observe.watch("torch", plan)
