"""Products with weights of 4 bits, with a scale and a zero for each group of columns."""
