"""sdpa_efficient: torch's memory-efficient kernel."""
