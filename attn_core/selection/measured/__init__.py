"""The shipped tables of automatic choice: a file per framework and device, such as ``torch-sm90.json``.

``python -m benchmarks.fit`` derives a table from the raw times of a sweep. In JAX, GPUs have torch's table. A
device without a file has the static order of ``attn_core.backends.usual_order``, corrected by ``published.json``.
"""
