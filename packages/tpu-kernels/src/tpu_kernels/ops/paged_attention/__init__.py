"""Attention of one new token a sequence over keys and values in pages: a step of decoding."""
