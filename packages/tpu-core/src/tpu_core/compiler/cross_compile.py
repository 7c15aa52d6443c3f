"""Cross compilation: programs of this process compiled for a TPU topology as well, and cached.

``tpu cache warm --topology v5e:1x1 SCRIPT`` runs a script on the platform at hand. Each program
that it needs is lowered for a chip of the topology too, compiled by a `TopologyCompiler`, and put
into the cache under the key that a process on that chip will ask for. That a chip loads what was
compiled so is not tested: no TPU was at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from tpu_core.cache.fingerprint import fingerprint
from tpu_core.errors import ConfigurationError, NotPaddableError
from tpu_core.lowering.implementations import Target
from tpu_core.pjrt.chips import AbstractChip
from tpu_core.pjrt.client import version_of

GROUP = "tpu_core.topology_compilers"


class TopologyCompiler(Protocol):
    """A compiler for TPUs that are not attached, found by entry point.

    Attributes:
        kind: Generation of the chips, ``"TPU v5e"``.
        device: Id of the device that programs are compiled for.
    """

    kind: str
    device: int

    def compile(self, module: bytes) -> tuple[bytes, str]:
        """Compile StableHLO bytecode for one device; called by another thread, one at a time.

        Returns:
            The serialized executable, and libtpu's version as the platform's client gives it.

        Raises:
            TpuError: libtpu refused the program.
        """


def topology_compiler(topology: str) -> TopologyCompiler:
    """The compiler for a topology that an installed package offers.

    Args:
        topology: As in ``"v5e:1x1"``.

    Raises:
        ConfigurationError: No installed package compiles for topologies.
        UnknownTopologyError: There is no such topology.
    """
    for point in entry_points(group=GROUP):
        made: TopologyCompiler = point.load()(topology)
        return made
    raise ConfigurationError(
        f"No installed package compiles for the topology {topology}.",
        remedy="pip install tpu-compile",
    )


@dataclass
class CrossCompiler:
    """Compiles for a topology what this process compiles or loads for its own platform.

    Attributes:
        topology: Name of the topology.
        compiler: The compiler.
        put: Stores an executable: its key, its bytes and a manifest.
        compiled: Size in bytes of each executable, by its key in the cache.
        failed: Error of each program that could not be compiled.
    """

    topology: str
    compiler: TopologyCompiler
    put: Callable[[str, bytes, dict[str, Any]], object]
    compiled: dict[str, int] = field(default_factory=dict)
    failed: list[Exception] = field(default_factory=list)
    _parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    _added: set[str] = field(default_factory=set)
    _data: dict[str, tuple[dict[str, Any], bytes, dict[str, Any]]] = field(default_factory=dict)
    _platform: str = ""
    _futures: list[Future[None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # One at a time: libtpu compiles on all cores.
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def note(self, key: str, parts: dict[str, Any]) -> None:
        """Keep what a key of this platform was made of, for the key of the other one."""
        with self._lock:
            self._parts.setdefault(key, parts)

    def add(self, key: str, lower: Callable[[], bytes], manifest: dict[str, Any]) -> None:
        """Lower a program for the topology now, and compile it in the background."""
        with self._lock:
            parts = self._parts.get(key)
            if parts is None or key in self._added:
                return
            self._added.add(key)
        chip = self.compiler.kind
        try:
            with Target("tpu", kind=chip).applied(), AbstractChip(chip).tracing():
                module = lower()
        except NotPaddableError:  # nor is it on the platform at hand, which takes another program
            return
        except Exception as error:
            self.failed.append(error)
            return
        self._futures.append(self._pool.submit(self._compile, module, parts, manifest))

    def add_data(self, key: str, payload: bytes, manifest: dict[str, Any]) -> None:
        """Store what belongs to programs and is the same for the topology, by its key there."""
        with self._lock:
            parts = self._parts.get(key)
            if parts is not None:
                self._data[key] = (parts, payload, manifest)

    def _compile(self, module: bytes, parts: dict[str, Any], manifest: dict[str, Any]) -> None:
        try:
            executable, version = self.compiler.compile(module)
        except Exception as error:
            self.failed.append(error)
            return
        self._platform = version_of("tpu", version)
        self.compiled[self._put(parts, executable, manifest)] = len(executable)

    def _put(self, parts: dict[str, Any], payload: bytes, manifest: dict[str, Any]) -> str:
        platform = self._platform
        key = fingerprint(**parts, device=self.compiler.device, platform=platform)
        self.put(key, payload, {**manifest, "platform": platform})
        return key

    def wait(self) -> None:
        """Wait for the compiles under way, and store what belongs to them."""
        for future in self._futures:
            future.result()
        # The key has libtpu's version, which is known once it has compiled.
        for parts, payload, manifest in self._data.values() if self._platform else ():
            self._put(parts, payload, manifest)


_active: CrossCompiler | None = None


def active() -> CrossCompiler | None:
    """The cross compiler of the innermost `compiling` block, in any thread."""
    return _active


@contextmanager
def compiling(cross: CrossCompiler) -> Iterator[None]:
    """Hand each program that is obtained in the block to a cross compiler."""
    global _active
    before, _active = _active, cross
    try:
        yield
    finally:
        _active = before
