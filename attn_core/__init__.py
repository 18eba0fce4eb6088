"""Describes an attention call as plain data, chooses a backend for it, and defines correct results.

Imports neither torch nor jax. Call attention through ``torch_frontend`` or ``jax_frontend``.
"""

from importlib import import_module
from types import ModuleType

from attn_core.backends import Backend, register_backend
from attn_core.backends.support import Support
from attn_core.call.checks import CheckWarning, checks
from attn_core.call.observe import Counters, counters, log, ranges
from attn_core.call.padding import Padding
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.errors import BridgeError, DeviceError, DTypeError, ResultError, ShapeError, SpecError
from attn_core.paged.allocator import PageAllocator, PoolFullError
from attn_core.paged.pools import bytes_per_token, pages_that_fit
from attn_core.paged.step import Pages, Step
from attn_core.selection.choice import NoBackendError, Selection, explain, select
from attn_core.selection.target import Target

__version__ = "0.2.0"

__all__ = [
    "AttentionSpec",
    "Backend",
    "BridgeError",
    "CheckWarning",
    "Counters",
    "DTypeError",
    "DeviceError",
    "NoBackendError",
    "PageAllocator",
    "Padding",
    "PagedKV",
    "Pages",
    "PoolFullError",
    "ResultError",
    "Selection",
    "SeqInfo",
    "ShapeError",
    "SpecError",
    "Step",
    "Support",
    "Target",
    "bytes_per_token",
    "checks",
    "counters",
    "explain",
    "log",
    "pages_that_fit",
    "ranges",
    "register_backend",
    "select",
]


def __getattr__(name: str) -> ModuleType:
    if name == "masks":  # loads at first use, because few programs build key ranges
        return import_module(f"{__name__}.masks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
