"""Floor 3, journey 1: from a trained model to a version in the registry, and back to a model directory."""
