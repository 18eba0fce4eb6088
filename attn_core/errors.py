"""The errors of this project. Every message names the argument, its value, the expected value and the remedy."""


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


class LayoutWarning(UserWarning):
    """Shapes that are valid, but likelier those of another order of the axes."""
