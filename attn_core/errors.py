"""The errors of this project. Every message names the argument, its value, the expected value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
