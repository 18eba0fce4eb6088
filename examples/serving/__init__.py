"""Decodes many prompts of different lengths together, from one pool of pages."""
