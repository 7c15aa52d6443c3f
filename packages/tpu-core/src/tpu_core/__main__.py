"""``python -m tpu_core`` is the command ``tpu``."""

from __future__ import annotations

from tpu_core.cli.app import main

if __name__ == "__main__":
    main()
