"""Certificates: what one machine proves in bounded time about the backends that run on it, as a file to compare with.

Start with ``subject`` (a backend in a framework), then ``draw``, ``check`` (the list of checks), ``run`` (the loop),
``certificate`` (the file), ``regression`` and ``command`` (``attn certify``).
"""
