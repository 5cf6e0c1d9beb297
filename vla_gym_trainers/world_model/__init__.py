"""F1's world model: a memory of what the wrist camera saw, and what it will see next."""
