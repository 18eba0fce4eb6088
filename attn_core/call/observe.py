"""What a program can observe of its calls: records of rare events, counters, and the ranges that profilers show."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import count as counting
from threading import Lock
from time import perf_counter
from types import FrameType
from typing import Any, TypedDict

from attn_core.call.after_fork import free_in_children
from attn_core.call.options import check_flag
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError, shown


class Switch:
    """Sets a context variable; as a context manager it restores the earlier state at the end of its block.

    Args:
        name: the name of the public function, for the error.

    Raises:
        SpecError: unless ``on`` is True or False.
    """

    def __init__(self, name: str, variable: ContextVar[bool], on: bool) -> None:
        if not isinstance(on, bool):
            raise SpecError(f"{name}({shown(on)}): expected True or False")
        self._variable, self._token = variable, variable.set(on)

    def __enter__(self) -> None:
        """Begins the block. The mode is on or off since the switch was made."""

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def variable_of(name: str) -> ContextVar[bool]:
    """Returns the context variable of a mode; the environment variable ``ATTN_CORE_<NAME>`` is its first value."""
    on = os.environ.get(f"ATTN_CORE_{name.upper()}", "") not in ("", "0")
    return ContextVar(f"attn_core_{name}", default=on)


_log_enabled = variable_of("log")

log_enabled = _log_enabled.get
"""Returns whether records are on. The bound method of the context variable itself. Only rare events read it."""

EVENTS = {
    "plan": logging.INFO,
    "fallback": logging.WARNING,
    "compile": logging.INFO,
    "eviction": logging.INFO,
}
"""The level of each event."""

OURS = frozenset(("attn_core", "torch_frontend", "jax_frontend"))
"""Packages whose frames are never the place of a call."""
MACHINERY = OURS | {"torch", "jax", "jaxlib", "flax", "functools", "contextlib", "weakref"}
"""Packages that call us in the name of a caller further out."""


def log(on: bool = True) -> Switch:
    """Switches records of rare events on or off: ``log(True)`` from here on, ``with log(True):`` for a block.

    The logger "attn_core" then gets a record for each new plan, fallback, compilation and eviction. ``record.attn`` is
    a dict of plain data: ``event``, a key of ``EVENTS``, and the fields of that event; the message says the same in one
    line. A program without handlers sees the lines on stderr. A level that you set on the logger "attn_core" applies;
    the root logger's level does not, because the switch replaces it. Calls that find their plan write no record.
    ``ATTN_CORE_LOG=1`` switches the records on when the package is imported. The switch belongs to the current thread
    or task; threads that torch and XLA start follow the environment variable.

    Raises:
        SpecError: unless ``on`` is True or False.
    """
    return Switch("log", _log_enabled, on)


def emit(event: str, message: str, **fields: object) -> None:
    """Hands a record to the logger "attn_core" if records are on.

    Args:
        event: a key of EVENTS. fields: plain data that JSON has, too.
    """
    level = EVENTS[event]
    if not log_enabled() or logger.level > level or logger.manager.disable >= level:
        return
    frame = _users_frame()
    file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    extra = {"attn": {"event": event, **fields}}
    logger.handle(logger.makeRecord(logger.name, level, file, line, f"{event}: {message}", (), None, extra=extra))


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of the user's program that led here, so that each such line warns once, as Python does it."""
    frame = _users_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    module, seen = str(frame.f_globals.get("__name__", "")), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, seen)


def _users_frame() -> FrameType | None:
    """Returns the frame outside of our packages and of torch and JAX that led here.

    Inside the command line and in threads that torch or XLA start there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, _, rest = str(frame.f_globals.get("__name__", "")).partition(".")
        if package == "attn_core" and rest.startswith("cli"):
            break
        if package not in MACHINERY and package != "threading":
            return frame
        frame = frame.f_back
    return None


class _LastHandler(logging.Handler):
    """Writes our records to stderr if the program has no handler for them, as logging itself does with warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        if (hasattr(record, "attn") or record.levelno >= logging.WARNING) and not _others(logger):
            sys.stderr.write(f"attn_core {self.format(record)}\n")


def _others(start: logging.Logger) -> bool:
    """Returns whether a record of the logger reaches a handler of the program."""
    level: logging.Logger | None = start
    while level is not None:
        if any(not isinstance(handler, _LastHandler | logging.NullHandler) for handler in level.handlers):
            return True
        level = level.parent if level.propagate else None
    return False


logger = logging.getLogger("attn_core")
logger.addHandler(_LastHandler())


class Compiles(TypedDict):
    """Compilations of one kind: their number, and the seconds that all of them took."""

    number: int
    seconds: float


class Counters(TypedDict):
    """A snapshot by ``counters``: plain dicts and numbers. Keys of a later release may be more, never fewer.

    Attributes:
        plans: new plans by framework ("torch", "jax") and backend: calls that differed from all earlier ones.
        plan_hits: by framework, lookups that found a plan.
        evictions: plans and callbacks that a full cache dropped, by the cache's name.
        fallbacks: "backend": new plans that an installed or requested backend refused, although it was preferred to
            the chosen one; "lane": calls of JAX whose kernels XLA cannot launch itself; "triton": GPUs on which torch
            operations replace a Triton kernel.
        callback_calls: calls that JAX traced for the callback lane.
        compiles: by what compiled: "flash4", "ffpa", "flex", "triton", "compiled_lane", "xla".
        copies: "mask": bool masks converted to numbers; "bias": biases copied, because of their dtype or strides;
            "operand": q, k, v or their gradients copied, because a kernel cannot read their strides.
    """

    plans: dict[str, dict[str, int]]
    plan_hits: dict[str, int]
    evictions: dict[str, int]
    fallbacks: dict[str, int]
    callback_calls: int
    compiles: dict[str, Compiles]
    copies: dict[str, int]


FALLBACKS = ("backend", "lane", "triton")
COMPILES = ("flash4", "ffpa", "flex", "triton", "compiled_lane", "xla")
COPIES = ("mask", "bias", "operand")
FRAMEWORKS = ("torch", "jax")

_lock = free_in_children(Lock())
_numbers: Counter[tuple[str, ...]] = Counter()
"""By (group, name, ...); guarded by ``_lock``."""
_seconds: dict[str, float] = defaultdict(float)
"""Seconds of compilations by kind; guarded by ``_lock``."""

# Copies happen in every call of a slow path, so they are counted by one call of a C function, which needs no lock.
_copies = {kind: counting(1) for kind in COPIES}
mask_converted: Callable[[], int] = _copies["mask"].__next__
bias_copied: Callable[[], int] = _copies["bias"].__next__
operand_copied: Callable[[], int] = _copies["operand"].__next__

_caches: dict[str, list[Any]] = {framework: [] for framework in FRAMEWORKS}
"""The caches of plans that a frontend has; an lru_cache counts its hits itself."""
_base: Counter[tuple[str, ...]] = Counter()
"""What hits and copies had counted at the last reset; guarded by ``_lock``."""


def counters(*, reset: bool = False) -> Counters:
    """Returns a snapshot of this process's counters. They are always on, because only rare or slow steps count.

    Args:
        reset: start again from zero after this snapshot.
    """
    with _lock:
        running = {("hits", name): hits(name) for name in FRAMEWORKS}
        running |= {("copies", kind): _value(copies) for kind, copies in _copies.items()}
        result = _snapshot({key: value - _base[key] for key, value in running.items()})
        if check_flag("reset", reset):
            _numbers.clear()
            _seconds.clear()
            _base.update({key: value - _base[key] for key, value in running.items()})
    return result


def _snapshot(running: dict[tuple[str, ...], int]) -> Counters:
    """Returns the counters in the form of ``Counters``.

    Args:
        running: plan hits and copies since the last reset, which are counted elsewhere.
    """

    def group(name: str, *always: str) -> dict[str, int]:
        found = {key[1]: number for key, number in _numbers.items() if key[0] == name}
        return dict.fromkeys(always, 0) | found

    plans: dict[str, dict[str, int]] = {framework: {} for framework in FRAMEWORKS}
    for (kind, *rest), number in _numbers.items():
        if kind == "plan":
            plans[rest[0]][rest[1]] = number
    compiles = group("compile", *COMPILES)
    return {
        "plans": plans,
        "plan_hits": {framework: max(0, running["hits", framework]) for framework in FRAMEWORKS},
        "evictions": group("eviction"),
        "fallbacks": group("fallback", *FALLBACKS),
        "callback_calls": _numbers["callback",],
        "compiles": {kind: {"number": compiles[kind], "seconds": _seconds[kind]} for kind in compiles},
        "copies": {kind: running["copies", kind] for kind in COPIES},
    }


def count(*key: str) -> int:
    """Adds 1 to a counter and returns it: ("plan", framework, backend), ("fallback", what), ("callback",), ..."""
    with _lock:
        _numbers[key] += 1
        return _numbers[key]


def watch(framework: str, *caches: Any) -> None:
    """Counts the hits of these ``lru_cache`` functions as hits of plans."""
    _caches[framework].extend(caches)


def hits(framework: str) -> int:
    """Returns the lookups that found a plan, since the process began."""
    return sum(cache.cache_info().hits for cache in _caches[framework])


def _value(copies: counting[int]) -> int:
    """Returns how often a counter was called. Its text is the only way to read it without a step: ``count(5)``."""
    return int(repr(copies)[len("count(") : -1]) - 1


@contextmanager
def timed(kind: str, name: str) -> Iterator[None]:
    """Times a block that compiles; a block that raises does not count.

    Args:
        kind: one of ``COMPILES``. name: the program or the kernel, for the record.
    """
    began = perf_counter()
    yield
    compiled(kind, name, perf_counter() - began)


def compiled(kind: str, name: str, seconds: float) -> None:
    """Counts a compilation of one of ``COMPILES`` that took these seconds, and writes a record of it."""
    with _lock:
        _numbers["compile", kind] += 1
        _seconds[kind] += seconds
    emit("compile", f"{kind} took {seconds:.3f} s for {name}", kind=kind, name=name, seconds=seconds)


_ranges_enabled = variable_of("ranges")

ranges_enabled = _ranges_enabled.get
"""Returns whether ranges are on. The bound method of the context variable itself, because every call reads it."""


def ranges(on: bool = True) -> Switch:
    """Switches NVTX ranges on or off: ``ranges(True)`` from here on, ``with ranges(True):`` for a block.

    Each attention call on torch tensors then marks its forward and its backward with an NVTX range, named by
    ``range_name``, which Nsight Systems shows. A backward has its range if the forward ran while ranges were on. A
    build of torch without NVTX (for CPUs) warns instead. ``torch.profiler`` shows the ranges without this switch, and
    JAX names its operations always. ``ATTN_CORE_RANGES=1`` switches the ranges on when the package is imported. The
    switch belongs to the current thread or task.

    Raises:
        SpecError: unless ``on`` is True or False.
    """
    return Switch("ranges", _ranges_enabled, on)


@lru_cache(maxsize=4096)
def range_name(backend: str, spec: AttentionSpec, direction: str) -> str:
    """Returns the name of a call's range: ``attn.flash3 forward b2 q2048 kv2048 h8:2 d64 bf16 causal w256``.

    The parts are: the backend; the direction, "forward" or "backward"; batch; query length; key length; query heads and
    kv heads; head_dim, and value_dim if it differs; dtype; then a word for each feature that the call has. No part
    contains a slash, because XLA's tools split names there.
    """
    return f"attn.{backend} {direction} {words_of(spec)}"


@lru_cache(maxsize=4096)
def words_of(spec: AttentionSpec) -> str:
    """Returns the parts of a range's name that describe the call: ``b2 q2048 kv2048 h8:2 d64 bf16 causal w256``."""
    value_dim = f":{spec.value_dim}" if spec.value_dim != spec.head_dim else ""
    features = [word(spec) for word in FEATURE_WORDS.values()]
    words = [
        f"b{spec.batch}",
        f"q{spec.q_len}",
        f"kv{spec.kv_len}",
        f"h{spec.num_heads}:{spec.num_kv_heads}",
        f"d{spec.head_dim}{value_dim}",
        DTYPE_WORDS[spec.dtype],
        *features,
    ]
    return " ".join(filter(None, words)).replace("/", ":")  # a symbolic size may contain a division


def _window(spec: AttentionSpec) -> str:
    left, right = spec.window
    if spec.causal and left is not None and right in (None, 0):
        return f"w{left + 1}"  # as ``window=W``: W keys, self included
    return "" if (left, right) == (None, None) else f"w{'' if left is None else left}:{'' if right is None else right}"


def _alignment(spec: AttentionSpec) -> str:
    anchored = spec.causal or spec.alibi_shape is not None or spec.window != (None, None)
    return "top_left" if anchored and spec.alignment == "top_left" else ""


def _pages(spec: AttentionSpec) -> str:
    if spec.paged is None:
        return ""
    return f"pages{spec.paged.page_size}" + ("" if spec.paged.dtype is None else f":{spec.paged.dtype}")


DTYPE_WORDS = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}

FEATURE_WORDS: dict[str, Callable[[AttentionSpec], str]] = {
    "causal": lambda spec: "causal" if spec.causal else "",
    "alignment": _alignment,
    "window": _window,
    "softcap": lambda spec: "" if spec.softcap is None else f"softcap{spec.softcap:g}",
    "mask_shape": lambda spec: "mask" if spec.mask_shape else "",
    "key_ranges_shape": lambda spec: f"ranges{spec.key_ranges_shape[3]}" if spec.key_ranges_shape else "",
    "mask_mod": lambda spec: "" if spec.mask_mod is None else "mask_mod",
    "score_mod": lambda spec: "" if spec.score_mod is None else "score_mod",
    "bias_shape": lambda spec: "bias" if spec.bias_shape else "",
    "alibi_shape": lambda spec: "alibi" if spec.alibi_shape else "",
    "sinks": lambda spec: "sinks" if spec.sinks else "",
    "documents": lambda spec: "" if spec.documents is None else f"docs{spec.documents}",
    "paged": _pages,
    "dropout": lambda spec: f"dropout{spec.dropout:g}" if spec.dropout else "",
    "deterministic": lambda spec: "deterministic" if spec.deterministic else "",
    "partial": lambda spec: "partial" if spec.partial else "",
    "invariant": lambda spec: "" if spec.invariant is None else f"same-bits-{spec.invariant}",
}
"""The word of each feature in a name, by the field of the spec; empty if the call does not have the feature."""
