"""F1's phases 2 and 3: an explorer that a world model pays, and the two against each other."""
