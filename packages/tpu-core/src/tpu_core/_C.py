"""Stand-in for the extension's build for the installed torch."""

from tpu_core import _extension

_extension.load(__name__)
