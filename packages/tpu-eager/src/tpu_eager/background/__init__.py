"""Compiling in the background while segments run op by op."""
