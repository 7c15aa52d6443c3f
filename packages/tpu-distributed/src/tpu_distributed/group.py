"""The collectives of one group of ranks, as c10d calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed import PrefixStore

from tpu_core.errors import CollectiveMismatchError
from tpu_core.extend import DeviceValue, hide_lines_of
from tpu_distributed import messages, ragged, spmd_region, traced_collectives
from tpu_distributed._C import make_backend
from tpu_distributed.arguments import require_items, require_peer, require_root
from tpu_distributed.collective_programs import Build, CollectivePrograms, Tensors
from tpu_distributed.dispatcher import SENDER, Task
from tpu_distributed.executors import CollectiveExecutor
from tpu_distributed.flight_records.recorder import Record
from tpu_distributed.reductions import Reduction
from tpu_distributed.rendezvous import CollectiveCall, Rendezvous
from tpu_distributed.slices import Whole, whole_of
from tpu_distributed.stablehlo import DTYPES, ProgramWriter, Value, numel
from tpu_distributed.traced_collectives import GROUPS
from tpu_distributed.work import CoalescedWork, Collective, CompletedWork, Written

hide_lines_of(__file__)

Lists = Sequence[Tensors]
# Seconds to wait for the other ranks, None for the group's; and whether the caller goes on at once.
Options = tuple[float | None, bool]

# Ranks do different things with what these read or write: they are never parts of one program.
_ROOTED = frozenset({"reduce", "gather", "scatter"})


class Group:
    """Implementation of c10d's collectives for a c10d backend in C++.

    Args:
        control: Agrees with the other ranks.
        devices: JAX devices of the ranks.
        whole: Span of its programs, if more than its devices.
    """

    def __init__(
        self, control: Rendezvous, devices: Sequence[Any], whole: Whole | None = None
    ) -> None:
        self.control, self.whole = control, whole
        self.rank, self.size = control.rank, control.size
        self.devices = list(devices)
        self._programs = CollectivePrograms(control, self.devices, whole)
        self._known: dict[Any, tuple[CollectiveCall, CollectiveExecutor | None]] = {}
        self._coalesced: list[CompletedWork] | None = None
        self._is_open = True
        GROUPS[control.label] = self
        SENDER.start()

    # Collectives, in c10d's order of arguments.

    def broadcast(self, tensors: Tensors, root: int, options: Options) -> CompletedWork:
        """Each tensor of the root's to all ranks."""
        require_root(self, "broadcast", root, options[0])

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            return [_broadcast(p, x, root) for x in xs]

        return self._run("broadcast", f"from {root}", tensors, build, tensors, options)

    def all_reduce(self, tensors: Tensors, op: Any, options: Options) -> CompletedWork:
        """Each tensor reduced over all ranks, in place."""
        reduction = Reduction.of(op)

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            return [reduction.all_reduce(p, x) for x in xs]

        on_hosts = reduction if len(tensors) == 1 else None
        return self._run("all_reduce", reduction.text, tensors, build, tensors, options, on_hosts)

    def reduce(self, tensors: Tensors, op: Any, root: int, options: Options) -> CompletedWork:
        """As `all_reduce`, with the results on the root alone."""
        require_root(self, "reduce", root, options[0])
        reduction = Reduction.of(op)

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            return [reduction.all_reduce(p, x) for x in xs]

        written = tensors if self.rank == root else []
        return self._run("reduce", f"{reduction} to {root}", tensors, build, written, options)

    def all_gather(self, outputs: Lists, inputs: Tensors, options: Options) -> CompletedWork:
        """Each input of every rank to all, as lists with an item a rank."""
        require_items(self, "all_gather", "output", outputs, options[0])
        if any(x.shape != outs[self.rank].shape for outs, x in zip(outputs, inputs)):
            raise ValueError("all_gather: the output of this rank must have the input's shape.")
        if any(o.shape != outs[0].shape for outs in outputs for o in outs):
            return self._done(ragged.all_gather(self, outputs, inputs, options[0]))

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            gathered = [p.all_gather(x) for x in xs]
            return [p.row(g, i) for g in gathered for i in range(self.size)]

        written = [o for outs in outputs for o in outs]
        return self._run("all_gather", "", inputs, build, written, options)

    def all_gather_into_tensor(
        self, outputs: Tensors, inputs: Tensors, options: Options
    ) -> CompletedWork:
        """Each input of every rank to all, one after the other in one tensor."""
        shapes = [tuple(o.shape) for o in outputs]
        self._require(inputs, outputs, self.size, "all_gather_into_tensor")

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            return [p.reshape(p.all_gather(x), s) for x, s in zip(xs, shapes)]

        return self._run("all_gather_into_tensor", "", inputs, build, outputs, options)

    def gather(self, outputs: Lists, inputs: Tensors, root: int, options: Options) -> CompletedWork:
        """The inputs of every rank to the root."""
        require_root(self, "gather", root, options[0])
        lists = outputs if self.rank == root else ()
        require_items(self, "gather", "output", lists, options[0])

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            gathered = [p.all_gather(x) for x in xs]
            return [p.row(g, i) for g in gathered for i in range(self.size)]

        written = [o for outs in outputs for o in outs] if self.rank == root else []
        return self._run("gather", f"to {root}", inputs, build, written, options)

    def scatter(
        self, outputs: Tensors, inputs: Lists, root: int, options: Options
    ) -> CompletedWork:
        """Of the root's list for each output, item ``i`` to rank ``i``."""
        require_root(self, "scatter", root, options[0])
        lists = inputs if self.rank == root else ()
        require_items(self, "scatter", "input", lists, options[0])
        (output,) = outputs
        rows = list(inputs[0]) if self.rank == root else [torch.zeros_like(output)] * self.size

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            return [p.row(p.all_to_all(p.stack(xs)), root)]

        return self._run("scatter", f"from {root}", rows, build, outputs, options)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Lists, op: Any, options: Options
    ) -> CompletedWork:
        """Of each list, item ``i`` reduced over all ranks to rank ``i``."""
        require_items(self, "reduce_scatter", "input", inputs, options[0])
        reduction = Reduction.of(op)
        if any(x.shape != xs[0].shape for xs in inputs for x in xs):
            return self._done(ragged.reduce_scatter(self, outputs, inputs, reduction, options[0]))

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            lists = [xs[i : i + self.size] for i in range(0, len(xs), self.size)]
            return [reduction.reduce_scatter(p, p.stack(items)) for items in lists]

        flat = [x for xs in inputs for x in xs]
        return self._run("reduce_scatter", str(reduction), flat, build, outputs, options)

    def reduce_scatter_tensor(
        self, outputs: Tensors, inputs: Tensors, op: Any, options: Options
    ) -> CompletedWork:
        """Of each input, part ``i`` of as many as there are ranks, reduced, to rank ``i``."""
        reduction = Reduction.of(op)
        shapes = [tuple(o.shape) for o in outputs]
        self._require(outputs, inputs, self.size, "reduce_scatter_tensor")

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            rows = [p.reshape(x, (self.size, *s)) for x, s in zip(xs, shapes)]
            return [reduction.reduce_scatter(p, r) for r in rows]

        name = "reduce_scatter_tensor"
        return self._run(name, str(reduction), inputs, build, outputs, options)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        options: Options,
    ) -> CompletedWork:
        """Part ``i`` of the input to rank ``i``; sizes count in the first dim."""
        if output_sizes or input_sizes:
            sizes = (output_sizes, input_sizes)
            return self._done(ragged.all_to_all_single(self, output, input, *sizes, options[0]))
        shape = tuple(output.shape)
        if input.numel() != output.numel() or input.shape[0] % self.size:
            text = (
                f"all_to_all_single: an input of {list(input.shape)} cannot be split evenly over "
                f"{self.size} ranks into {list(shape)}."
            )
            self.refuse("all_to_all_single", ValueError(text), options[0])

        def build(p: ProgramWriter, xs: list[Value]) -> list[Value]:
            rows = p.reshape(xs[0], (self.size, numel(shape) // self.size))
            return [p.reshape(p.all_to_all(rows), shape)]

        return self._run("all_to_all_single", "", [input], build, [output], options)

    def refuse(self, kind: str, error: Exception, timeout: float | None) -> NoReturn:
        """Raise what this rank's arguments are refused with, once the other ranks, which wait for
        it, know.

        Args:
            kind: Of the collective.
            error: The exception.
            timeout: Seconds to wait for the others.
        """
        with contextlib.suppress(CollectiveMismatchError):
            record, _ = self.agree(CollectiveCall(kind, "refused"), timeout)
            record.finish()
        raise error

    def all_to_all(self, outputs: Tensors, inputs: Tensors, options: Options) -> CompletedWork:
        """Input ``i`` to rank ``i``."""
        require_items(self, "all_to_all", "output", [outputs], options[0])
        require_items(self, "all_to_all", "input", [inputs], options[0])
        return self._done(ragged.all_to_all(self, outputs, inputs, options[0]))

    def barrier(self, options: Options) -> CompletedWork:
        """Wait until all ranks are here and have computed what they recorded before."""
        torch.accelerator.synchronize()
        record, _ = self.agree(CollectiveCall("barrier"), options[0])
        record.finish()
        return self._done(CompletedWork([]))

    def monitored_barrier(self, options: Options, wait_all: bool) -> None:
        """As `barrier`; a time-out names the ranks that are missing."""
        self.barrier(options)

    # Messages between two ranks.

    def send(self, tensors: Tensors, to: int, tag: int) -> CompletedWork:
        """A tensor to one rank."""
        require_peer(self, "send", to)
        traced_collectives.run_recorded()
        return self._done(messages.send(self.control, tensors[0], to, tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> CompletedWork:
        """A tensor from one rank, or from any: -1."""
        if source != -1:
            require_peer(self, "recv", source)
        traced_collectives.run_recorded()
        return self._done(messages.receive(self.control, tensors[0], source, tag))

    # The group itself.

    def start_coalescing(self) -> None:
        """Start a group of collectives that become one Work."""
        self._coalesced = []

    def end_coalescing(self) -> CompletedWork:
        """The work of everything since `start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def sequence_number(self) -> int:
        """Number of collectives called."""
        return self.control.sequence

    def set_timeout(self, seconds: float | None) -> None:
        """Change how long collectives wait for other ranks."""
        if seconds is not None:
            self.control.set_timeout(seconds)

    def split(self, store: Any, ranks: Sequence[int], timeout: float | None, name: str) -> Any:
        """A backend for some ranks of this group; None where this one is not among them."""
        if self.rank not in ranks:
            return None
        seconds = timeout or self.control.timeout
        own, size = list(ranks).index(self.rank), len(ranks)
        members = [self.control.ranks[r] for r in ranks]
        # gloo has keys of its own in the same store, for CPU tensors; and as in `backend.create`
        # the store may outlive the groups in it.
        times = store.add(f"tpu made by {own}", 1)
        store = PrefixStore(f"tpu/{times}/", store)
        control = Rendezvous(store, name, own, size, seconds, members)
        whole = whole_of(members, own)
        group = Group(control, [self.devices[r] for r in ranks], whole)
        return make_backend(own, size, "tpu", seconds, group)

    def abort(self) -> None:
        """Give the group up: others that wait for this rank get an error."""
        self.control.close()
        self._close(wait=False)

    def shutdown(self) -> None:
        """End the group; all ranks are expected to."""
        self._close(wait=True)
        self.control.close()

    def _close(self, wait: bool) -> None:
        if self._is_open:
            self._is_open = False
            if wait:
                traced_collectives.run_recorded()
            traced_collectives.forget(self)
            SENDER.stop(wait)

    def agree(
        self,
        call: CollectiveCall,
        timeout: float | None = None,
        payload: np.ndarray[Any, Any] | None = None,
    ) -> tuple[Record, Sequence[np.ndarray[Any, Any]]]:
        """Wait until all ranks have come to something that no program does.

        Args:
            call: The call.
            timeout: Seconds to wait for the other ranks; the group's unless given.
            payload: Bytes for the others.

        Returns:
            Its record, and the payload of each rank where there are others.
        """
        traced_collectives.run_recorded()
        with self.control.order:
            record = self.control.called(call)
            task = Task(lambda: self.control.agree(record, timeout, payload))
            SENDER.put(task, waits=True)
        return record, task.finish()

    def run(
        self,
        call: CollectiveCall,
        inputs: Tensors,
        build: Build,
        written: Tensors,
        *,
        timeout: float | None = None,
        agreed: Record | None = None,
    ) -> Collective:
        """Run a collective, and return when the ranks have agreed.

        Args:
            call: Signature that all ranks must agree on.
            inputs: Values of the program's parameters.
            build: Writes the program; it is called once for each ``call``.
            written: Tensors that get the first results.
            timeout: Seconds to wait for the other ranks; the group's unless given.
            agreed: Its record, where they have agreed before.
        """
        executor = self._programs.executor(call, inputs, build, written)
        return self._send(call, executor, inputs, written, timeout, True, agreed)

    def _run(
        self,
        kind: str,
        detail: str,
        inputs: Tensors,
        build: Build,
        written: Tensors,
        options: Options,
        on_hosts: Reduction | None = None,
    ) -> CompletedWork:
        shapes = [x.shape for x in written] if written is not inputs else ()
        key = (kind, detail, *[(x.shape, x.dtype) for x in inputs], *shapes)
        known = self._known.get(key)
        if known is None:
            call = CollectiveCall(kind, detail, tuple((tuple(x.shape), x.dtype) for x in inputs))
            known = self._known[key] = call, None
        call, executor = known
        timeout, is_async = options
        if call.is_empty:
            record, _ = self.agree(call, timeout)
            record.finish()
            return self._done(CompletedWork(written))
        if kind not in _ROOTED and spmd_region.records(self):
            what = self._programs.traced(call, inputs, build, written, on_hosts)
            traced_collectives.record(self, what, inputs, written)
            return self._done(CompletedWork(written))
        if executor is None:
            executor = self._programs.executor(call, inputs, build, written, on_hosts)
            self._known[key] = call, executor
        work = self._send(call, executor, inputs, written, timeout, not is_async)
        return self._done(work)

    def _send(
        self,
        call: CollectiveCall,
        executor: CollectiveExecutor,
        inputs: Tensors,
        written: Tensors,
        timeout: float | None,
        waits: bool,
        agreed: Record | None = None,
    ) -> Collective:
        traced_collectives.run_recorded()
        operands = [DeviceValue(x).operand() for x in inputs]
        promises: list[Written] = []
        copied = []
        for tensor in written:
            promise = DeviceValue(tensor).promise()
            if promise is None:  # it shares its storage, and gets what it is given at the end
                values = tensor.detach().new_empty(tensor.shape)
                promise = DeviceValue(values).promise()
                copied.append((tensor.detach(), values))
            assert promise is not None  # of what is new
            promises.append(promise)
        waits = waits or bool(copied)
        control = self.control
        if self.whole:
            control = self.whole.world.control
            call = replace(call, detail=f"{call.detail} in groups of {self.size}".strip())
            agreed = None  # the others of this group have, but not all that the program spans
        with control.order:
            record = agreed or control.called(call)
            work = Collective(
                written, record, control, executor, operands, promises, not agreed, timeout
            )
            SENDER.put(work, waits)
        if waits:
            work.wait(None)
        for tensor, values in copied:
            tensor.copy_(values)
        return work

    def _done(self, work: CompletedWork) -> CompletedWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _require(self, smaller: Tensors, larger: Tensors, times: int, name: str) -> None:
        for x, y in zip(smaller, larger):
            if x.numel() * times != y.numel() or x.dtype != y.dtype:
                raise ValueError(
                    f"{name}: {times} tensors of {x.dtype}{list(x.shape)} do not make one of "
                    f"{y.dtype}{list(y.shape)}."
                )


def _broadcast(p: ProgramWriter, x: Value, root: int) -> Value:
    """The value of one replica on all: a sum of integers, which keeps every bit."""
    if x.element.startswith("complex"):
        return p.row(p.all_gather(x), root)
    if x.element == "i1":
        return p.convert(p.all_reduce(p.only_from(p.convert(x, "ui8"), root), "add"), "i1")
    bits = p.bitcast(x, f"ui{8 * DTYPES[x.element].itemsize}")
    return p.bitcast(p.all_reduce(p.only_from(bits, root), "add"), x.element)
