"""Loads backends by name, and holds the order of automatic choice.

Each file or folder here is a backend, except ``support`` (a backend's claims), ``contract`` (its record) and ``shared``
(helpers of several backends). A backend imports neither torch nor jax nor its kernel at module level;
its functions do, when they run. So every backend can be selected, explained and documented without its kernel.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from pkgutil import iter_modules
from typing import Any

from attn_core.backends.contract import Backend
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.device_kinds import ANY, STARTS, kind_of
from attn_core.backends.shared.known_bad import numbers_of
from attn_core.backends.support import Build
from attn_core.call.tensors import Gradients, Inputs, PagedInputs
from attn_core.errors import SpecError

__all__ = [
    "ANY",
    "DECODING",
    "FOREIGN_NAMES",
    "FORWARD_MODE",
    "IN_ORDER",
    "PAGED_PREFERENCE",
    "PREFERENCE",
    "ROW_MAXIMUM",
    "Backend",
    "Build",
    "Gradients",
    "Inputs",
    "PagedInputs",
    "availability",
    "check_name",
    "installed_build",
    "kind_of",
    "load",
    "names",
    "of_kind",
    "records",
    "usual_order",
]

# Every other file or folder here counts as a backend, so a new helper at this level must be listed.
NOT_BACKENDS = ("contract", "shared", "support")

Orders = dict[tuple[str, str], tuple[str, ...]]
_CUDA = ("flash3", "flash4", "sdpa_cudnn", "flash2", "sdpa_flash", "xformers", "sdpa_efficient", "flex")
PREFERENCE = {
    ("torch", "cpu"): ("sdpa_flash", "math", "flex"),
    ("jax", "cpu"): ("sdpa_flash", "math", "jax_xla", "flex"),
    ("torch", "cuda"): (*_CUDA, "math"),
    ("jax", "cuda"): (*_CUDA, "jax_cudnn", "jax_xla", "math"),
    ("torch", ANY): ("math",),
    ("jax", ANY): ("jax_xla",),
}
"""Automatic choice per (framework, kind of device), best first; ANY is for every kind without an order of its own.
Other backends run only when requested.

On a TPU, and on the GPUs of AMD, Apple and Intel, the framework's own operations run: this project never ran a
vendor's kernel there. JAX reaches torch's kernels on CPUs and NVIDIA's GPUs alone. There both frameworks have the same
order of torch's kernels, so that the same call gives the same bits in both unless JAX's own operations are faster.
``attn_core.selection.preference`` refines the order by the shape of the call."""

IN_ORDER = {"cuda": "triton_ordered"}
"""By kind of device, the backend that, once proven, is a candidate for calls with ``invariant``, after faster ones."""

DECODING = "triton_splitkv"
_PAGED = ("flash3", "flash4", "flash2", DECODING)
PAGED_PREFERENCE = {
    **PREFERENCE,
    ("torch", "cuda"): (*_PAGED, "math"),
    ("jax", "cuda"): (*_PAGED, "jax_xla", "math"),
}
"""The same for keys and values in pages; where each sequence has few queries, DECODING comes first."""


FORWARD_MODE = {
    ("torch", "cpu"): ("math",),
    ("jax", "cpu"): ("jax_xla", "math"),
    ("torch", "cuda"): ("triton_jvp", "math"),
    ("jax", "cuda"): ("triton_jvp", "jax_xla", "math"),
    ("torch", ANY): ("math",),
    ("jax", ANY): ("jax_xla",),
}
"""Automatic choice of the backend that computes tangents, best first. Another one may compute the call's results."""

ROW_MAXIMUM = {**FORWARD_MODE}
"""The same for the largest logit of each row, which a pass over q and k computes."""

_OF_TORCH = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "math")
FOREIGN_NAMES = {
    # attn_implementation= of transformers, and their aliases in attn_implementation="attn_core:..."
    "eager": ("math",),
    "sdpa": _OF_TORCH,
    "flash": ("flash2", "flash3", "flash4", "sdpa_flash"),
    "fa": ("flash2", "flash3", "flash4", "sdpa_flash"),
    "flex_attention": ("flex",),
    **{f"{word}{n}": (f"flash{n}",) for n in (2, 3, 4) for word in ("fa", "flash_", "flash_attention_", "flash_attn_")},
    # torch.nn.attention.SDPBackend
    "flash_attention": ("sdpa_flash", "flash2", "flash3", "flash4"),
    "efficient_attention": ("sdpa_efficient",),
    "cudnn_attention": ("sdpa_cudnn",),
    # the words of earlier versions of torch, of xformers, and of implementation= in JAX
    "mem_efficient": ("sdpa_efficient",),
    "efficient": ("sdpa_efficient",),
    "cutlass": ("sdpa_efficient", "xformers"),
    "cudnn": ("sdpa_cudnn", "jax_cudnn"),
    "xla": ("jax_xla",),
    "triton": ("triton_splitkv",),
    "native": _OF_TORCH,
    "torch": _OF_TORCH,
    "sageattention": ("sage",),
    "sage_attention": ("sage",),
}
"""Names of other libraries, in lower case, and the backends that run the same kernels."""


@cached_once
def names() -> tuple[str, ...]:
    """Returns every backend's name: the files and folders here, each followed by its variants."""
    return tuple(_places())


@cached_once
def _places() -> dict[str, str]:
    """Returns name -> the file or folder that makes the backend's record."""
    # The folder's content is the list, so that adding a backend edits no other file.
    places = sorted(module.name for module in iter_modules(__path__) if module.name not in NOT_BACKENDS)
    return {backend.name: place for place in places for backend in _made_in(place, "cpu")}


@cached_once
def load(name: str, kind: str = "cpu") -> Backend:
    """Returns a backend's record for a kind of device.

    A backend is a file, ``sage.py``, or a folder: ``flash4/backend.py`` for all devices, or one file for each kind,
    ``flex/cpu.py`` and ``flex/cuda.py``. A file for one kind, ``flash2/rocm.py``, comes before ``backend.py``.

    Raises:
        SpecError: for an unknown name, with close matches.
    """
    check_name(name)
    return _record(name, kind)


def _record(name: str, kind: str) -> Backend:
    return next(backend for backend in _made_in(_places()[name], kind) if backend.name == name)


@cached_once
def _made_in(place: str, kind: str) -> tuple[Backend, ...]:
    """Returns the records of a file or folder for a kind of device: its own, then its variants. Imports no kernel."""
    module: Any = importlib.import_module(f"{__name__}.{place}")
    if hasattr(module, "__path__"):
        inside = {entry.name for entry in iter_modules(module.__path__)}
        # A kind without a module of its own (tpu) gets the CPU's, whose claims refuse the device with a reason.
        name = next(name for name in (kind, "backend", "cpu") if name in inside)
        module = importlib.import_module(f"{__name__}.{place}.{name}")
    return (module.BACKEND, *module.BACKEND.variants)


def records(name: str) -> dict[str, Backend]:
    """Returns a backend's records by kind of device: ``{"": record}``, or one for each of several kinds.

    The record for all kinds that have none of their own has the key "", or "cpu" if it is the one of several for CPUs.
    """
    main = load(name)
    others = {kind: load(name, kind) for kind in STARTS if load(name, kind) is not main}
    return {"cpu" if others and main.forward_claims.devices == ("cpu",) else "": main, **others}


def usual_order(framework: str, kind: str, *, paged: bool = False) -> tuple[str, ...]:
    """Returns the static order of automatic choice in a framework on a kind of device, best first."""
    return of_kind(PAGED_PREFERENCE if paged else PREFERENCE, framework, kind)


def of_kind(orders: Orders, framework: str, kind: str) -> tuple[str, ...]:
    """Returns the entry of a framework on a kind of device in an order such as ``FORWARD_MODE``."""
    return orders.get((framework, kind)) or orders.get((framework, ANY), ())


def check_name(name: str) -> None:
    """Raises SpecError for a name that no backend has, with our name for another library's, or close matches."""
    if name not in _places():
        close = FOREIGN_NAMES.get(str(name).lower()) or get_close_matches(str(name).lower(), names(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(names())}"
        raise SpecError(f"backend={name!r}: unknown backend; {hint}")


@cached_once
def availability(name: str, kind: str = "cpu") -> tuple[str | None, str | None]:
    """Returns ``(version, None)`` if the backend's kernel imports here, else ``(None, reason)``."""
    backend = load(name, kind)
    try:
        return backend.probe(), None
    except (Exception, SystemExit) as error:  # an import may fail in any way, and must not affect other backends
        return None, f"not available: {type(error).__name__}: {error} (needs {backend.requires})"


@cached_once
def installed_build(name: str, device: str) -> Build | None:
    """Returns the build of an available backend on a device of this machine; None if nothing depends on it.

    A backend without ``build`` has one if some versions of its package are known bad. Errors of ``build`` propagate;
    the caller turns them into a reason.
    """
    kind = kind_of(device)
    build = load(name, kind).build
    if build is not None:
        return build()
    package, version = known_bad.versioned_package(name), availability(name, kind)[0]
    return None if package is None or version is None else Build(f"{package} {version}", version=numbers_of(version))
