"""The logger ``tpu_core`` and its level (``TPU_LOG``), and warnings at the user's line."""

from __future__ import annotations

import logging
import re
import warnings

from tpu_core.config import config

logger = logging.getLogger("tpu_core")
_handler: logging.Handler | None = None


def configure() -> None:
    """Set the logger's level from the configuration; called when the runtime starts.

    A handler to stderr is added only where ``TPU_LOG`` asks for more than warnings and the program
    has set up no logging of its own.
    """
    global _handler
    level = getattr(logging, config().log_level.upper())
    if level < logging.WARNING:
        logger.setLevel(level)
        if _handler is None and not logger.hasHandlers():
            _handler = logging.StreamHandler()
            _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(_handler)


def warn_at(line: str | None, warning: Warning) -> None:
    """Show a warning at the user's line, of which this thread's stack may know nothing.

    Args:
        line: As the extension gives it: ``"/home/a/train.py:31 in step"``.
        warning: The warning to show.
    """
    place = re.fullmatch(r"(.+):(\d+) in .+", line or "")
    if place:
        warnings.warn_explicit(warning, None, place[1], int(place[2]))
    else:
        warnings.warn(warning, stacklevel=3)
