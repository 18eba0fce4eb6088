"""From arrays to a plan and a kernel."""
