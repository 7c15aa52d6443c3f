"""The package's version, read by the build and by `tpu_core.__version__`, and its docs' place."""

__version__ = "0.1.0"
# Where the documentation is published, "https://HOST/PATH"; errors link to it. Without one they
# name the file in the source tree. TPU_DOCS_URL takes precedence, such as of an internal mirror.
DOCS_URL = ""
