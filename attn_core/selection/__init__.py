"""What runs a call, and why: selection as pure data, and what the installed packages and the caller's choice add."""

from attn_core.selection.choice import NoBackendError, Selection, Target, explain, refusals, select

__all__ = ["NoBackendError", "Selection", "Target", "explain", "refusals", "select"]
