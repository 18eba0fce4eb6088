"""Whether Triton is installed, and a way to launch its kernels without finding their compiled code on every call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from attn_core.call.masks import band
from attn_core.call.observe import compiled as count_compiled
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from triton.compiler import CompiledKernel
    from triton.runtime import KernelInterface


Launches = TypeVar("Launches")


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    from importlib.util import find_spec

    return find_spec("triton") is not None


@cache
def multiprocessors(device: int) -> int:
    """Returns the number of multiprocessors of a GPU; 1 for the device of a CPU tensor, which is -1.

    Tests run the kernels on CPU tensors, in Triton's interpreter.
    """
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device >= 0 else 1


def relaunch(
    kernel: KernelInterface, grid: tuple[int, int, int], arguments: tuple[object, ...], **constants: object
) -> Callable[..., object]:
    """Launches a Triton kernel, and returns a function that launches the same compiled code on other arguments.

    Most of a usual launch is Python that derives from the arguments which compiled code fits them. The function skips
    that. So it is right on the same current device, for arguments of the same types: integers must be equal, and
    addresses equally aligned to 16 bytes, except for arguments in the kernel's ``do_not_specialize``.

    Args:
        arguments: all arguments of the kernel that are not ``tl.constexpr``, in order; the others must come last.
        constants: the others, and options such as ``num_warps``.
    """
    direct = _launch_compiled(kernel, grid, arguments, (), constants)
    if direct is not None:
        return direct
    usual: Callable[..., Any] = kernel[grid]
    return lambda *others: usual(*others, **constants)


MOST_LAUNCHES = 4096
"""The most entries in ``_launches``. Beyond it all are dropped, and later launches are usual ones once more."""
Numbers = dict[str, float | None]
"""A kernel's numbers and flags by name."""
Direct = Callable[..., None]
"""A function of the addresses of a launch's tensors."""
Description = tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]
"""A launch: its grid, the numbers that follow the tensors, and the kernel's constants."""
_compiled: dict[int, Any] = {}
"""The compiled code of all kernels by its ``id``; Triton keeps it as long. The first launch of each compiled it."""
_launches: dict[Hashable, tuple[Direct | None, Description]] = {}
"""By the key of a launch, its direct launch if there is one, and its description."""


def launch(
    kernel: KernelInterface, key: Hashable, tensors: tuple[Tensor, ...], describe: Callable[[], Description]
) -> Direct | None:
    """Launches a kernel on the current device; a launch with a known key is a direct one.

    Args:
        key: everything that ``describe`` depends on, and the kernel.
        tensors: the kernel's first arguments, whose types the key determines. Tests run kernels on CPU tensors, in
            Triton's interpreter.
        describe: called for a new key.

    Returns:
        A function that launches the kernel for the same key and device on tensors at other addresses, all of them
        multiples of 16; None if Triton has to search for compiled code on every launch.
    """
    import torch

    key = key, torch.cuda.current_device() if tensors[0].is_cuda else -1
    addresses = [tensor.data_ptr() for tensor in tensors]
    aligned = not any([address % 16 for address in addresses])
    direct, description = _launches.get(key) or (None, None)
    if aligned and direct is not None:
        direct(*addresses)
        return direct
    grid, numbers, constants = description or describe()
    if not aligned:  # Triton compiles other code for such addresses, and the key does not tell which
        kernel[grid](*tensors, *numbers, **constants)
        return None
    direct = _launch_compiled(kernel, grid, tensors, numbers, constants)
    if len(_launches) >= MOST_LAUNCHES:
        _launches.clear()
    _launches[key] = direct, (grid, numbers, constants)
    return direct


MOST_LAYOUTS = 64
"""The most strides whose launches ``remember`` keeps for one metadata of tensors."""


def remember(seen: dict[Hashable, Launches], strides: Hashable, launches: Launches | None) -> None:
    """Keeps the direct launches of tensors for later ones with the same strides; None: there are none."""
    if launches is None:
        return
    if len(seen) >= MOST_LAYOUTS:
        seen.clear()
    seen[strides] = launches


def _launch_compiled(
    kernel: KernelInterface,
    grid: tuple[int, int, int],
    arguments: tuple[object, ...],
    fixed: tuple[object, ...],
    constants: Mapping[str, object],
) -> Direct | None:
    """Launches a kernel, and returns a function that launches the same compiled code; None if Triton allows none.

    Args:
        arguments: those that later launches replace. They may replace a tensor by its address.
        fixed: the arguments behind them, which later launches repeat.
    """
    began = perf_counter()
    compiled = kernel[grid](*arguments, *fixed, **constants)
    if compiled is not None and id(compiled) not in _compiled:
        _compiled[id(compiled)] = compiled
        count_compiled("triton", getattr(kernel, "__name__", "kernel"), perf_counter() - began)
    if compiled is None or not _launches_directly():  # None: Triton's interpreter
        return None
    rest = (*fixed, *[constants[parameter.name] for parameter in kernel.params if parameter.is_constexpr])
    usual, launcher = compiled[grid], getattr(compiled, "run", None)
    # Only the launcher for NVIDIA GPUs has these attributes; a kernel that needs scratch memory needs the usual launch.
    sizes = [getattr(launcher, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if type(launcher).__name__ != "CudaLauncher" or sizes != [0, 0]:
        return lambda *others: usual(*others, *rest)
    return _launch_in_c(compiled, grid, rest, usual)


def _launch_in_c(
    compiled: CompiledKernel, grid: tuple[int, int, int], rest: tuple[object, ...], usual: Direct
) -> Direct:
    """Returns a function that calls the launcher that Triton generated in C for compiled code.

    It skips the Python around that launcher, which finds the device, runs hooks, and allocates scratch memory.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    hooks, launcher, (x, y, z) = knobs.runtime, compiled.run, grid
    stream_of, device, launch_c = driver.active.get_current_stream, driver.active.get_current_device(), launcher.launch
    # No scratch memory, no data for hooks, and no hooks.
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    options = (compiled.function, cooperative, dependent, None, None, compiled.packed_metadata, None, None, None)

    def run(*others: object) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler counts launches
            usual(*others, *rest)
        else:
            launch_c(x, y, z, stream_of(device), *options, *others, *rest)

    return run


@cache
def _launches_directly() -> bool:
    """Returns whether a compiled kernel takes all arguments, constants among them, as triton 3.6 does."""
    import triton

    return str(triton.__version__).startswith("3.6.")


def numbers_of(spec: AttentionSpec) -> Numbers:
    """Returns what each of our kernels of attention takes: its numbers, and whether it caps scores and has sinks."""
    left, right = band(spec).sides()
    return {
        "scale": spec.scale,
        "softcap": spec.softcap or 1.0,  # unused without SOFTCAP
        "left": left,
        "right": right,
        "SOFTCAP": spec.softcap is not None,
        "SINKS": spec.sinks,
    }


def result_buffer(into: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous tensor for a result: the caller's if it is contiguous."""
    import torch

    if into is not None and into.is_contiguous():
        return into
    return torch.empty(shape, dtype=dtype, device=device)
