"""Keys and values in pages, for backends that read pages or gather them."""
