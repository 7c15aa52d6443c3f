"""Behaviour checks of the device contract, one module for one or two groups of rows."""
