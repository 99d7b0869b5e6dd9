"""Floor 1a: arithmetic on tensors. No files, ranks, trainers or configurations."""
