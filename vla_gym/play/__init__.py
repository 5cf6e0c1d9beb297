"""Episodes to look at: films and windows."""
