"""Programs of a group's collectives: written for a call's shapes, compiled once and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from tpu_core.extend import Loaded, obtain_program, runtime, to_numpy_dtype
from tpu_distributed.executors import CollectiveExecutor, HostExecutor, OnDevices
from tpu_distributed.reductions import Reduction
from tpu_distributed.rendezvous import CollectiveCall, Rendezvous
from tpu_distributed.slices import Groups, OnWholeSlice, Whole
from tpu_distributed.stablehlo import DTYPES, ProgramWriter, Value, element_of
from tpu_distributed.traced_collectives import TracedCollective

Tensors = Sequence[torch.Tensor]
# Adds a collective to a program, given its parameters; returns its results.
Build = Callable[[ProgramWriter, list[Value]], list[Value]]


class CollectivePrograms:
    """Executors and traced ops of one group's collectives, by call and shapes.

    Args:
        control: Agrees with the other ranks.
        devices: JAX devices of the ranks.
        whole: Span of the programs, if more than the devices.
    """

    def __init__(self, control: Rendezvous, devices: Sequence[Any], whole: Whole | None) -> None:
        self._control, self._devices, self._whole = control, devices, whole
        self._executors: dict[Any, CollectiveExecutor] = {}
        self._traced: dict[Any, TracedCollective] = {}

    def executor(
        self,
        call: CollectiveCall,
        inputs: Tensors,
        build: Build,
        written: Tensors,
        on_hosts: Reduction | None = None,
    ) -> CollectiveExecutor:
        """The executor of a collective by itself.

        Args:
            call: Signature that all ranks agree on.
            inputs: Tensors of the parameters' shapes and dtypes; their values are not read.
            build: Writes the program; it is called once for each ``call``.
            written: Tensors of the first results' shapes.
            on_hosts: Reduction that the hosts may carry out in its place.
        """
        key = _key(call, inputs, written)
        executor = self._executors.get(key)
        if executor is None:
            executor = self._executors[key] = self._made(call, inputs, build, on_hosts)
        return executor

    def traced(
        self,
        call: CollectiveCall,
        inputs: Tensors,
        build: Build,
        written: Tensors,
        on_hosts: Reduction | None,
    ) -> TracedCollective:
        """The collective as an op of a larger program; the arguments are those of `executor`."""
        key = _key(call, inputs, written)
        traced = self._traced.get(key)
        if traced is None:
            p, results = _built(inputs, build, self._control.size)
            outputs = tuple((r.shape, DTYPES[r.element]) for r in results)
            like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs]
            results_like = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in written]
            executor = partial(self.executor, call, like, build, results_like, on_hosts)
            traced = TracedCollective(call, p.text(results), outputs, executor)
            self._traced[key] = traced
        return traced

    def _made(
        self, call: CollectiveCall, inputs: Tensors, build: Build, on_hosts: Reduction | None
    ) -> CollectiveExecutor:
        client = runtime().client
        if self._whole:
            make = partial(self._program, call, inputs, build, self._whole.world.devices)
            return OnWholeSlice(self._whole, cache(lambda groups: make(groups=groups)))
        has_hosts = client.platform.name == "cpu" and self._control.size > 1
        if on_hosts and has_hosts and HostExecutor.serves(on_hosts, inputs[0].dtype):
            device = client.devices[0]
            take = partial(self._program, call, inputs, _unchanged, [device], takes=True)
            return HostExecutor(self._control, on_hosts, inputs[0], take, device)
        return OnDevices(self._program(call, inputs, build, self._devices))

    def _program(
        self,
        call: CollectiveCall,
        inputs: Tensors,
        build: Build,
        devices: Sequence[Any],
        takes: bool = False,
        groups: Groups | None = None,
    ) -> Loaded:
        size = self._control.size if groups else len(devices)
        p, results = _built(inputs, build, size, groups)
        outputs = [(r.shape, to_numpy_dtype(DTYPES[r.element])) for r in results]
        text = partial(p.text, results, takes)
        return obtain_program(runtime(), devices, str(call), text, outputs)


def _built(
    inputs: Tensors, build: Build, size: int, groups: Groups | None = None
) -> tuple[ProgramWriter, list[Value]]:
    p = ProgramWriter(size, groups, not runtime().client.has_fault("racing-reduce-scatter"))
    return p, build(p, [p.parameter(tuple(x.shape), element_of(x.dtype)) for x in inputs])


def _key(call: CollectiveCall, inputs: Tensors, written: Tensors) -> Any:
    """Key of a program: ranks may want equal results in different shapes."""
    return call, *[(x.shape, x.dtype) for x in inputs], *[x.shape for x in written]


def _unchanged(p: ProgramWriter, xs: list[Value]) -> list[Value]:
    return xs
