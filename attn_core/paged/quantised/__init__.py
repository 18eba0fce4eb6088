"""Quantised keys and values: stored numbers, their scales, and the checks of both."""
