"""Context parallelism as plain data: the layout of a row, the plan of a call, and its cost."""
