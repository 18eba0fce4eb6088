"""``python -m attn_core``: the command line without the ``attn`` script."""

from __future__ import annotations

from attn_core.cli import main

if __name__ == "__main__":
    main()
