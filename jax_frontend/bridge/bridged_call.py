"""BridgedCall: one forward or backward of a backend, as both lanes of the bridge describe it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.call.functions import DAUX
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs

if TYPE_CHECKING:  # few programs have ranks
    from attn_core.context_parallel.on_torch.step import StepCall

_RESULTS = {"forward": ("out", "lse"), "jvp": ("dout", "dlse"), "row_maximum": ("row_maximum",)}
"""The results of all directions but "backward"; a forward without ``with_lse`` has the first alone."""


class BridgedCall(NamedTuple):
    """The static description of a call; the operands come with every run."""

    direction: str
    """"forward", "backward", "jvp", which returns the tangents of a forward's results, or "row_maximum"."""
    backend: str
    device: str
    spec: AttentionSpec
    operands: tuple[str, ...]
    """The fields of ``Inputs`` that the leading operands are; "qkv" for q, k and v in one array."""
    extras: tuple[str, ...] = ()
    """The names of the further operands: a backward's out, lse, dout and dlse, or the tangents of a jvp."""
    with_lse: bool = True
    """Whether a forward has the log-sum-exp as its second result; a jvp always has its tangent."""
    with_maximum: bool = False
    """Whether a forward has the row maxima as its last result, which ``Backend.forward_with_maximum`` computes."""
    overlaps_exchange: bool = False
    """Whether the kernel overlaps an exchange that was just started. It then waits a few us, so the exchange begins."""
    tables_checked: bool = False
    """Whether a paged call's tables were checked already. Traced tables have no values before the call runs."""
    checked: bool = False
    """Whether the buffers of results start as NaN, so that a value which the kernel does not write shows."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands."""
        return (*self.operands, *self.extras)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results; "dqkv" for the gradients of q, k and v in one array."""
        if self.direction == "backward":
            return ("dqkv", *self.gradients[3:]) if self.operands[0] == "qkv" else self.gradients
        return _RESULTS[self.direction][: 1 + self.with_lse] + ("row_maximum",) * self.with_maximum

    @property
    def gradients(self) -> tuple[str, ...]:
        """The fields of ``Gradients`` that a backward returns. With q, k and v in one array, dq, dk, dv are one."""
        spec = self.spec
        more = (*(["dbias"] if spec.bias_gradient else []), *(["dsinks"] if spec.sinks else []))
        return ("dq", "dk", "dv", *more, *(DAUX[number] for number in spec.aux_gradients))


class BridgedStep(NamedTuple):
    """A step of context parallelism; each part of the mesh has its own tiles in it.

    Operands: q, the keys, then out and lse so far, if there are any. Results: out and lse, in the buffers of out and
    lse so far, and scratch for both.
    """

    step: StepCall
    device: str
    overlaps_exchange: bool
    """See ``BridgedCall.overlaps_exchange``."""
    parts: tuple[tuple[int, int], ...] = ()
    """(device id, part) of every device of the mesh; empty if the last operand is the part. On CPUs it is an operand,
    because the host can read its value there. The value is not read if there is one part."""
    direction: str = "step"

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the whole call, as on one device."""
        return self.step.call.spec


def calls_of(name: str, spec: AttentionSpec, device: str) -> list[BridgedCall]:
    """Returns the calls of a tile's spec, which has no mask, bias, slopes, sinks or dropout."""
    operands = ("q", "k", "v", *(("cu_seqlens_q", "cu_seqlens_k") if spec.packed else ()))
    calls = [BridgedCall("forward", name, device, spec, operands)]
    if spec.needs_backward:
        saved = ("out", "lse", "dout")
        calls += [
            BridgedCall("backward", name, device, spec, operands, (*saved, *more))
            for more in ((), *((("dlse",),) if spec.return_lse else ()))
        ]
    return calls


def inputs_builder(operands: tuple[str, ...]) -> Callable[[tuple[Any, ...]], Any]:
    """Returns a function that builds Inputs, or PagedInputs, from a call's values."""
    # Four functions instead of one with conditions: this runs in every callback, and positions are known here.
    count = len(operands)
    if "block_table" in operands:

        def gather(values: tuple[Any, ...]) -> Inputs | PagedInputs:
            return PagedInputs(**dict(zip(operands, values, strict=False)))
    elif operands[0] == "qkv":  # [..., tokens, 3, heads, head_dim] -> three views

        def gather(values: tuple[Any, ...]) -> Inputs | PagedInputs:
            return Inputs(*values[0].unbind(-3), **dict(zip(operands[1:], values[1:], strict=False)))
    elif operands != Inputs._fields[:count]:

        def gather(values: tuple[Any, ...]) -> Inputs | PagedInputs:
            return Inputs(**dict(zip(operands, values, strict=False)))
    else:

        def gather(values: tuple[Any, ...]) -> Inputs | PagedInputs:
            return Inputs(*values[:count])

    return gather
