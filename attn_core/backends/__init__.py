"""Loads backends by name, and derives the order of automatic choice from their ranks.

Each file or folder here is a backend, except ``support`` (a backend's claims), ``contract`` (its record) and ``shared``
(helpers of several backends). A backend imports neither torch nor jax nor its kernel at module level;
its functions do, when they run. So every backend can be selected, explained and documented without its kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from pkgutil import iter_modules
from typing import Any

from attn_core.backends.contract import Backend, ForwardModePass, Ranks, RowMaximumPass
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.device_kinds import ANY, BRIDGED, STARTS, kind_of
from attn_core.backends.shared.known_bad import numbers_of
from attn_core.backends.support import Build
from attn_core.call.tensors import Gradients, Inputs, PagedInputs
from attn_core.errors import SpecError

__all__ = [
    "ANY",
    "Backend",
    "Build",
    "Gradients",
    "Inputs",
    "PagedInputs",
    "availability",
    "check_name",
    "foreign_names",
    "forward_mode_order",
    "in_order_on",
    "installed_build",
    "kind_of",
    "kinds_in_order",
    "load",
    "names",
    "plain_backend",
    "records",
    "row_maximum_order",
    "usual_order",
]


@cached_once
def names() -> tuple[str, ...]:
    """Returns every backend's name: the files and folders here, each followed by its variants."""
    return tuple(_places())


@cached_once
def _places() -> dict[str, str]:
    """Returns name -> the file or folder that makes the backend's record."""
    # The folder's content is the list, so that adding a backend edits no other file.
    places = sorted(module.name for module in iter_modules(__path__))
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
    """Returns the records of a file or folder for a kind of device: its own, then its variants. Imports no kernel.

    A file without a record, and a folder without a module for any kind, hold helpers.
    """
    module: Any = importlib.import_module(f"{__name__}.{place}")
    if hasattr(module, "__path__"):
        inside = {entry.name for entry in iter_modules(module.__path__)}
        # A kind without a module of its own (tpu) gets the CPU's, whose claims refuse the device with a reason.
        own = [name for name in (kind, "backend", "cpu") if name in inside][:1]
        module = importlib.import_module(".".join((__name__, place, *own)))
    return (module.BACKEND, *module.BACKEND.variants) if hasattr(module, "BACKEND") else ()


def records(name: str) -> dict[str, Backend]:
    """Returns a backend's records by kind of device: ``{"": record}``, or one for each of several kinds.

    The record for all kinds that have none of their own has the key "", or "cpu" if it is the one of several for CPUs.
    """
    main = load(name)
    others = {kind: load(name, kind) for kind in STARTS if load(name, kind) is not main}
    return {"cpu" if others and main.forward_claims.devices == ("cpu",) else "": main, **others}


@cached_once
def usual_order(framework: str, kind: str, *, paged: bool = False, few_queries: bool = False) -> tuple[str, ...]:
    """Returns the static order of automatic choice in a framework on a kind of device, best first.

    On a TPU, and on the GPUs of AMD, Apple and Intel, the framework's own operations run: this project never ran a
    vendor's kernel there. JAX reaches torch's kernels on CPUs and NVIDIA's GPUs alone. There both frameworks have the
    same order of torch's kernels, so that the same call gives the same bits in both unless JAX's own operations are
    faster. ``attn_core.selection.preference`` refines the order by the shape of the call.

    Args:
        paged: for keys and values in pages; few_queries: of which each sequence has few queries.
    """
    own = _order(framework, kind, lambda backend: backend.paged_preference) if paged else ()
    order = own or _order(framework, kind, lambda backend: backend.preference)
    if not order:
        return usual_order(framework, ANY, paged=paged) if kind != ANY else ()
    return tuple(sorted(order, key=lambda name: not (few_queries and _is_first(name, kind))))


def _is_first(name: str, kind: str) -> bool:
    pages = load(name, kind).pages
    return pages is not None and pages.first_for_few_queries


@cached_once
def forward_mode_order(framework: str, kind: str) -> tuple[str, ...]:
    """Returns the order of the backends that compute tangents. Another one may compute the call's results."""
    order = _order(framework, kind, lambda backend: _ranks_of(backend.forward_mode))
    return order if order or kind == ANY else forward_mode_order(framework, ANY)


@cached_once
def row_maximum_order(framework: str, kind: str) -> tuple[str, ...]:
    """Returns the same for the largest logit of each row, which a pass over q and k computes."""
    order = _order(framework, kind, lambda backend: _ranks_of(backend.row_maximum))
    return order if order or kind == ANY else row_maximum_order(framework, ANY)


def _ranks_of(own: ForwardModePass | RowMaximumPass | None) -> Ranks:
    return {} if own is None else own.preference


def _order(framework: str, kind: str, ranks_of: Callable[[Backend], Ranks]) -> tuple[str, ...]:
    """Returns the backends that have a rank for a kind of device, and that the framework reaches there."""
    places = {}
    for name in names():
        backend = load(name, kind)
        ranks = ranks_of(backend)
        if kind in ranks and (framework == backend.framework or (framework == "jax" and kind in BRIDGED)):
            places[name] = ranks[kind]
    return tuple(sorted(places, key=places.__getitem__))


@cached_once
def plain_backend(framework: str) -> str:
    """Returns the backend of a framework's own operations, which runs on every device."""
    every = ((name, load(name)) for name in names())
    return next(name for name, backend in every if backend.framework == framework and backend.runs_everywhere)


@cached_once
def kinds_in_order() -> tuple[str, ...]:
    """Returns the kinds of devices that have an order of their own, and ANY."""
    every = {kind for name in names() for backend in records(name).values() for kind in backend.preference}
    return (*sorted(every - {ANY}), ANY)


@cached_once
def in_order_on(kind: str) -> str | None:
    """Returns the backend that, once proven, is a candidate for calls with ``invariant``, after faster ones."""
    return next((name for name in names() if kind in load(name, kind).keeps_order_on), None)


@cached_once
def foreign_names() -> dict[str, tuple[str, ...]]:
    """Returns names of other libraries, in lower case, and the backends that run the same kernels."""
    ranked = sorted((rank, name, word) for name in names() for word, rank in load(name).also_called.items())
    words = {word: None for _, _, word in ranked}
    return {word: tuple(name for _, name, other in ranked if other == word) for word in words}


def check_name(name: str) -> None:
    """Raises SpecError for a name that no backend has, with our name for another library's, or close matches."""
    if name not in _places():
        close = foreign_names().get(str(name).lower()) or get_close_matches(str(name).lower(), names(), n=3)
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
