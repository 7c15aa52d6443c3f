"""The program builder: asks the providers of a mode in turn for the program of a segment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tpu_core.cache.store import ExecutableStore
from tpu_core.cache.tiers import TieredStore
from tpu_core.compiler import state_init
from tpu_core.compiler.context import BuildContext, ExactPrograms
from tpu_core.compiler.host_parts import HostKernels
from tpu_core.compiler.programs import (
    Program,
    compiling_is_allowed,
    segment_failed,
    source_versions,
)
from tpu_core.compiler.providers import Part, ProgramProvider, ProgramRequest, ProviderFactory
from tpu_core.compiler.segment import Segment, write_dot
from tpu_core.compiler.spanning import SpanningPrograms
from tpu_core.interruptible import wait_for
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.padded_array import exact


class ProgramBuilder:
    """Builds programs for one client.

    Args:
        client: The PJRT client.
        store: The cache beyond this process, or None.
        watch: `tpu_core.verification.watch`.

    Attributes:
        context: Shared by the providers.
    """

    def __init__(
        self,
        client: pjrt.Client,
        store: ExecutableStore | TieredStore | None,
        watch: Callable[[Program, Segment, pjrt.Client, Callable[[str], None]], Program],
    ) -> None:
        self._watch = watch
        self.context = BuildContext(client, store)
        self._first = (SpanningPrograms(), HostKernels(self.context))
        self._last = (ExactPrograms(self.context),)
        self._made: dict[ProviderFactory, ProgramProvider] = {}
        self._lock = threading.Lock()

    def provider(self, factory: ProviderFactory) -> ProgramProvider:
        """The provider that a factory makes, for this client the same each time."""
        if factory not in self._made:
            with self._lock:
                if factory not in self._made:
                    self._made[factory] = factory(self.context)
        return self._made[factory]

    def _providers(
        self, factories: Sequence[ProviderFactory] | None, is_piece: bool = False
    ) -> list[ProgramProvider]:
        policies = map(self.provider, factories or ())
        asked = (p for p in policies if p.serves_pieces or not is_piece)
        return [*self._first, *asked, *self._last]

    def build(
        self,
        exported: dict[str, Any],
        arrays: list[Any],
        factories: Sequence[ProviderFactory] | None = None,
        missing: Callable[[], list[tuple[str, int]]] | None = None,
        may_be_divided: bool = False,
    ) -> Program | list[Part] | None:
        """A program for an exported segment, from the first provider that has one.

        Args:
            exported: The segment, from the extension.
            arrays: Its inputs.
            factories: Providers of the mode, if it has any.
            missing, may_be_divided: As of `ProgramRequest`.

        Returns:
            The program; None where the segment is to run op by op; a list where it is to run in
            parts.

        Raises:
            CompilationError: A lowering or XLA failed; the error names op and line.
            RecompilationError: It would have to be compiled, and that is forbidden.
        """
        segment = Segment.from_export(exported)
        is_piece = exported.get("is_piece", False)
        providers = self._providers(factories, is_piece)
        request = ProgramRequest(
            segment,
            exported,
            arrays,
            missing,
            may_be_divided,
            is_piece=is_piece,
            providers=providers,
        )
        for provider in providers:
            answer = provider.provide(request)
            if answer is None:
                continue
            if not isinstance(answer, Program):
                return answer or None
            if not provider.is_verified:
                return answer
            return self._watch(answer, request.segment, self.context.client, self.context.drop)
        raise AssertionError("the last provider compiles whatever comes")

    def due(self, segment_key: str, factories: Sequence[ProviderFactory] | None) -> bool:
        """Return whether to ask again for the program of a segment that runs op by op."""
        if not compiling_is_allowed():
            return True
        return all(provider.due(segment_key) for provider in self._providers(factories))

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """The extension's questions that are about segments."""
        return {
            "compile": self.build,
            "program_due": self.due,
            "new_state": state_init.of_export,
            "segment_failed": segment_failed,
            "dump_graph": write_dot,
            "inspect": self._inspect,
        }

    @staticmethod
    def versions() -> str:
        """Versions of everything that decides what a recorded op means."""
        return source_versions()

    def _inspect(
        self,
        exported: dict[str, Any],
        inputs: list[Any],
        outputs: list[Any],
        inspect: Callable[[Segment, list[Any], list[Any]], None] | None,
    ) -> None:
        """Wait for a segment's results, and show them to the mode."""
        for a in outputs:
            wait_for(a)
            a.block_until_ready()
        if inspect is not None:
            device = self.context.client.devices[exported["device"]]
            inputs, outputs = ([exact(a, device) for a in s] for s in (inputs, outputs))
            inspect(Segment.from_export(exported), inputs, outputs)

    def close(self) -> None:
        """End what runs in the background."""
        with self._lock:
            made = list(self._made.values())
        for provider in made:
            provider.close()
