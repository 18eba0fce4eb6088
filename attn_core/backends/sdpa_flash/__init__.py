"""sdpa_flash: torch's own flash attention, one file for CPUs and one for GPUs."""
