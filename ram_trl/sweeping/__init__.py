"""Floor 3'': which merge is the best, of a grid or of what Optuna proposes."""
