"""Register the c10d backend ``tpu`` (entry point group ``torch.backends``).

It runs inside ``import torch``, which has imported ``torch.distributed`` before; everything else of
this package waits until a process group is made.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

# transformers asks for the second.
NAMES = ("tpu", "tpu_dist")


def load() -> None:
    """Make ``init_process_group()`` use this package for tensors on ``tpu``."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from tpu_core.extend import when_imported
    from tpu_distributed import splitting

    for name in NAMES:
        # A list: of a string every letter would be taken for a device.
        dist.Backend.register_backend(name, _create, extended_api=True, devices=["tpu"])
    _add_gloo_for_cpu_tensors()
    splitting.install()
    when_imported(
        {
            "torch.distributed.tensor": _add_sharding_rules,
            "torch.distributed.tensor.experimental._context_parallel._attention": _divide_sequences,
        }
    )


def _create(options: Any, backend_options: Any) -> Any:
    from tpu_distributed import backend

    return backend.create(options)


def _add_sharding_rules(module: ModuleType) -> None:
    from tpu_distributed import sharding_rules

    sharding_rules.register()


def _divide_sequences(module: ModuleType) -> None:
    from tpu_distributed import context_parallel

    context_parallel.register(module)


def _add_gloo_for_cpu_tensors() -> None:
    """Give CPU tensors their backend where PyTorch picks one for the accelerator alone."""
    from torch.distributed import distributed_c10d as c10d

    config: Any = c10d.BackendConfig
    original = config.__init__

    def init(self: Any, backend: Any) -> None:
        original(self, backend)
        chosen = self.device_backend_map
        if set(chosen) == {"tpu"} and chosen["tpu"] in NAMES and ":" not in str(backend):
            chosen["cpu"] = c10d.Backend.GLOO

    # PyTorch has no other place to say that tensors on the CPU go by gloo.
    config.__init__ = init
