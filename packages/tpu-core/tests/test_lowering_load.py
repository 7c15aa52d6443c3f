"""Loading every module of lowerings."""

from __future__ import annotations

import threading
from pathlib import Path

from tpu_core import lowering
from tpu_core.lowering.registry import REGISTRY


def test_every_module_is_loaded_once_from_any_number_of_threads():
    errors = []

    def load():
        try:
            lowering.load()
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    count = len(REGISTRY)
    lowering.load()
    assert len(REGISTRY) == count > 0
    families = {entry.family for entry in REGISTRY if not entry.is_foreign}
    files = {path.stem for path in Path(lowering.__file__).parent.glob("*.py")}
    assert families <= files
