"""Files whose lines are not the user's: PyTorch's, this project's and those of packages on it."""

from __future__ import annotations

import os

import torch
import typing_extensions

from tpu_core import _C

_TORCH = os.path.dirname(torch.__file__) + os.sep
# The last has the wrappers of PyTorch's deprecated functions.
_prefixes = [_TORCH, os.path.dirname(__file__) + os.sep, typing_extensions.__file__]


def hide_lines_of(file: str) -> None:
    """Never name a line of a package as the user's.

    Args:
        file: A file in the package's folder.

    Example:
        >>> hide_lines_of(__file__)
    """
    _prefixes.append(os.path.dirname(file) + os.sep)
    apply()


def package_folders() -> tuple[str, ...]:
    """Folders of code that is this project's: not the user's, and not PyTorch's."""
    return tuple(folder for folder in _prefixes if folder != _TORCH)


def apply() -> None:
    """Have the extension, which looks for the user's line, know them."""
    _C.set_internal_prefixes(tuple(_prefixes))
