"""Helpers that several backends use."""
