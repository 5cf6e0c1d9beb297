"""TD3+BC on RL tokens."""
