"""Register device ``tpu`` when torch is imported (entry point group ``torch.backends``).

It runs inside ``import torch``: it prints nothing, imports neither jax nor libtpu, and never
raises. What is wrong is said when the device is first used. Only what registering needs is
imported.
"""

from __future__ import annotations

import importlib.util
import sys

# A backend that takes PyTorch's one device slot and, whatever the order of entry points, fails
# inside `import torch` if the slot is taken before.
_RIVAL = "torch_tpu"

_loaded = False


def load() -> None:
    """Register the device and the module ``torch.tpu``, or stand down where that cannot work.

    A package that extends the device calls it too, as PyTorch loads entry points in any order.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True
    import torch

    # While this is running, TORCH_LOGS has not been read yet.
    torch._logging._internal.register_artifact(
        "stablehlo", "StableHLO of each program that is compiled for device tpu.", visible=True
    )
    if is_registered():
        return
    owner = torch._C._get_privateuse1_backend_name()
    if owner != "privateuseone" or hasattr(torch, "tpu"):
        _stand_down(f"another package has registered the device '{owner}' first")
        return
    if torch._is_device_backend_autoload_enabled() and importlib.util.find_spec(_RIVAL):
        _stand_down(f"{_RIVAL} is installed, which registers a device 'tpu' of its own")
        return
    torch.utils.rename_privateuse1_backend("tpu")
    if (problem := _extension_problem()) is not None:
        from tpu_core.stub_module import register_absent_module

        register_absent_module(*problem)
        return
    from tpu_core import _C, device

    _C.register_device()
    torch._register_device_module("tpu", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    device._install()


def is_registered() -> bool:
    """Return whether ``torch.tpu`` is this package's device, and not a stub or another's."""
    import torch

    module = getattr(torch, "tpu", None)
    return module is not None and module is sys.modules.get("tpu_core.device")


def _stand_down(why: str) -> None:
    from tpu_core.stub_module import stand_down

    stand_down(why)


def _extension_problem() -> tuple[str, str] | None:
    """Problem and remedy if the built extension cannot be loaded into this torch, or None."""
    from tpu_core.cpp_extension import CORE

    if (problem := CORE.problem()) is not None:
        return problem
    try:
        from tpu_core import _C  # noqa: F401
    except ImportError as error:
        return CORE.load_problem(error)
    return None
