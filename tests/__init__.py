"""Tests, and the campaign of random calls in ``tests/campaign``."""
