"""Writers of the pages of docs/reference that say what the backends declare."""
