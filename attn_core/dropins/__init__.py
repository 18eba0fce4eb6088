"""Translates calls of other libraries' attention into ours, as plain data."""
