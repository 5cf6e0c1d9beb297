"""What a training run leaves on disk, and how it goes on after it was cut off."""
