"""QwenOFT policies of AlphaBrain and starVLA, on Qwen2.5-VL and Qwen3-VL."""
