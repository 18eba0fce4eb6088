"""Where the compiled library is that calls torch's operators from programs of XLA.

``operator_call.cc`` is compiled on the user's machine by ``jax_frontend.compile_operator_lane``, once for each version
of torch and jaxlib.
"""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path

from attn_core.backends.shared.private_folder import UnsafeFolderError, private_folder

SOURCE = Path(__file__).with_name("operator_call.cc")


def library_path() -> Path:
    """Returns where the library of the installed versions is, or would be.

    Raises:
        OSError, UnsafeFolderError: see ``private_folder``.
    """
    versions = [metadata.version(name) for name in ("torch", "jaxlib")]
    about = "|".join((SOURCE.read_text(), *versions, sys.platform))
    return private_folder("operators") / f"operator_call-{hashlib.sha256(about.encode()).hexdigest()[:24]}.so"


def missing() -> str | None:
    """Returns why no program can call torch's operators here; None if the library is there."""
    try:
        if library_path().exists():
            return None
    except (OSError, UnsafeFolderError, metadata.PackageNotFoundError) as error:
        return f"torch's operator needs a compiled library: {error}"
    return "torch's operator needs a compiled library: run jax_frontend.compile_operator_lane() once on this machine"
