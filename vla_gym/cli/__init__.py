"""The ``vla-gym`` command line."""
