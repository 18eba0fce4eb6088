"""Checks the options of a paged call for both frontends."""

from __future__ import annotations

from typing import Any

from attn_core.call.options import Options, check_options
from attn_core.call.seq_info import is_host_int, must_be_static
from attn_core.errors import SpecError, shown

PAGED = ("causal", "window", "softcap", "scale", "deterministic", "return_lse", "max_len_q", "invariant")
"""The options of a paged call."""


def check_paged_options(
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    deterministic: Any,
    return_lse: Any,
    max_len_q: Any,
    invariant: Any = None,
) -> Options:
    """Returns the options of a paged call after checking each. Raises SpecError naming the wrong one."""
    if max_len_q is not None and (not is_host_int(max_len_q) or max_len_q < 0):
        expected = f"expected a host int, at least the most new tokens of a sequence{must_be_static(max_len_q)}"
        raise SpecError(f"max_len_q={shown(max_len_q)}: {expected}")
    options = Options(causal, "bottom_right", window, softcap, scale, max_len_q, None, 0.0, deterministic, return_lse)
    return check_options(options._replace(invariant=invariant))
