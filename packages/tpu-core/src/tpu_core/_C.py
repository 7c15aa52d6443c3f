"""In place of this module stands the build of the extension for the torch that is installed."""

from tpu_core import _extension

_extension.load(__name__)
