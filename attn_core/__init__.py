"""attn_core: an attention call as plain data, the backends that can run it, and the maths that defines right.

Imports neither torch nor jax. The frontends are ``torch_frontend`` and ``jax_frontend``.
"""

from attn_core.backends.support import Support
from attn_core.call.pages import PagedKV
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.dropins import old_paths
from attn_core.errors import BridgeError, DeviceError, DTypeError, ShapeError, SpecError
from attn_core.paged.allocator import PageAllocator, PoolFullError
from attn_core.paged.step import Pages, Step
from attn_core.selection.choice import NoBackendError, Selection, Target, explain, select

__version__ = "0.1.0"
old_paths.install()

__all__ = [
    "AttentionSpec",
    "BridgeError",
    "DTypeError",
    "DeviceError",
    "NoBackendError",
    "PageAllocator",
    "PagedKV",
    "Pages",
    "PoolFullError",
    "Selection",
    "SeqInfo",
    "ShapeError",
    "SpecError",
    "Step",
    "Support",
    "Target",
    "explain",
    "select",
]
