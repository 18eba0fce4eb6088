"""Measured preferences: a file per device (``sm90.json``), derived from a sweep by ``benchmarks.sweep_preference``.

A device without a file has the static order of ``attn_core.backends.PREFERENCE``.
"""
