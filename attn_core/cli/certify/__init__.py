"""Certificates: what one machine proves about the backends that run on it, by a stored list of calls.

Start with ``subject`` (a backend in a framework), then ``calls`` (the list), ``checks`` (how a call is judged),
``certificate`` (the file) and ``command`` (``attn certify``).
"""
