"""Keys and values in pages of a pool: the allocator, the tables, the reference, and what backends share."""
