"""Whether Triton is installed, and a way to launch its kernels without finding their compiled code on every call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    from importlib.util import find_spec

    return find_spec("triton") is not None


def relaunch(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], **constants: Any) -> Any:
    """Launches a Triton kernel, and returns a function that launches the same compiled code on other arguments.

    Most of a usual launch is Python that derives from the arguments which compiled code fits them. The function skips
    that. So it is right on the same current device, for arguments of the same types: integers must be equal, and
    addresses equally aligned to 16 bytes, except for arguments in the kernel's ``do_not_specialize``.

    Args:
        arguments: all arguments of the kernel that are not ``tl.constexpr``, in order; the others must come last.
        constants: the others, and options such as ``num_warps``.
    """
    compiled = kernel[grid](*arguments, **constants)
    if compiled is None or not _launches_directly():  # None: Triton's interpreter
        usual: Callable[..., Any] = kernel[grid]
        return lambda *others: usual(*others, **constants)
    rest = tuple(constants[parameter.name] for parameter in kernel.params if parameter.is_constexpr)
    launch = compiled[grid]
    return lambda *others: launch(*others, *rest)


MOST_LAUNCHES = 4096
"""The most entries in ``_launches``. Beyond it all are dropped, and later launches are usual ones once more."""
_launches: dict[Hashable, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
"""By the key of a launch, a function from ``relaunch``, and the numbers that follow the tensors."""

Description = tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]
"""A launch: its grid, the numbers that follow the tensors, and the kernel's constants."""


def launch(
    kernel: Any,
    key: Hashable,
    tensors: tuple[Any, ...],
    describe: Callable[[], Description],
    unaligned: Sequence[Any],
) -> None:
    """Launches a kernel on the current device; a launch with a known key is a direct one.

    Args:
        key: everything that ``describe`` depends on, the kernel, and the current device.
        tensors: the kernel's first arguments, whose types the key determines.
        describe: called for a new key.
        unaligned: the tensors whose addresses may be no multiple of 16 bytes; those that torch has just allocated are.
    """
    aligned = not any([tensor.data_ptr() % 16 for tensor in unaligned])
    known = _launches.get(key) if aligned else None
    if known is not None:
        known[0](*tensors, *known[1])
        return
    grid, numbers, constants = describe()
    if not aligned:  # Triton compiles other code for such addresses, and the key does not tell which
        kernel[grid](*tensors, *numbers, **constants)
        return
    if len(_launches) >= MOST_LAUNCHES:
        _launches.clear()
    _launches[key] = relaunch(kernel, grid, (*tensors, *numbers), **constants), numbers


@cache
def _launches_directly() -> bool:
    """Returns whether a compiled kernel takes all arguments, constants among them, as triton 3.6 does."""
    import triton

    return str(triton.__version__).startswith("3.6.")
