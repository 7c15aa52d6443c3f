"""Attention of the new tokens of many sequences over keys and values in pages."""
