"""Sizes that vary: which share a program, and when one has its own."""
