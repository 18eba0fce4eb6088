"""What ranks send each other: by collectives, or by the copy engines of their GPUs."""
