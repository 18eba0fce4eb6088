"""From tensors to a backend's forward and backward: the plan of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attn_core import backends
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.options import Options, checked, requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.errors import SpecError
from attn_core.selection import Selection, Target, explain, select
from torch_frontend.dispatch import plain

Tensor = torch.Tensor


class Plan(NamedTuple):
    """A call that has been checked and given to a backend."""

    spec: AttentionSpec
    backend: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Gradients]
    one_row: bool
    """Whether packed tensors came as ``[1, tokens, ...]`` and go back so."""
    shortcut: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    """The backend's own way for q, k, v alone, gradients included, if it has one."""
    writes_into: bool = False
    """Whether forward and backward take ``into``."""


Metadata = tuple[torch.Size, torch.dtype, torch.device]


@lru_cache(maxsize=4096, typed=True)  # True and 1.0 are not 1
def dense_plan(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    needs_backward: bool,
    requested: str | tuple[str, ...] | None,
    *options: Any,
) -> Plan:
    """The plan of a call on q, k and v alone: the path whose overhead counts. ``options`` are those of PLAIN_CALL.

    A window among them is plain (``is_plain_window``): the key knows the types of options, not those inside a pair.
    """
    if q_device.type == "meta" or plain.are_jit_traces_active() is not None:
        # The careful path takes these. No plan is found for a trace: the sizes of its shapes are tensors.
        raise TypeError("no call of a kernel")
    qkv = ((q_shape, q_dtype, q_device), (k_shape, k_dtype, k_device), (v_shape, v_dtype, v_device))
    # Checked here, where the types are part of the key: for ``plan`` causal=1 and causal=True are one question.
    asked = checked(Options(**dict(zip(PLAIN_CALL, options, strict=True))))
    return plan((*qkv, *(None,) * 6), asked, needs_backward, False, requested)


PLAIN_CALL = ("causal", "alignment", "window", "softcap", "scale", "dropout", "deterministic", "return_lse")
"""The options of a call without masks or packing."""


@lru_cache(maxsize=4096)
def plan(
    metadata: tuple[Metadata | None, ...],
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
) -> Plan:
    """Checks a call and chooses its backend; the same question is answered once.

    Args:
        metadata: (shape, dtype, device) for each field of ``arguments.Arrays``, None where there is no tensor.
        requested: ``backend=`` of the call, or what ``use_backend`` asks for.
    """
    selection = select(*question(metadata, options, needs_backward, bias_gradient, requested))
    module, spec = backends.load(selection.backend or "", selection.target.kind), selection.spec
    if module is None:
        raise AssertionError(f"{selection.backend} was selected without a module")
    one_row = spec.packed and len(metadata[0][0]) == 4 if metadata[0] else False
    name = selection.backend or ""
    if spec.empty:
        return Plan(spec, name, empty_forward, _empty_backward, one_row)
    shortcut, device = backends.shortcut(module, spec), metadata[0][2] if metadata[0] else torch.device("cpu")
    forward, backward = (on_device(function, device) for function in (module.forward, module.backward))
    return Plan(spec, name, forward, backward, one_row, on_device(shortcut, device), backends.writes_into(module))


def on_device(function: Any, device: torch.device) -> Any:
    """The function, run with its tensors' GPU as the current one: Triton's kernels start on whichever is current.

    Where there is one GPU, or none, the function itself.
    """
    if function is None or device.type != "cuda" or torch.cuda.device_count() < 2:
        return function

    def run(*arguments: Any, **keywords: Any) -> Any:
        with torch.cuda.device(device):
            return function(*arguments, **keywords)

    return run


def explanation(*arguments: Any) -> Selection:
    """The Selection behind ``plan``, whether or not a backend can run the call."""
    return explain(*question(*arguments))


def question(
    metadata: tuple[Metadata | None, ...],
    options: Options,
    needs_backward: bool,
    bias_gradient: bool,
    requested: str | tuple[str, ...] | None,
) -> tuple[AttentionSpec, Target, str | tuple[str, ...] | None]:
    """What ``select`` is asked: the spec, the target and the requested backends."""
    arrays = Arrays(*(entry and facts(*entry) for entry in metadata))  # type: ignore[arg-type]
    spec = build_spec(arrays, options, needs_backward=needs_backward, bias_gradient=bias_gradient)
    device = metadata[0][2] if metadata[0] else torch.device("cpu")
    return spec, Target.here("torch", device_name(device)), requested_names(requested)


def check(inputs: Inputs, options: Options) -> None:
    """Checks a call that is to be one op, if its sizes are numbers; the op checks the rest when it runs.

    Only the op checks the longest documents, because it completes the offsets first.
    """
    if torch.compiler.is_compiling():
        return
    entries = metadata(inputs)
    if all(type(size) is int for entry in entries if entry for size in entry[0]):
        arrays = Arrays(*(entry and facts(*entry) for entry in entries))  # type: ignore[arg-type]
        if arrays.cu_seqlens_q is not None and len(arrays.q.shape) > 2 and len(arrays.k.shape) > 2:
            options = options._replace(max_len_q=arrays.q.shape[-3], max_len_k=arrays.k.shape[-3])
        build_spec(arrays, options)


def metadata(inputs: Inputs) -> tuple[Metadata | None, ...]:
    """(shape, dtype, device) of every tensor that ``arguments.Arrays`` names."""
    return tuple(None if t is None else (t.shape, t.dtype, t.device) for t in inputs[: len(Arrays._fields)])


def facts(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> ArrayFacts:
    if not isinstance(dtype, torch.dtype):  # numpy's arrays have a shape, a dtype and a device "cpu", too
        raise TypeError(f"expected a torch.dtype, got {dtype!r}")
    return ArrayFacts(tuple(shape), str(dtype).removeprefix("torch."), str(device))


def device_name(device: torch.device) -> str:
    """``"cpu"``, ``"sm90"``, or the device type where it is neither a CPU nor an NVIDIA GPU."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def run_forward(made: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) of a plan; out has the rank of q."""
    if made.one_row:  # [1, tokens, heads, dim] -> [tokens, heads, dim]
        inputs = inputs._replace(q=inputs.q[0], k=inputs.k[0], v=inputs.v[0])
    out, lse = made.forward(made.spec, _four_dimensional(inputs))
    return (out[None] if made.one_row else out), lse


def run_backward(
    made: Plan,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    into: Gradients | None = None,
) -> Gradients:
    """The gradients of a plan, in the shapes of its inputs; dq, dk, dv are those of ``into`` where they fit there."""
    if dout is None:
        dout = torch.zeros_like(out)
    if made.one_row:
        inputs = inputs._replace(q=inputs.q[0], k=inputs.k[0], v=inputs.v[0])
        out, dout = out[0], dout[0]
        into = into and into._replace(dq=into.dq[0], dk=into.dk[0], dv=into.dv[0])
    buffers = {"into": into} if into is not None and made.writes_into else {}
    found = made.backward(made.spec, _four_dimensional(inputs), out, lse, dout, dlse, **buffers)
    if made.one_row:
        found = found._replace(dq=found.dq[None], dk=found.dk[None], dv=found.dv[None])
    if found.dbias is not None:
        found = found._replace(dbias=found.dbias.reshape(inputs.bias.shape))
    return found


def _four_dimensional(inputs: Inputs) -> Inputs:
    """Masks and biases with leading axes of 1 put in front, as the backends expect them."""
    if inputs.mask is not None and inputs.mask.dim() < 4:
        inputs = inputs._replace(mask=inputs.mask[(None,) * (4 - inputs.mask.dim())])
    if inputs.bias is not None and inputs.bias.dim() < 4:
        inputs = inputs._replace(bias=inputs.bias[(None,) * (4 - inputs.bias.dim())])
    return inputs


def empty_forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    return inputs.q.new_zeros(spec.out_shape), inputs.q.new_full(spec.lse_shape, -torch.inf, dtype=lse_dtype)


def _empty_backward(spec: AttentionSpec, inputs: Inputs, *_: Any) -> Gradients:
    dbias = torch.zeros_like(inputs.bias) if spec.bias_gradient else None
    dsinks = torch.zeros_like(inputs.sinks) if spec.sinks else None
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in inputs[:3])
    return Gradients(dq, dk, dv, dbias, dsinks)


def gradients_in_order(found: Gradients, count: int) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the first ``count`` fields of ``Inputs``: q, k, v, mask, bias, alibi_slopes, ..."""
    return (*found[:3], None, found.dbias, None, found.dsinks, *(None,) * count)[:count]


def check_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless ``value`` is a torch tensor, SpecError unless it is plain data."""
    if isinstance(value, Tensor):
        plain.check(name, value)
        return
    kind = type(value)
    remedy = (
        "; use jax_frontend.attention for JAX arrays" if kind.__module__.startswith("jax") else "; use torch.as_tensor"
    )
    raise TypeError(f"{name}: expected a torch.Tensor, got {kind.__module__}.{kind.__qualname__}{remedy}")


def check_gradient_free(name: str, value: Tensor | None) -> None:
    """Raises SpecError for a tensor whose gradient nobody computes."""
    if value is not None and value.requires_grad and torch.is_grad_enabled():
        raise SpecError(f"{name}: expected requires_grad=False, its gradient is not defined here; pass {name}.detach()")


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two lengths, without a guard on symbols; Dynamo turns ``min`` of symbols into that itself."""
    return (
        torch.sym_min(one, other)
        if isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt)
        else min(one, other)
    )
