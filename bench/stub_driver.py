"""Triton's driver without a GPU: kernels are compiled for sm_90 as they would be there, and what would be handed to the
CUDA driver is written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget

STREAM = 7  # of device 0; device n has STREAM + n


class StubDriver:
    """Stands in for ``triton.runtime.driver.active``. ``launches`` holds (kernel name, arguments of the launcher)."""

    def __init__(self, record: bool = True) -> None:
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.current = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            load_binary=lambda name, kernel, shared, device: (1, hash((name, device)), 32, 0, 1024),
            unload_module=lambda module: None,
        )

        def launcher(source: Any, metadata: Any) -> Any:
            if not record:
                return lambda *args: None
            return lambda *args: self.launches.append((metadata.name, args))

        self.launcher_cls = launcher

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
