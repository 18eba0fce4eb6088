"""The definition of correct results: the float64 reference, error bounds, and the mask probe."""
