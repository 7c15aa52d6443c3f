"""Products of groups of rows, each with a matrix of its own: the experts of a mixture."""
