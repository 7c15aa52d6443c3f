"""The package's version, read by the build and by `tpu_distributed.__version__`."""

__version__ = "0.1.0"
