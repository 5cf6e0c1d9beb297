"""OpenVLA, token after token, and OpenVLA-OFT, a chunk at once."""
