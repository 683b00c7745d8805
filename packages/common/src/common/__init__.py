"""The shared layer: cluster vocabulary, Ray workers at sites, emulated links, MLflow tracking, checkpoints."""
