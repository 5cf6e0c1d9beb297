"""Flow-matching policies as lerobot saves them: SmolVLA, pi0 and pi0.5."""
