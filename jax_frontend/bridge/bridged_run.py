"""What the bridge runs: a call of a backend on torch tensors that are XLA's buffers, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax

from attn_core import backends
from attn_core.call.tensors import Gradients
from attn_core.context_parallel.on_torch import step
from attn_core.context_parallel.on_torch.head_start import head_start
from attn_core.errors import BridgeError
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep, gatherer

Run = Callable[[tuple[Any, ...]], None]
"""Runs a call on XLA's values: operands, then the buffers of the results, then attributes."""


def run_of(call: BridgedCall | BridgedStep) -> Run:
    """What runs a call; one beside an exchange behind a head start for that."""
    if isinstance(call, BridgedStep):
        return _OfParts(call).run
    run = _forward(call) if call.direction == "forward" else _backward(call)
    return _behind_a_head_start(run) if call.beside else run


def _behind_a_head_start(run_call: Run) -> Run:
    def run(values: tuple[Any, ...]) -> None:
        head_start(values[0].device)
        run_call(values)

    return run


def _forward(call: BridgedCall) -> Run:
    module: Any = backends.load(call.backend, backends.kind_of(call.device))
    spec, count, gather = call.spec, len(call.operands), gatherer(call.operands)
    kernel, with_lse, writes = module.forward, call.with_lse, backends.writes_into(module)

    def forward(values: tuple[Any, ...]) -> None:
        place, lse_place = values[count], values[count + 1] if with_lse else None
        inputs = gather(values)
        out, lse = kernel(spec, inputs, (place, lse_place)) if writes else kernel(spec, inputs)
        if out is not place:
            place.copy_(out)
        if with_lse and lse is not lse_place:
            values[count + 1].copy_(lse)

    return forward


def _backward(call: BridgedCall) -> Run:
    module: Any = backends.load(call.backend, backends.kind_of(call.device))
    count, results = len(call.operands), len(call.operands) + len(call.extras)
    gather, writes, as_one = gatherer(call.operands), backends.writes_into(module), call.operands[0] == "qkv"
    names = call.gradients

    def backward(values: tuple[Any, ...]) -> None:
        saved = dict(zip(call.extras, values[count:results], strict=True))
        first, *rest = values[results : results + len(names) - 2 * as_one]
        qkv = first.unbind(-3) if as_one else (first, *rest[:2])
        places = Gradients(**dict(zip(names, (*qkv, *(rest if as_one else rest[2:])), strict=True)))
        arguments = (call.spec, gather(values), saved["out"], saved["lse"], saved["dout"], saved.get("dlse"))
        found = module.backward(*arguments, places) if writes else module.backward(*arguments)
        for place, gradient in zip(places, found, strict=True):
            if place is not None and gradient is not place:
                place.copy_(gradient)

    return backward


class _OfParts:
    """What runs a step of context parallelism: on each device what the part that it is does."""

    def __init__(self, call: BridgedStep) -> None:
        self.step, self._beside = call.step, call.beside
        self._keys = 1 + call.step.arrays
        self._given = self._keys + 2 * call.step.after
        self._results = self._given + (not call.parts)
        self._parts = of_devices(call.parts, jax.local_devices(backend="gpu")) if call.parts else None

    def run(self, values: tuple[Any, ...]) -> None:
        """See ``Run``."""
        q = values[0]
        runs = _prepared(self, self._part(values), q.device)
        if self._beside and runs.tiles:
            head_start(q.device)
        out, lse, *scratch = values[self._results : self._results + 4]
        step.attend(runs, q, values[1 : self._keys], (out, lse), scratch)

    def _part(self, values: tuple[Any, ...]) -> int:
        if self._parts is None:
            return int(values[self._given])
        device = values[0].get_device()
        if device not in self._parts:
            raise BridgeError(
                f"GPU {device}: expected one of {sorted(self._parts)}, those of the mesh that a program with context "
                "parallelism was compiled for; compile it for the devices that it runs on"
            )
        return self._parts[device]


@lru_cache(maxsize=64)
def _prepared(of: _OfParts, part: int, device: Any) -> step.Runs:
    return step.runs_of(of.step, part, device)


def of_devices(parts: tuple[tuple[int, int], ...], here: Sequence[Any]) -> dict[int, int]:
    """Which part each of this process's devices belongs to, by the number that torch knows it by."""
    ids = dict(parts)
    return {device.local_hardware_id: ids[device.id] for device in here if device.id in ids}
