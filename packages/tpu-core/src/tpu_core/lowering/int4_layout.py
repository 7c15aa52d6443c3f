"""Sizes of the layout of weights of 4 bits, which is CUDA's. Without jax, for the recorder."""

TILE = 8  # rows of the weight in a tile
LANES = 32
K_TILE = 16  # columns in a tile
