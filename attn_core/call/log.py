"""log: structured records of rare events, through Python's logging. Off by default."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

from attn_core.call.switch import Switch, variable_of

_enabled = variable_of("log")

enabled = _enabled.get
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
    return Switch("log", _enabled, on)


def emit(event: str, message: str, **fields: Any) -> None:
    """Hands a record to the logger "attn_core" if records are on.

    Args:
        event: a key of EVENTS. fields: plain data that JSON has, too.
    """
    level = EVENTS[event]
    if not enabled() or logger.level > level or logger.manager.disable >= level:
        return
    file, line = _place()
    extra = {"attn": {"event": event, **fields}}
    logger.handle(logger.makeRecord(logger.name, level, file, line, f"{event}: {message}", (), None, extra=extra))


def _place() -> tuple[str, int]:
    """Returns the file and the line outside of our packages and of torch and JAX that led here; ("", 0) for none.

    Inside the command line and in threads that torch or XLA start there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, _, rest = str(frame.f_globals.get("__name__", "")).partition(".")
        if package == "attn_core" and rest.startswith("cli"):
            break
        if package not in MACHINERY and package != "threading":
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


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
