"""The embedded VLA: a policy of a few million parameters that runs anywhere."""
