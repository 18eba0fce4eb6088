"""Campaigns: random calls through every entry point, compared with the float64 reference until time runs out.

Start with ``case`` (one call as plain data), then ``draw``, ``entries``, ``relations``, ``judge``, ``shrink`` and
``loop``. ``python -m tests.campaign`` (``make campaign``) runs one.
"""
