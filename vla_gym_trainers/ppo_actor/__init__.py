"""PPO on the RL-token actor."""
