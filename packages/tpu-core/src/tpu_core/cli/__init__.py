"""The command ``tpu``."""
