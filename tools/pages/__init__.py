"""Writers of the pages that say what the backends declare."""
