"""Plans a call: from tensors to a backend's forward and backward.

A package such as cuDNN prepares a plan for every new shape of a call, and keeps it until the process ends. A program
with ever new lengths would spend most of its time on plans and grow without end. So after as many shapes as the
backend's ``kept_plans`` allows, automatic choice takes another kernel for a new one. The shapes that have a plan stay
with the backend, and so do calls that name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch

from attn_core import backends
from attn_core.backends.contract import KeptPlans
from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.torch_ranges import in_range_if_on
from attn_core.call import observe
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.functions import AUX
from attn_core.call.grouped_rows import GroupedRows, by_chunks
from attn_core.call.hints import remedy_of
from attn_core.call.options import Options, requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import SpecError, shown
from attn_core.selection import Selection, Target, explain, new_plans, select
from attn_core.selection import on_documents as select_documents
from torch_frontend.dispatch import sdpa_flags, tensor_kinds
from torch_frontend.dispatch.mask_objects import Visible, as_options, is_object

Tensor = torch.Tensor
Results = Tensor | tuple[Tensor, Tensor]
"""What a call returns: the output, or (out, lse)."""
Shortcut = Callable[..., tuple[Tensor, Tensor] | None]

_planned_shapes: dict[str, dict[AttentionSpec, None]] = {}
"""By backend with ``kept_plans``, the calls that automatic choice gave to it."""


def without_more_plans(target: Target, spec: AttentionSpec) -> Target:
    """Returns the target for the automatic choice of a call: without the backends that may keep no further plan."""
    full = [
        (name, _limit_of(name, target.kind)) for name, shapes in tuple(_planned_shapes.items()) if spec not in shapes
    ]
    full = [(name, limit) for name, limit in full if limit is not None and len(_planned_shapes[name]) >= limit.most]
    return _without(target, tuple(full)) if full else target


@lru_cache(maxsize=64)
def _without(target: Target, full: tuple[tuple[str, KeptPlans], ...]) -> Target:
    reasons = tuple(
        (
            name,
            f"{limit.most} shapes of this process have a plan in {limit.by}, which it never frees; automatic choice "
            f"makes no more. Pad lengths to a few sizes, or name it: backend={name!r}",
        )
        for name, limit in full
    )
    return replace(target, unavailable=(*target.unavailable, *reasons))


def note_plan_of(spec: AttentionSpec, name: str, kind: str) -> None:
    """Notes the automatic choice of a call, if the backend keeps a plan for its shape."""
    if _limit_of(name, kind) is not None:
        _planned_shapes.setdefault(name, {}).setdefault(spec)


def _limit_of(name: str, kind: str) -> KeptPlans | None:
    return backends.load(name, kind).kept_plans


class Plan(NamedTuple):
    """A checked call with the functions of its backend."""

    spec: AttentionSpec
    backend: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    one_row: bool
    """Whether the packed tensors and results are ``[1, tokens, ...]``."""
    shortcut: Shortcut | None = None
    """The backend's function that autograd can differentiate, see ``Backend.shortcut_of``; None if it has none.

    It takes the mask and the bias as the caller passed them."""
    writes_into: bool = False
    """Whether the backend's functions accept ``into``, buffers for their results."""
    in_parts: bool = False
    """Whether the backend computes the call's key ranges in parts, see ``in_parts``."""
    instead: str | None = None
    """For a dense call that runs on packed documents, a backend that runs it where no value may be read; else None."""


Metadata = tuple[torch.Size, torch.dtype, torch.device]


@from_records(maxsize=4096)
def plan(
    metadata: Inputs,
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    switches: sdpa_flags.Switches | None = None,
) -> Plan:
    """Checks a call and chooses its backend; results are cached.

    Args:
        metadata: ``Metadata`` in the place of each tensor, None for an absent one.
        requested: the backends that the call's ``backend=`` or ``use_backend`` names.
        switches: torch's flags during the call, ``sdpa_flags.now()``.
    """
    new_plans.evicted(plan)
    spec, target, names = request(metadata, options, needs_backward, bias_gradient, requested, switches)
    rows = by_chunks(spec)
    if rows is not None:
        found = on_documents(rows, spec, target, names, metadata.q[2], limits_plans=switches is None)
        if found is not None:
            return found
    selection = select(spec, target, names)
    new_plans.selected(selection)
    # A caller who names a backend, or leaves it alone by torch's flags, decides about its plans himself.
    if selection.requested is None and switches is None:
        note_plan_of(selection.spec, selection.backend or "", selection.target.kind)
    device, one_row = metadata.q[2], _has_one_row(spec, metadata)
    return plan_on(selection.backend or "", spec, selection.target, device, metadata.mask, metadata.bias, one_row)


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
    if spec.empty:  # nothing to compute, and kernels refuse sizes of 0
        return Plan(spec, name, empty_forward, _empty_backward, one_row)
    record = backends.load(name, target.kind)
    functions = record.forward, record.backward, _with_four_axes(record.shortcut_of(spec), mask, bias)
    forward, backward, shortcut = [on_device(function, device) for function in functions]
    return Plan(spec, name, forward, backward, one_row, shortcut, bool(record.writes_into))


def on_documents(
    rows: GroupedRows,
    spec: AttentionSpec,
    target: Target,
    names: tuple[str, ...] | None,
    device: torch.device,
    *,
    limits_plans: bool,
    instead: str | None = None,
) -> Plan | None:
    """Returns the plan of a dense call on packed documents; None if its mask should stay a function.

    Args:
        spec: of the dense call; target, names: see ``request``.
        limits_plans: whether torch's flags leave all backends alone.
        instead: see ``Plan``; the backend of the documents if None.
    """
    limits_plans = limits_plans and names is None
    selection = select_documents(rows, without_more_plans(target, rows.spec) if limits_plans else target, names)
    if selection is None or selection.backend is None:
        return None
    new_plans.selected(selection)
    if limits_plans:
        note_plan_of(rows.spec, selection.backend, target.kind)
    inner = plan_on(selection.backend, rows.spec, selection.target, device, None, None, one_row=False)
    offsets = _offsets_of_chunks if rows.chunk is not None else torch.from_numpy(rows.offsets).to(device)
    forward = partial(_forward_on_documents, inner, rows, offsets)
    backward = partial(_backward_on_documents, inner, rows, offsets)
    name = selection.backend
    return Plan(spec, name, forward, backward, one_row=False, instead=instead or name)


def _offsets_of_chunks(rows: GroupedRows, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Returns the offsets of chunks, computed on the device: nothing is kept, so a CUDA graph may contain it."""
    assert rows.chunk is not None
    tokens, whole, rest = spec.q_len, *divmod(spec.q_len, rows.chunk)
    count = whole + (rest > 0)
    numbers = torch.arange(spec.batch * count + 1, dtype=torch.int32, device=device)
    return numbers * rows.chunk if not rest else numbers // count * tokens + numbers % count * rows.chunk


def _end_to_end(rows: GroupedRows, offsets: Any, spec: AttentionSpec, inputs: Inputs) -> Inputs:
    """Returns the inputs of a dense call with its rows end to end: ``[batch, tokens, ...] -> [batch * tokens, ...]``"""
    offsets = offsets if isinstance(offsets, Tensor) else offsets(rows, spec, inputs.q.device)
    q, k, v = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in inputs[:3])
    return Inputs(q, k, v, sinks=inputs.sinks, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def _forward_on_documents(
    inner: Plan, rows: GroupedRows, offsets: Any, spec: AttentionSpec, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    out, lse = inner.forward(rows.spec, _end_to_end(rows, offsets, spec, inputs))
    # [heads, batch * tokens] -> [batch, heads, tokens]
    return out.view(spec.out_shape), lse.view(-1, spec.batch, spec.q_len).transpose(0, 1)


def _backward_on_documents(
    inner: Plan,
    rows: GroupedRows,
    offsets: Any,
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    out, dout = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in (out, dout))
    lse, dlse = _of_all_rows(lse), None if dlse is None else _of_all_rows(dlse)
    gradients = inner.backward(rows.spec, _end_to_end(rows, offsets, spec, inputs), out, lse, dout, dlse)
    dq, dk, dv = (each.view(like.shape) for each, like in zip(gradients[:3], inputs[:3], strict=False))
    return gradients._replace(dq=dq, dk=dk, dv=dv)


def _of_all_rows(lse: Tensor) -> Tensor:
    """``[batch, heads, tokens] -> [heads, batch * tokens]``"""
    return lse.transpose(0, 1).flatten(1)


class PlanBeside(NamedTuple):
    """A checked call with a function that computes something beside its results: their tangents, or row maxima."""

    spec: AttentionSpec
    function: Any
    """The backend's; None for an empty call."""
    one_row: bool
    """See ``Plan``."""


def plan_beside(
    direction: Literal["jvp", "row_maximum"],
    name: str,
    spec: AttentionSpec,
    target: Target,
    metadata: Inputs,
) -> PlanBeside:
    """Returns the plan of what the chosen backend computes beside a call; ``metadata`` is that of ``plan``."""
    one_row = _has_one_row(spec, metadata)
    if spec.empty:
        return PlanBeside(spec, None, one_row)
    record = backends.load(name, target.kind)
    own: Any = record.forward_mode if direction == "jvp" else record.row_maximum  # those chosen have one
    function = own.jvp if direction == "jvp" else own.function
    return PlanBeside(spec, in_range_if_on(on_device(function, metadata.q[2]), name, direction), one_row)


def _has_one_row(spec: AttentionSpec, metadata: Inputs) -> bool:
    return spec.packed and len(metadata.q[0]) == 4


def _with_four_axes(shortcut: Shortcut | None, mask: Metadata | None, bias: Metadata | None) -> Shortcut | None:
    """Wraps a shortcut so that the mask and the bias may have fewer than four axes; the function itself if they do not.

    The missing axes of size 1 are in front.

    Args:
        mask, bias: their metadata, or None.
    """
    at_mask, at_bias = [() if table is None else (None,) * (4 - len(table[0])) for table in (mask, bias)]
    if shortcut is None or not (at_mask or at_bias):
        return shortcut

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        if mask is not None and at_mask:
            mask = mask[at_mask]
        if bias is not None and at_bias:
            bias = bias[at_bias]
        return shortcut(q, k, v, mask, bias)

    return run


def on_device(function: Any, device: torch.device) -> Any:
    """Wraps a function to run with its tensors' GPU as the current one, because Triton launches on the current GPU.

    With one GPU or none it returns the function itself.
    """
    if function is None or device.type != "cuda" or torch.cuda.device_count() < 2:
        return function

    def run(*arguments: Any, **keywords: Any) -> Any:
        if torch.cuda.current_device() == device.index:  # as usual; the context would take microseconds
            return function(*arguments, **keywords)
        with torch.cuda.device(device):
            return function(*arguments, **keywords)

    heads_first = getattr(function, "heads_first", None)  # of a backend's shortcut
    if heads_first is not None:
        run.heads_first = on_device(heads_first, device)  # type: ignore[attr-defined]
    return run


def explanation(*arguments: Any) -> Selection:
    """Returns the Selection for the arguments of ``plan``, also if no backend can run the call."""
    return explain(*request(*arguments))


def request(
    metadata: Inputs,
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
    switches: sdpa_flags.Switches | None = None,
) -> tuple[AttentionSpec, Target, tuple[str, ...] | None]:
    """Returns the arguments of ``select``: the spec, the target and the requested backends."""
    spec = build_spec(arrays_of(metadata), options, needs_backward=needs_backward, bias_gradient=bias_gradient)
    target = sdpa_flags.limited(Target.here("torch", device_name(metadata.q[2])), switches)
    names = requested_names(requested) or sdpa_flags.preferred(switches)
    if names is None and switches is None:  # torch's flags may leave one backend alone
        target = without_more_plans(target, spec)
    return spec, target, names


def check(entries: Inputs, options: Options) -> None:
    """Checks a call that becomes one op, if its sizes are ints; the op checks the rest when it runs.

    Only the op checks the longest documents, because it completes the offsets first.

    Args:
        entries: ``metadata`` of the call's tensors.
    """
    if all(type(size) is int for entry in entries if entry for size in entry[0]):
        arrays = arrays_of(entries)
        if arrays.cu_seqlens_q is not None and len(arrays.q.shape) > 2 and len(arrays.k.shape) > 2:
            options = options._replace(max_len_q=arrays.q.shape[-3], max_len_k=arrays.k.shape[-3])
        build_spec(arrays, options)


def metadata(inputs: Inputs) -> Inputs:
    """Returns ``Metadata`` in the place of every tensor, None for an absent one."""
    return Inputs._make([None if t is None else (t.shape, t.dtype, t.device) for t in inputs])


def arrays_of(entries: Iterable[Metadata | None]) -> Arrays:
    """Returns the facts of a call's tensors but dropout's words from their ``metadata``, or that of the first ones."""
    return Arrays(*(entry and facts(*entry) for _, entry in zip(Arrays._fields, entries)))  # type: ignore[arg-type]


def facts(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> ArrayFacts:
    """Returns a tensor's shape, dtype and device as attn_core's checks expect them."""
    if not isinstance(dtype, torch.dtype):  # numpy arrays also have a shape, a dtype and the device "cpu"
        raise TypeError(f"expected a torch.dtype, got {dtype!r}")
    return ArrayFacts(tuple(shape), str(dtype).removeprefix("torch."), str(device))


def device_of(device: torch.device | str | int) -> torch.device:
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


def lse_dtype(q: Tensor) -> torch.dtype:
    """Returns the dtype of a call's log-sum-exp: float32, or float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def filled_results(spec: AttentionSpec, q: Tensor, out: float, lse: float) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call, each filled with one number."""
    return q.new_full(spec.out_shape, out), q.new_full(spec.lse_shape, lse, dtype=lse_dtype(q))


def empty_forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call without queries or without keys: zeros and -inf, without a kernel."""
    return filled_results(spec, inputs.q, 0.0, -torch.inf)


def _empty_backward(spec: AttentionSpec, inputs: Inputs, *_: object) -> Gradients:
    """Returns the gradients of a call without queries or without keys: zeros."""
    dbias = torch.zeros_like(inputs.bias) if spec.bias_gradient else None
    dsinks = torch.zeros_like(inputs.sinks) if spec.sinks else None
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in inputs[:3])
    arrays = {name: getattr(inputs, name) for name in (AUX[number] for number in spec.aux_gradients)}
    daux = {f"d{name}": torch.zeros_like(array) for name, array in arrays.items()}
    return Gradients(dq, dk, dv, dbias, dsinks, **daux)


def check_tensor(name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is a torch tensor, SpecError unless it is plain data."""
    if isinstance(value, Tensor):
        tensor_kinds.check(name, value)
        return
    kind = type(value)
    usual = "use jax_frontend.attention for JAX arrays" if kind.__module__.startswith("jax") else "use torch.as_tensor"
    remedy = remedy_of(value) or usual
    raise TypeError(f"{name}: expected a torch.Tensor, got {kind.__module__}.{kind.__qualname__}; {remedy}")


def without_mask_object(q: Tensor, k: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, with the options that a mask object means in the object's place."""
    if not is_object(given["mask"], given["bias"]):
        return given
    check_tensor("q", q)
    check_tensor("k", k)
    q_len, kv_len = (tensor.shape[-3] if tensor.dim() > 2 else None for tensor in (q, k))
    visible = Visible(*[given[name] for name in Visible._fields])
    return given | as_options(visible, q_len, kv_len, q.device)._asdict()


def check_gradient_free(name: str, value: Tensor | None) -> None:
    """Raises SpecError if the tensor has a gradient or a tangent, for arguments without a defined derivative."""
    if value is not None and tensor_kinds.is_trained(value):
        kind, what = ("requires_grad=False", "gradient") if value.requires_grad else ("no tangent", "derivative")
        raise SpecError(f"{name}: expected {kind}, its {what} is not defined here; pass {name}.detach()")


def smaller(one: int | torch.SymInt, other: int | torch.SymInt) -> int | torch.SymInt:
    """Returns the smaller of two lengths without a guard on symbols; Dynamo converts ``min`` of symbols likewise."""
    return (
        torch.sym_min(one, other)
        if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt)
        else min(one, other)
    )


observe.watch("torch", plan)
