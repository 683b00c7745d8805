"""ScaleAcross Explorer: choose placement, schedule and network technology of a multi-site training job together."""
