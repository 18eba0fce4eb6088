"""Certificates: what one machine proves about the backends that run on it, by a stored list of calls.

Start with ``calls`` (the list, and a backend in a framework), then ``checks`` (how a call is judged), ``certificate``
(the file and its texts) and ``command`` (``attn certify``).
"""
