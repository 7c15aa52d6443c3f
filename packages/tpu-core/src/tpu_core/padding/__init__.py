"""Padded execution: a few executables of bucketed sizes serve a program of changing sizes."""
