"""torch.nn.attention.sdpa_kernel, and the switches torch.backends.cuda.enable_flash_sdp and the like.

They are flags of the process. Reading all five takes 60 ns, so every call reads them. If one is off, the call takes the
general path, and its target lacks the backends that torch's words exclude.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.selection import Target

is_flash_on = torch._C._get_flash_sdp_enabled
is_efficient_on = torch._C._get_mem_efficient_sdp_enabled
is_cudnn_on = torch._C._get_cudnn_sdp_enabled
is_math_on = torch._C._get_math_sdp_enabled
are_others_on = torch._C._get_overrideable_sdp_enabled
"""``SDPBackend.OVERRIDEABLE``, for kernels of other devices. Only ``sdpa_kernel`` switches it off, if its list lacks
it; so this flag tells a restriction to some kernels from a kernel that is switched off."""

_order = torch._C._get_sdp_priority_order
_USUAL_ORDER = tuple(_order())


class Switches(NamedTuple):
    """The flags as they are during a call, at least one of them False.

    Attributes:
        order: the numbers of torch's kernels, the preferred one first, if ``sdpa_kernel(..., set_priority=True)``
            changed them; else empty.
    """

    flash: bool
    mem_efficient: bool
    cudnn: bool
    math: bool
    others: bool
    order: tuple[int, ...] = ()


_NUMBERS = {
    torch._C._SDPBackend.FLASH_ATTENTION.value: "flash",
    torch._C._SDPBackend.EFFICIENT_ATTENTION.value: "mem_efficient",
    torch._C._SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    torch._C._SDPBackend.MATH.value: "math",
}


def now() -> Switches | None:
    """Returns torch's flags, or None if all are on."""
    switches = Switches(is_flash_on(), is_efficient_on(), is_cudnn_on(), is_math_on(), are_others_on())
    if switches.flash and switches.mem_efficient and switches.cudnn and switches.math and switches.others:
        return None
    if torch.compiler.is_compiling():  # Dynamo cannot trace the order
        return switches
    order = tuple(_order())
    return switches if order == _USUAL_ORDER else switches._replace(order=order)


def limited(target: Target, switches: Switches | None) -> Target:
    """Returns a target without the backends that the flags exclude."""
    return target if switches is None else _limited(target, switches)


@from_records(maxsize=64)
def _limited(target: Target, switches: Switches) -> Target:
    excluded = []
    # A flag switches one kernel off. A block ``sdpa_kernel(...)`` switches off all that it does not list, ours, too.
    for name in backends.names():
        backend = backends.load(name, target.kind)
        flag = backend.torch_flag
        if flag is None and not switches.others and backend.framework == "torch":
            excluded.append((name, "sdpa_kernel(...) around the call switches it off"))
        elif flag is not None and not getattr(switches, flag):
            word = "sdpa_kernel(...) around the call" if not switches.others else f"enable_{flag}_sdp(False)"
            excluded.append((name, f"{word} switches it off"))
    return replace(target, unavailable=(*target.unavailable, *excluded))


def preferred(switches: Switches | None) -> tuple[str, ...] | None:
    """Returns the allowed backends in the order of ``sdpa_kernel(..., set_priority=True)``; None without an order."""
    if switches is None or not switches.order:
        return None
    flags = [_NUMBERS[number] for number in switches.order if number in _NUMBERS]
    return tuple(name for flag in flags if getattr(switches, flag) for name in _behind(flag)) or None


@from_records()
def _behind(flag: str) -> tuple[str, ...]:
    """Returns the backends that are the kernel of a flag, or have its arithmetic."""
    return tuple(name for name in backends.names() if backends.load(name).torch_flag == flag)


def as_text(switches: Switches | None) -> str:
    """Returns the flags as an argument of an op: a digit for each, or nothing if all are on."""
    return "" if switches is None else "".join(["1" if each else "0" for each in switches[:5]])


def both(text: str, switches: Switches | None) -> Switches | None:
    """Returns flags that are on only if they are on in the text and in the switches."""
    if not text:
        return switches
    flash, efficient, cudnn, math, others = [digit == "1" for digit in text]
    if switches is None:
        return Switches(flash, efficient, cudnn, math, others)
    return Switches(
        flash and switches.flash,
        efficient and switches.mem_efficient,
        cudnn and switches.cudnn,
        math and switches.math,
        others and switches.others,
        switches.order,
    )
