"""The order of a row's sums over its keys, which calls with ``invariant`` have in common on pages and on tensors."""
