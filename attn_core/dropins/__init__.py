"""What calls of other libraries mean, as plain data; and import paths that have moved."""
