"""Many prompts of different lengths decoded together, from one pool of pages."""
