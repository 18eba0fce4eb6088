"""has_triton: whether Triton is installed."""

from functools import cache


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    from importlib.util import find_spec

    return find_spec("triton") is not None
