"""Write ``overloads.json``: the ATen overloads that reach the device for each op of OpInfo.

``python -m conformance.overloads``, from the folder ``integration``. `docs/generate.py` makes the
table of ops from it and from the registry of lowerings.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from conformance import compare
from conformance.entries import OPS
from conformance.ops import _arguments, _is_on_device, _moved, spread

FILE = Path(__file__).with_name("overloads.json")
SAMPLES = 2


class Overloads(TorchDispatchMode):
    """Collects the overloads that take or make a tensor of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if any(x.device.type == compare.DEVICE for x in tensors):
            self.names.add(str(func))
        return result


def overloads_of(name: str) -> dict[str, list[str]] | None:
    """``overloads`` that an op's samples run, and ``fallbacks`` among them; None if it cannot."""
    op, found = OPS[name], Overloads()
    before = torch.tpu.metrics()
    try:
        for sample in spread(op.sample_inputs("cpu", torch.float32), SAMPLES):
            args, kwargs = (given := _moved(name, _arguments(sample)))[:2], given[2]
            place = nullcontext() if _is_on_device(given) else torch.device(compare.DEVICE)
            with torch.no_grad(), place, found:
                result = op(args[0], *args[1], **kwargs)
            tree_map(compare.to_host, result)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    after = torch.tpu.metrics()
    fallbacks = [
        key.removeprefix("fallback.")
        for key, count in after.items()
        if key.startswith("fallback.") and count != before.get(key, 0)
    ]
    return {"overloads": sorted(found.names), "fallbacks": sorted(fallbacks)}


def main() -> None:
    warnings.simplefilter("ignore")
    found = {
        name: overloads_of(name)
        for name, op in sorted(OPS.items())
        if torch.float32 in op.supported_dtypes("cpu")
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
