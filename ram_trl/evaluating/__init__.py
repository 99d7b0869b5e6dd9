"""Floor 3: how good the base, the agents and a merged model are, in one loaded model."""
