"""A call of one half of a torch backend, as the bridge's two lanes know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs
from attn_core.context_parallel.on_torch.step import StepCall


class BridgedCall(NamedTuple):
    """What is known of a call before it runs; the operands come with every run."""

    direction: str
    backend: str
    device: str
    spec: AttentionSpec
    operands: tuple[str, ...]
    """Which fields of ``Inputs`` the leading operands are; "qkv" for q, k and v in one array."""
    extras: tuple[str, ...] = ()
    """What the operands after those are: out, lse, dout, dlse in a backward."""
    with_lse: bool = True
    """Whether a forward has the log-sum-exp as its second result."""
    beside: bool = False
    """Whether the kernel runs beside an exchange that was started just before, and gives it a head start."""

    @property
    def gradients(self) -> tuple[str, ...]:
        """The fields of ``Gradients`` that a backward gives; of q, k and v in one array, those are one result."""
        spec = self.spec
        return ("dq", "dk", "dv", *(["dbias"] if spec.bias_gradient else []), *(["dsinks"] if spec.sinks else []))


class BridgedStep(NamedTuple):
    """A step of context parallelism, whose tiles each part has of its own. Operands: q, the keys, any results so far.

    Its results are out and lse, which the results so far become, and scratch for both.
    """

    step: StepCall
    device: str
    beside: bool
    """See ``BridgedCall``."""
    parts: tuple[tuple[int, int], ...] = ()
    """(the id of a device, which part it belongs to) of every device of the mesh; empty where the last operand is the
    part, as on CPUs, whose memory is the host's."""
    direction: str = "step"

    @property
    def spec(self) -> AttentionSpec:
        """The whole call, as on one device."""
        return self.step.call.spec


def calls_of(name: str, spec: AttentionSpec, device: str) -> list[BridgedCall]:
    """The calls of a spec without mask, bias, slopes, sinks and dropout, which no compiled lane takes."""
    operands = ("q", "k", "v", *(("cu_seqlens_q", "cu_seqlens_k") if spec.packed else ()))
    calls = [BridgedCall("forward", name, device, spec, operands)]
    if spec.needs_backward:
        saved = ("out", "lse", "dout")
        calls += [
            BridgedCall("backward", name, device, spec, operands, (*saved, *more))
            for more in ((), *((("dlse",),) if spec.return_lse else ()))
        ]
    return calls


def gatherer(operands: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """What makes Inputs, or PagedInputs, of a call's values."""
    count = len(operands)
    if "block_table" in operands:

        def gather(values: tuple[Any, ...]) -> Any:
            return PagedInputs(**dict(zip(operands, values, strict=False)))
    elif operands[0] == "qkv":  # [..., tokens, 3, heads, head_dim] -> three views

        def gather(values: tuple[Any, ...]) -> Any:
            return Inputs(*values[0].unbind(-3), **dict(zip(operands[1:], values[1:], strict=False)))
    elif operands != Inputs._fields[:count]:

        def gather(values: tuple[Any, ...]) -> Any:
            return Inputs(**dict(zip(operands, values, strict=False)))
    else:

        def gather(values: tuple[Any, ...]) -> Any:
            return Inputs(*values[:count])

    return gather
