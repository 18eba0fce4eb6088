"""xformers: the backend, its operators, and their masks."""
