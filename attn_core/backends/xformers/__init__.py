"""xformers: its operators, each also a backend of its own."""
