"""Loads backends by name, and derives the order of automatic choice from their ranks.

Each file or folder here is a backend, except ``support`` (a backend's claims), ``contract`` (its record),
``registration`` (what is asked of the record of a plug-in) and ``shared`` (helpers of several backends). Other packages
add backends by ``register_backend`` or an entry point. A backend imports neither torch nor jax nor its kernel at module
level; its functions do, when they run. So every backend can be selected, explained and documented without its kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pkgutil import iter_modules
from threading import RLock
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, ForwardModePass, Pages, Program, Ranks, RowMaximumPass
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.caches import cached_once, forget, from_records
from attn_core.backends.shared.known_bad import numbers_of
from attn_core.backends.support import ANY, BRIDGED, STARTS, Build, Support, kind_of
from attn_core.call import observe
from attn_core.call.after_fork import free_in_children
from attn_core.call.masks import Band, band
from attn_core.call.tensors import Gradients, Inputs, PagedInputs, Tangents
from attn_core.errors import SpecError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ANY",
    "Backend",
    "Band",
    "Build",
    "ForwardModePass",
    "Gradients",
    "Inputs",
    "PagedInputs",
    "Pages",
    "Program",
    "RowMaximumPass",
    "Support",
    "Tangents",
    "availability",
    "band",
    "broken_plug_ins",
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
    "register_backend",
    "row_maximum_order",
    "usual_order",
]

_plug_ins: dict[str, Backend] = {}
"""What `register_backend` added, by name: of the whole process, as the files here are."""

_registering, _reading = free_in_children(RLock()), free_in_children(RLock())


def register_backend(backend: Backend) -> None:
    """Adds a backend of another package, which then is selected, explained and tested as those here.

    An installed package can name its backends by entry points of the group ``attn_core.backends`` instead. A backend
    runs by name, and in automatic choice where it has a rank, ``preference``. All later calls see it; functions that
    JAX or torch has compiled may keep their backend. The record is checked by its fields, ``refuses`` and ``lower``; no
    kernel is imported.

    Raises:
        SpecError: for a member of another kind, a claim that the backend's functions refuse, a name that is taken, or
            the name of another backend that there is not; it names the plug-in, the member and the file.
    """
    from attn_core.backends import registration  # by far most processes have no plug-in

    registration.check(backend)
    own = {backend.name, *(variant.name for variant in backend.variants)}
    for record, member, name in registration.names_of_others(backend):
        if name not in own:
            try:
                check_name(name)
            except SpecError as error:
                raise registration.fault(record, member, str(error)) from None
    with _registering:
        known = {record: _found(record.name) for record in (backend, *backend.variants)}
        for record, other in known.items():
            if other not in (None, record):
                taken = f"taken by the backend in {registration.source_of(other)}; choose another name"
                raise registration.fault(record, "name", taken)
        _plug_ins.update({record.name: record for record, other in known.items() if other is None})
    forget()


def _found(name: str) -> Backend | None:
    """Returns a backend's record without a look at entry points; None if there is none."""
    return _record(name, "cpu") if name in _places() else _plug_ins.get(name)


@cached_once
def _entry_points() -> tuple[Iterator[EntryPoint], dict[str, str]]:
    """Returns the entry points that nobody has read, and the reasons of ``broken_plug_ins``.

    Not when attn_core is imported, because it looks at every installed package.
    """
    from importlib.metadata import entry_points

    return iter(entry_points(group="attn_core.backends")), {}


def broken_plug_ins() -> dict[str, str]:
    """Returns why entry points bring no backend: name -> reason. The first call registers what the others bring.

    An entry point of the group ``attn_core.backends`` gives a Backend, or a function that returns one or several.
    """
    with _reading:
        points, broken = _entry_points()
        for point in points:
            try:
                found = point.load()
                found = found if isinstance(found, Backend) or not callable(found) else found()
                for backend in found if isinstance(found, tuple | list) else (found,):
                    register_backend(backend)
            except (Exception, SystemExit) as error:  # a plug-in may fail in any way, and must not affect the others
                from attn_core.backends import registration

                package = "" if point.dist is None else f" of {point.dist.name}"
                what = f"plug-in {point.name!r}{package}, entry point {point.value}"
                broken[point.name] = f"{what}: {type(error).__name__}: {error}{registration.place_of(error)}"
                observe.logger.warning("%s; the other backends go on", broken[point.name])
    return broken


@from_records()
def names() -> tuple[str, ...]:
    """Returns every backend's name: the files and folders here, each followed by its variants, then the plug-ins."""
    broken_plug_ins()  # registers those that are not broken
    return (*_places(), *_plug_ins)


@cached_once
def _places() -> dict[str, str]:
    """Returns name -> the file or folder that makes the backend's record."""
    # The folder's content is the list, so that adding a backend edits no other file.
    places = sorted(module.name for module in iter_modules(__path__))
    return {backend.name: place for place in places for backend in _made_in(place, "cpu")}


@from_records()
def load(name: str, kind: str = "cpu") -> Backend:
    """Returns a backend's record for a kind of device.

    A backend is a module, ``sage.py``, or a package, ``flash4``, whose ``__init__.py`` ends with the record. Kinds of
    devices may have modules of their own in a package: ``flex/cpu.py`` and ``flex/cuda.py``, or ``flash2/rocm.py``
    beside the record of the package.

    Raises:
        SpecError: for an unknown name, with close matches.
    """
    check_name(name)
    return _record(name, kind)


def _record(name: str, kind: str) -> Backend:
    if name in _plug_ins:
        return _plug_ins[name].on.get(kind, _plug_ins[name])
    return next(backend for backend in _made_in(_places()[name], kind) if backend.name == name)


@cached_once
def _made_in(place: str, kind: str) -> tuple[Backend, ...]:
    """Returns the records of a file or folder for a kind of device: its own, then its variants. Imports no kernel.

    Modules without a record hold helpers.
    """
    module: Any = importlib.import_module(f"{__name__}.{place}")
    if hasattr(module, "__path__"):
        inside = {entry.name for entry in iter_modules(module.__path__)}
        # A kind without a module of its own (tpu) gets the CPU's, whose claims refuse the device with a reason.
        kinds = (kind,) if hasattr(module, "BACKEND") else (kind, "cpu")
        own = [name for name in kinds if name in inside][:1]
        module = importlib.import_module(".".join((__name__, place, *own)))
    return (module.BACKEND, *module.BACKEND.variants) if hasattr(module, "BACKEND") else ()


def records(name: str) -> dict[str, Backend]:
    """Returns a backend's records by kind of device: ``{"": record}``, or one for each of several kinds.

    The record for all kinds that have none of their own has the key "", or "cpu" if it is the one of several for CPUs.
    """
    main = load(name)
    others = {kind: load(name, kind) for kind in (*STARTS, *main.on) if load(name, kind) is not main}
    return {"cpu" if others and main.forward_claims.devices == ("cpu",) else "": main, **others}


@from_records()
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


@from_records()
def forward_mode_order(framework: str, kind: str) -> tuple[str, ...]:
    """Returns the order of the backends that compute tangents. Another one may compute the call's results."""
    order = _order(framework, kind, lambda backend: _ranks_of(backend.forward_mode))
    return order if order or kind == ANY else forward_mode_order(framework, ANY)


@from_records()
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


@from_records()
def plain_backend(framework: str) -> str:
    """Returns the backend of a framework's own operations, which runs on every device."""
    every = ((name, load(name)) for name in names())
    return next(name for name, backend in every if backend.framework == framework and backend.runs_everywhere)


@from_records()
def kinds_in_order() -> tuple[str, ...]:
    """Returns the kinds of devices that have an order of their own, and ANY."""
    every = {kind for name in names() for backend in records(name).values() for kind in backend.preference}
    return (*sorted(every - {ANY}), ANY)


@from_records()
def in_order_on(kind: str) -> str | None:
    """Returns the backend that, once proven, is a candidate for calls with ``invariant``, after faster ones."""
    return next((name for name in names() if kind in load(name, kind).keeps_order_on), None)


@from_records()
def foreign_names() -> dict[str, tuple[str, ...]]:
    """Returns names of other libraries, in lower case, and the backends that run the same kernels."""
    ranked = sorted((rank, name, word) for name in names() for word, rank in load(name).also_called.items())
    words = {word: None for _, _, word in ranked}
    return {word: tuple(name for _, name, other in ranked if other == word) for word in words}


def check_name(name: str) -> None:
    """Raises SpecError for a name that no backend has, with our name for another library's, or close matches."""
    if name in _places() or name in _plug_ins or name in names():  # the last one reads entry points
        return
    if name in broken_plug_ins():
        raise SpecError(f"backend={name!r}: {broken_plug_ins()[name]}")
    from difflib import get_close_matches

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
