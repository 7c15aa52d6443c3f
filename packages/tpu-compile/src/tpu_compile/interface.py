"""The device interface that Dynamo uses (``torch/_dynamo/device_interface.py``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def interface() -> type[Any]:
    """The interface's class; made late, for its base is in Dynamo."""
    from torch._dynamo.device_interface import DeviceInterface

    tpu: Any = vars(torch)["tpu"]  # registered when torch is imported: no stub has it

    class TpuInterface(DeviceInterface):
        """Device ``tpu``, as `torch.tpu` has it."""

        device = tpu.device
        Event = tpu.Event
        Stream = tpu.Stream

        class Worker:
            """Interface for compile workers; there are none."""

            @staticmethod
            def set_device(device: int) -> None:
                tpu.set_device(device)

            @staticmethod
            def current_device() -> int:
                return int(tpu.current_device())

            @staticmethod
            def get_device_properties(device: Any = None) -> Any:
                return SimpleNamespace(multi_processor_count=1)

        current_device = staticmethod(tpu.current_device)
        set_device = staticmethod(tpu.set_device)
        device_count = staticmethod(tpu.device_count)
        is_available = staticmethod(tpu.is_available)
        stream = staticmethod(tpu.stream)
        current_stream = staticmethod(tpu.current_stream)
        set_stream = staticmethod(tpu.set_stream)
        synchronize = staticmethod(tpu.synchronize)
        get_device_properties = staticmethod(Worker.get_device_properties)
        memory_allocated = staticmethod(tpu.memory_allocated)

        @staticmethod
        def exchange_device(device: int) -> int:
            before = int(tpu.current_device())
            tpu.set_device(device)
            return before

        @staticmethod
        def maybe_exchange_device(device: int) -> int:
            return TpuInterface.exchange_device(device) if device >= 0 else -1

        @staticmethod
        def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
            tpu.set_stream(
                tpu.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            )

        @staticmethod
        def get_raw_stream(device_index: int) -> int:
            return 0

        @staticmethod
        def get_compute_capability(device: Any = None) -> str:
            return ""

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_dtype_supported(dtype: torch.dtype, including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return False

        @staticmethod
        def raise_if_triton_unavailable(device: Any = None) -> None:
            raise RuntimeError("Device 'tpu' does not run Triton kernels.")

    return TpuInterface
