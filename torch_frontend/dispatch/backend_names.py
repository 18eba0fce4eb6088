"""The backends that may run an op, as one string, because torch.jit accepts no list of names."""

from __future__ import annotations

from attn_core.selection import override
from torch_frontend.dispatch import sdpa_flags

FROM_CONTEXT = "use_backend"
"""As the first backend name: the names that ``use_backend`` requests when the op runs replace the rest."""

_SWITCHES = "sdpa_kernel"
"""A first line that begins so has torch's flags in the rest: those of the trace, because a block inside of it has no
effect any more when the op runs."""


def join_names(names: tuple[str, ...] | None, switches: sdpa_flags.Switches | None = None) -> str | None:
    """Joins backend names, and torch's flags if one is off, into the string that an op accepts."""
    flags = () if switches is None else (_SWITCHES + sdpa_flags.as_text(switches),)
    return "\n".join((*flags, *(names or ()))) or None


def requested_now(joined: str | None) -> tuple[tuple[str, ...] | None, sdpa_flags.Switches | None]:
    """Returns the backends that are requested when an op runs, and torch's flags then and in the trace together."""
    names, flags = tuple(joined.split("\n")) if joined else (), ""
    if names and names[0].startswith(_SWITCHES):
        flags, names = names[0].removeprefix(_SWITCHES), names[1:]
    requested = names or override.requested()
    # A drop-in's preference gives way to use_backend, as in an eager call.
    if requested and requested[0] == FROM_CONTEXT:
        requested = override.requested() or requested[1:]
    return requested, sdpa_flags.both(flags, sdpa_flags.now())
