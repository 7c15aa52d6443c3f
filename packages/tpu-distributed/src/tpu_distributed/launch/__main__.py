"""``python -m tpu_distributed.launch``: the same as ``tpu launch``."""

from __future__ import annotations

from tpu_distributed.launch.cli import app

app(prog_name="tpu launch")
