"""The shipped tables of automatic choice: a file per framework and device, such as ``torch-sm90.json``.

``benchmarks.sweep_preference`` derives a table from the raw times of ``attn bench``. In JAX, GPUs have torch's table. A
device without a file has the static order of ``attn_core.backends.PREFERENCE``.
"""
