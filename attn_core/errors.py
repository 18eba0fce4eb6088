"""The errors of this project, and notes on those of kernels.

Every message names the argument, its value, the expected value and the remedy. A note on a kernel's error says which
call it was, and the remedy if memory ran out.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SpecError(ValueError):
    """An argument whose value cannot describe an attention call."""


class ShapeError(SpecError):
    """An argument whose shape does not fit the others."""


class DTypeError(SpecError, TypeError):
    """An argument of a dtype that is not supported, or that differs from its companions."""


class DeviceError(SpecError):
    """Arguments that live on different devices."""


class BridgeError(RuntimeError):
    """A value that cannot cross between JAX and torch."""


class ResultError(RuntimeError):
    """A kernel returned a result of the wrong shape, dtype or device, for instance after an upgrade of its package."""


class LayoutWarning(UserWarning):
    """Shapes that are valid, but likelier those of another order of the axes."""


class _Text(reprlib.Repr):
    """As ``repr``, but short; arrays as their type and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 12

    def repr1(self, value: object, level: int) -> str:
        # Not the values of an array: they may be many, on a device, or in memory that is freed.
        kind = type(value)
        is_array = any(hasattr(kind, name) for name in ("__array__", "__dlpack__", "__jax_array__"))
        # A scalar of numpy, a tracer and a symbolic size of jax.export have nothing to read.
        is_scalar = (kind.__module__ == "numpy" and kind.__name__ != "ndarray") or hasattr(kind, "dimension_as_value")
        if is_array and not is_scalar and "Tracer" not in kind.__name__:
            return f"{kind.__module__}.{kind.__qualname__} of shape {_shape(value)}"
        try:
            return super().repr1(value, level)
        except Exception:  # a __repr__ of the caller, or an int with too many digits
            return f"<{kind.__qualname__}>"


def _shape(array: Any) -> list[int] | str:
    try:
        return list(array.shape)
    except Exception:  # a nested tensor has none
        return "unknown"


shown = _Text().repr
"""Returns the text of a caller's value for a message. Never reads the values of an array."""


class MissingExtraError(ModuleNotFoundError):
    """A package that one of attn-core's extras installs is missing. The message says what to install."""


@contextmanager
def needs_extra(what: str, extra: str, *packages: str) -> Iterator[None]:
    """Turns an import that fails inside it into one line that says what to install.

    Args:
        what: the thing that needs the packages, as the subject of the sentence.
        extra: the extra of attn-core that installs them.
        packages: top-level names. An import of anything else fails with its own error, because that is a defect of an
            installation, and its traceback must stay visible.

    Raises:
        MissingExtraError: if one of the packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        message = f"{what} needs {error.name}, which is not installed; pip install 'attn-core[{extra}]'"
        raise MissingExtraError(message, name=error.name) from None


MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "resource_exhausted")
"""Words of torch, its CPU allocator and XLA, in lower case, in errors of exhausted memory."""


MEMORY_REMEDY = "memory ran out: docs/how_to/out_of_memory.md says what a call needs and what helps"


SHARED_GPU = "JAX reserves 75 % of a GPU when it starts; set XLA_PYTHON_CLIENT_PREALLOCATE=false before its first use"


def note_call(error: BaseException, name: str) -> None:
    """Adds a note with the call to an error of its kernel, once. The error keeps its type and its words.

    Args:
        name: the call's ``range_name``, which begins with the backend.
    """
    notes = [f"in the call {name}"]
    if is_out_of_memory(error):
        notes.append(MEMORY_REMEDY)
        if "jax" in sys.modules and "cuda" in str(error).lower():
            notes.append(SHARED_GPU)
    for note in notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error says that memory ran out, of the host or of a device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(word in text for word in MEMORY_WORDS)
