"""Floor 3, journey 2: plan, probe, rescale, merge, publish."""
