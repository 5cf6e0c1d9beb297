"""The single LIBERO environment: spaces, episodes, saved state."""
