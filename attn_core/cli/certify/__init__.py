"""Certificates: what one machine proves about the backends that run on it, by a stored list of calls."""
