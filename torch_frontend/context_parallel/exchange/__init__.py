"""What ranks send each other, by collectives."""
