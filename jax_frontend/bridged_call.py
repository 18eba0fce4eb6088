"""A call of one half of a torch backend, as the bridge's two lanes know it."""

from __future__ import annotations

from typing import NamedTuple

from attn_core.spec import AttentionSpec


class BridgedCall(NamedTuple):
    """What is known of a call before it runs; the operands come with every run."""

    direction: str
    backend: str
    device: str
    spec: AttentionSpec
    operands: tuple[str, ...]
    """Which fields of ``Inputs`` the leading operands are; "qkv" for q, k and v in one array, "kv" for k and v."""
    extras: tuple[str, ...] = ()
    """What the operands after those are: out, lse, dout, dlse in a backward."""
    with_lse: bool = True
    """Whether a forward has the log-sum-exp as its second result."""

    @property
    def gradients(self) -> tuple[str, ...]:
        """The fields of ``Gradients`` that a backward gives; of q, k and v in one array, those are one result."""
        spec = self.spec
        return ("dq", "dk", "dv", *(["dbias"] if spec.bias_gradient else []), *(["dsinks"] if spec.sinks else []))


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
