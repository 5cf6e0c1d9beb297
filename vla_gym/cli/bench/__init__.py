"""``vla-gym bench``: our vector environment beside LIBERO's and Gymnasium's; a VLA's speed."""
