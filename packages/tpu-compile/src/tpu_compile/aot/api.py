"""`aot`: from a model to a plan, stage by stage."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from tpu_compile.aot.plan import Plan
from tpu_compile.aot.sharding import Axes, Rules, check_mesh

STAGES = ("tracing", "lowering", "compiling", "reading the program")
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""


def aot(
    model: torch.nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any],
    *,
    topology: str = "v5e:2x2",
    mesh: Mapping[str, int] | None = None,
    shardings: Rules = None,
    batch: Axes | Sequence[Axes] = "auto",
    loss: str | Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    step: Callable[..., Any] | None = None,
    scan: bool | str = "auto",
    remat: bool = False,
    progress: bool | Progress = False,
) -> Plan:
    """Compile a model ahead of time for a TPU topology; report memory and cost.

    The model and its inputs may be on any device, ``meta`` included: no parameter is read, and none
    is made. Without ``loss``, ``optimizer`` and ``step`` its forward pass is compiled, with a loss
    forward and backward, with an optimizer the whole training step.

    Args:
        model: The model, in the mode (`train` or `eval`) that it is to run in; also one under
            `DistributedDataParallel`, `fully_shard` or `parallelize_module`, whose hooks then do
            not communicate, but say how tensors are divided.
        example_args: Its inputs: positional ones, or a mapping of keyword ones.
        topology: Generation and chips, ``"v5e:2x2"``, ``"v5p:4x4x4"``, ``"tpu7x:2x2x1"``.
        mesh: Size of each axis; that of the model's DTensors, or one axis ``data`` over all devices
            by default. The sizes multiply to the number of devices: v2, v3, v4 and tpu7x have two a
            chip.
        shardings: Shardings of parameters and buffers: a mapping of patterns of names to an
            axis a dimension (``{"*.up.weight": ("model", None)}``) or to placements by axis
            (``{"*": {"data": Shard(0)}}``), or a function such as `fsdp`. DTensors bring their own.
            What no rule names is on every device. Optimizer state follows its parameters.
        batch: The axis that divides the first dimension of the inputs, or an axis a dimension, None
            for inputs that are on every device; ``"data"`` where the mesh has it by default.
        loss: Name of a method of the model, or a function of the model and its inputs; the
            ``loss`` of the model's output, or the output itself, where only an optimizer is given.
        optimizer: A `torch.optim.Optimizer` of the model's parameters, or what makes one of them.
        step: A function ``step(model, optimizer, *inputs)`` with backward and update in it
            (``step(model, *inputs)`` without optimizer), for what ``loss`` cannot say.
        scan: Whether equal layers of a container are compiled as one loop, so that compiling takes
            as long for 80 as for one: ``"auto"`` from 6 layers on, True from 2, False never.
        remat: Keep only the inputs of scanned layers for the backward pass. Layers that ask for
            gradient checkpointing, as those of transformers do, need not say so again.
        progress: Show a bar with the stages, or a function that is called with their names.

    Returns:
        The plan. Where the program does not fit, its ``fits`` is False, and ``memory.missing``
        says by how much.

    Raises:
        UnknownTopologyError, MeshError: There is no such topology; mesh or shardings do not fit it.
        DataDependentError: The program depends on values; names the line.
        UnsupportedOpError: An op cannot be lowered.
        LibtpuMissingError: ``pip install "tpu-compile[aot]"``.
        KernelCompilationError: A Pallas kernel breaks a rule of Mosaic's; says which.
        TopologyCompilationError: libtpu refused the program, or ended its process.

    Example:
        >>> with torch.device("meta"):
        ...     model = GPT(layers=80, dim=8192)
        ...     ids = torch.empty(64, 4096, dtype=torch.int64)
        >>> plan = tpu_compile.aot(
        ...     model,
        ...     (ids, ids),
        ...     topology="v5p:4x4x4",
        ...     mesh={"data": 16, "model": 4},
        ...     shardings=fsdp("data", {"*.up.weight": ("model", None)}),
        ...     loss="loss",
        ...     optimizer=torch.optim.AdamW,
        ... )
        >>> plan.fits
        True
    """
    (plan,) = sweep(
        model,
        example_args,
        targets=[(topology, mesh)],
        shardings=shardings,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        step=step,
        scan=scan,
        remat=remat,
        progress=progress,
    )
    return plan


def sweep(
    model: torch.nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any],
    *,
    targets: Sequence[tuple[str, Mapping[str, int] | None]],
    workers: int = 1,
    progress: bool | Progress = False,
    **options: Any,
) -> list[Plan]:
    """Plans for several topologies.

    Args:
        model, example_args: See `aot`.
        targets: Topology and mesh of each plan.
        workers: Programs that libtpu compiles at once, each in a process of its own.
        progress, options: See `aot`.
    """
    from tpu_compile.aot.chips import parse_topology
    from tpu_compile.aot.parallelism import mesh_of, unwrapped
    from tpu_compile.aot.process import require_libtpu

    parsed = [parse_topology(name) for name, _ in targets]
    model = unwrapped(model)
    own = mesh_of(model)
    meshes = [check_mesh(mesh or own, topology) for (_, mesh), topology in zip(targets, parsed)]
    require_libtpu()
    with _progress(progress, len(targets)) as report, ThreadPoolExecutor(workers) as pool:
        waiting = []
        for topology, mesh in zip(parsed, meshes):
            # Tracing holds the GIL and PyTorch's global modes: one after the other.
            finish = _prepare(model, example_args, topology, mesh, report, **options)
            waiting.append(pool.submit(finish))
        return [future.result() for future in waiting]


def _prepare(
    model: torch.nn.Module,
    example_args: Sequence[Any] | Mapping[str, Any],
    topology: Any,
    mesh: Mapping[str, int],
    report: Progress,
    scan: bool | str = "auto",
    remat: bool = False,
    **options: Any,
) -> Callable[[], Plan]:
    """Trace and lower; what is returned compiles."""
    from tpu_compile.aot.build import build
    from tpu_compile.aot.capture import AotJob
    from tpu_compile.aot.layers import capture_scanned
    from tpu_compile.aot.lower import lower
    from tpu_compile.aot.process import compile_program
    from tpu_core.extend import AbstractChip, load_lowerings, runtime

    runtime()  # jax must not look for platforms of its own
    load_lowerings()
    keywords = isinstance(example_args, Mapping)
    job = AotJob(
        model,
        () if keywords else tuple(example_args),
        dict(example_args) if isinstance(example_args, Mapping) else {},
        mesh,
        **options,
    )
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        report(name)
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    # A JAX function may ask for the chip while it is traced.
    with stage("tracing"), AbstractChip(topology.chip.kind).tracing():
        captured, runs, notes = capture_scanned(job, scan, remat)
    with stage("lowering"):
        program, kernels = lower(captured, mesh, topology.chip.kind)

    def finish() -> Plan:
        with stage("compiling"):
            outcome = compile_program(program, topology, mesh)
        with stage("reading the program"):
            all_notes = [*notes, *captured.notes]
            return build(
                job, captured, topology, outcome, program, kernels, runs, all_notes, seconds
            )

    return finish


@contextmanager
def _progress(wanted: bool | Progress, programs: int) -> Iterator[Progress]:
    if callable(wanted):
        yield wanted
    elif not wanted:
        yield lambda stage: None
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        total, done = len(STAGES) * programs, -1
        console = Console(stderr=True)
        if not console.is_terminal:  # a log, where a bar that moves shows nothing
            yield _lines(total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=total)

            def report(stage: str) -> None:
                nonlocal done
                done += 1
                bar.update(task, description=stage, completed=done)

            yield report


def _lines(total: int) -> Progress:
    """A line of stderr for each stage as it begins: ``[ 3/8] 12.4 s compiling``."""
    began, numbers = time.perf_counter(), itertools.count(1)

    def report(stage: str) -> None:
        seconds = time.perf_counter() - began
        number = str(next(numbers)).rjust(len(str(total)))
        print(f"[{number}/{total}] {seconds:6.1f} s  {stage}", file=sys.stderr, flush=True)

    return report
