"""The pages of a pool: which sequence has which, prefixes found by content, swapping, and sizes in bytes."""
