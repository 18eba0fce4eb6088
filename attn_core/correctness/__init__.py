"""What is right: the float64 reference, error bounds, and the mask probe."""
