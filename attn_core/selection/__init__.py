"""Chooses the backend of a call, as pure data with all reasons, from the spec, the installation and the request."""

from attn_core.selection.choice import NoBackendError, Selection, choose, explain, on_documents, select, with_function
from attn_core.selection.target import Target, refusals

__all__ = [
    "NoBackendError",
    "Selection",
    "Target",
    "choose",
    "explain",
    "on_documents",
    "refusals",
    "select",
    "with_function",
]
