"""Keys and values in pages of a pool: the allocator, the steps of a cache, block tables, and checks of arguments."""
