"""The cost model: what a plan takes in seconds and bytes, and which strategy is the fastest."""
