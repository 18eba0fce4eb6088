"""Plans of calls by values on the host: those with key ranges in parts, and those with a mask of ids as documents.

Both are on the host as an array of numpy, or as a tensor on the CPU, ranges also beside a q on a GPU. Values on a GPU
are not read, because a call must not wait for it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attn_core.backends.shared.caches import declare, from_records
from attn_core.call.grouped_rows import GroupedRows, by_chunks, by_ids, groups_in
from attn_core.call.key_ranges import check_values
from attn_core.call.options import requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.selection import Selection, explain, select
from attn_core.selection import on_documents as select_documents
from torch_frontend.dispatch import plan
from torch_frontend.dispatch.plan import Plan, on_device

if TYPE_CHECKING:
    from attn_core.context_parallel.on_torch import one_device as parts

Tensor = torch.Tensor
Arguments = tuple[Any, ...]
"""The arguments of ``plan.plan``."""


def on_host(key_ranges: Tensor | None) -> bool:
    """Returns whether the values of a call's key ranges can be read without waiting for a GPU."""
    return key_ranges is not None and key_ranges.is_cpu


def metadata(inputs: Inputs) -> Inputs:
    """Returns ``plan.metadata`` with key ranges on the host as if they were on q's device."""
    entries = plan.metadata(inputs)
    if not on_host(inputs.key_ranges) or inputs.q.is_cpu:
        return entries
    shape, dtype, _ = entries.key_ranges
    return entries._replace(key_ranges=(shape, dtype, inputs.q.device))


def resolve(arguments: Arguments, inputs: Inputs, chosen: str | None = None) -> tuple[Plan, Inputs]:
    """Returns the plan of a call, in parts if that is the best way to run it, and the inputs that the plan takes.

    Args:
        arguments: of ``plan.plan``, with ``metadata``.
        chosen: the backend of the parts, if the forward of the call ran in parts.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument. NoBackendError: with every reason.
    """
    ranges = inputs.key_ranges
    if ranges is None or not on_host(ranges):
        return plan.plan(*arguments), inputs
    if ranges.dtype != torch.int32:
        return plan.plan(*arguments), inputs  # raises an error that names the dtype
    content = content_of(ranges.numpy())
    found = _plan_in_parts(arguments, content, chosen)
    if found is not None:
        return found, inputs
    if not inputs.q.is_cpu:
        inputs = inputs._replace(key_ranges=on_gpu(content, tuple(ranges.shape), inputs.q.device))
    return plan.plan(*arguments), inputs


VALUES = "_attn_core_ids"
"""The attribute of a tensor on a GPU, made of an array of numpy for one call, with the bytes of the array's ids."""


def resolve_eagerly(arguments: Arguments, inputs: Inputs) -> tuple[Plan, Inputs]:
    """Returns ``resolve`` of a call that nothing observes: ids of its mask may be read."""
    content = _ids_of(arguments, inputs.aux0)
    found = None if content is None else _plan_by_ids(arguments, content)
    return resolve(arguments, inputs) if found is None else (found, inputs)


def documents_of(arguments: Arguments, inputs: Inputs) -> Selection | None:
    """Returns the Selection of an eager call that runs on documents, None for another."""
    spec, target, names = plan.request(*arguments)
    rows, content = by_chunks(spec), _ids_of(arguments, inputs.aux0)
    if content is not None and explain(spec, target, names).backend is not None:
        rows = _rows_by_ids(arguments, content)
    return None if rows is None else select_documents(rows, target, names)


def _ids_of(arguments: Arguments, ids: Tensor | None) -> bytes | None:
    """Returns the ids of a call whose mask shows equal ids, as ``_ids_on_host``; None for any other call."""
    return _ids_on_host(ids) if type(ids) is Tensor and _compares_ids(arguments) else None


@from_records(maxsize=1024)
def _compares_ids(arguments: Arguments) -> bool:
    groups = groups_in(plan.request(*arguments)[0])
    return groups is not None and groups.array is not None


def _ids_on_host(ids: Tensor) -> bytes | None:
    """Returns ids as the bytes of their low 32 bits; None for ids on a GPU alone, because reading them would wait."""
    if ids.is_cpu:
        return content_of(ids.numpy())
    return getattr(ids, VALUES, None)


def keep_ids(ids: Tensor, values: np.ndarray) -> None:
    """Keeps what may be ids beside their copy on a GPU."""
    if ids.is_cuda and values.dtype.kind in "iu":
        setattr(ids, VALUES, content_of(values))


@from_records(maxsize=64)
def _rows_by_ids(arguments: Arguments, content: bytes) -> GroupedRows | None:
    """Returns a call on packed documents; None if an id comes back behind another one."""
    spec, *_ = plan.request(*arguments)
    return by_ids(spec, np.frombuffer(content, np.int32).reshape(arguments[0].aux0[0]))


@from_records(maxsize=64)
def _plan_by_ids(arguments: Arguments, content: bytes) -> Plan | None:
    """Returns a call's plan on documents; None if an id comes back behind another one, or no kernel is faster."""
    entries, *_, switches = arguments
    spec, target, names = plan.request(*arguments)
    rows = _rows_by_ids(arguments, content)
    if rows is None:
        return None
    # Also where ids cannot be read, the call must run: a backend that is named runs functions, or raises.
    whole = select(spec, target, names)
    limits_plans, device = switches is None, entries.q[2]
    with torch.inference_mode(False):  # a call outside of inference mode reads the offsets, too
        return plan.on_documents(rows, spec, target, names, device, limits_plans=limits_plans, instead=whole.backend)


_recent: tuple[tuple[bytes, Any], ...] = ()
"""The contents of the last few ranges and ids, as bytes and as the numbers in them."""


def content_of(numbers: np.ndarray) -> bytes:
    """Returns the low 32 bits of ints as bytes: of those that were seen lately the same object, whose hash is known."""
    global _recent
    values = numbers.astype(np.int32, copy=False).reshape(-1)
    for content, known in _recent:
        if known.shape == values.shape and (known == values).all():
            return content
    content = values.tobytes()
    _recent = ((content, np.frombuffer(content, np.int32)), *_recent[:3])
    return content


# Few, because backends keep block tables for each. A step of training uses one mask for all layers.
@lru_cache(maxsize=4)
def on_gpu(content: bytes, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns ranges on a GPU, copied once for all calls with the same values. Nothing writes to the tensor."""
    with torch.inference_mode(False):  # autograd could not save an inference tensor later
        return declare(torch.from_numpy(np.frombuffer(content, np.int32).reshape(shape).copy()).to(device))  # type: ignore[no-any-return]


# By the values of the ranges, because an array may change between two calls. Small, because a plan holds tensors on the
# device: the places of tiles and their offsets.
@from_records(maxsize=64)
def _plan_in_parts(arguments: Arguments, content: bytes, chosen: str | None) -> Plan | None:
    """Returns a call's plan in parts; None if a backend runs the call as a whole."""
    # Nineteen modules, which few programs need.
    from attn_core.context_parallel import one_device
    from attn_core.context_parallel.on_torch import one_device as parts

    entries, *_ = arguments
    spec, target, names = plan.request(*arguments)
    key_ranges = np.frombuffer(content, np.int32).reshape(entries.key_ranges[0])
    check_values(key_ranges, spec.q_len)
    found = one_device.choose(spec, key_ranges, target, requested_names(names))
    if chosen is not None and found is None:
        again = one_device.tiled(spec, key_ranges, target, (chosen,))
        found = again if isinstance(again, one_device.Tiled) else None
    if found is None:
        return None
    device = entries.q[2]
    planned = parts.build(spec, found, device, partial(on_device, device=device))
    functions = partial(_forward, parts, planned), partial(_backward, parts, planned)
    return Plan(spec, planned.backend, *functions, one_row=False, in_parts=True)


def _forward(
    module: ModuleType, planned: parts.PartsPlan, spec: AttentionSpec, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = module.forward(planned, *inputs[:3], inputs.sinks)
    return results


def _backward(
    module: ModuleType,
    planned: parts.PartsPlan,
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    dq, dk, dv, dsinks = module.backward(planned, *inputs[:3], inputs.sinks, out, lse, dout, dlse)
    return Gradients(dq, dk, dv, None, dsinks)
