"""Build of the C++ extension ``tpu_distributed._C`` with `tpu_core.cpp_build`."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

core = importlib.util.find_spec("tpu_core")  # imports nothing
if core is None or core.submodule_search_locations is None:
    sys.exit(
        "tpu-distributed: building the extension tpu_distributed._C needs tpu-core, and there is "
        "none. Install it first, then run pip install --no-build-isolation."
    )
(folder,) = core.submodule_search_locations
setup = runpy.run_path(str(Path(folder) / "cpp_build.py"))["setup"]
setup(Path(__file__).resolve().parent, "tpu_distributed")
