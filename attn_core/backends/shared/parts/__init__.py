"""Calls that a backend computes in parts, or in another form: blocks of rows, chunks, documents."""
