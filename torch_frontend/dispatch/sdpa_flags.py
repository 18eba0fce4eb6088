"""torch.nn.attention.sdpa_kernel, and the switches torch.backends.cuda.enable_flash_sdp and the like.

They belong to ``F.scaled_dot_product_attention`` and do not restrict ``attention``, which would have to read four flags
on every call. A new plan reads them, and says so if the chosen kernel is one that they switch off.
"""

from __future__ import annotations

import warnings

import torch

_SWITCHES = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, ("sdpa_flash", "flash2", "flash3", "flash4", "xformers_flash")),
    "mem_efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        ("sdpa_efficient", "xformers", "xformers_cutlass"),
    ),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, ("sdpa_cudnn",)),
    "math": (torch.backends.cuda.math_sdp_enabled, ("math",)),
}
"""Each switch: the function that reads it, and our backends that are kernels of its kind; the first is torch's own."""


def warn_if_off(backend: str) -> None:
    """Warns if torch's switches exclude the kind of kernel that a call uses."""
    kind = next((kind for kind, (_, names) in _SWITCHES.items() if backend in names), None)
    if kind is None or _SWITCHES[kind][0]():
        return
    names = ", ".join(repr(each[0]) for is_on, each in _SWITCHES.values() if is_on())
    warnings.warn(
        f"torch's switch for {kind} kernels is off (torch.nn.attention.sdpa_kernel or torch.backends.cuda), but it "
        f"does not restrict attention(), which uses {backend}; write use_backend({names}) for that",
        stacklevel=2,
    )
