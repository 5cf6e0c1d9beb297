"""Flow-matching policies as lerobot saves them: SmolVLA and pi0."""
