"""``tpu launch``: start a script on the hosts of a slice, or show what that takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer

from tpu_core.extend import Platform
from tpu_distributed import job_secret
from tpu_distributed.launch import slices
from tpu_distributed.launch.environment import LaunchSpec, process_environment
from tpu_distributed.launch.slices import Slice

app = typer.Typer()


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    script: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A Python script."),
    ] = None,
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Its arguments."),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="Of a slice: v5p:2x2x2; else what the environment says.")
    ] = "",
    slice_count: Annotated[int, typer.Option("--slices", min=1, help="Number of slices.")] = 1,
    hosts: Annotated[
        str, typer.Option(help="Names of all hosts, slice after slice, with commas.")
    ] = "",
    node: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Number of this host; else what the environment says."),
    ] = None,
    nproc: Annotated[str, typer.Option(help="Processes a host; else one a device.")] = "auto",
    master_port: Annotated[int, typer.Option(help="On the first host, to meet at.")] = 29500,
    max_restarts: Annotated[int, typer.Option(help="Passed on to torchrun.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show command and environment of each process.")
    ] = False,
) -> None:
    """Start a script by torchrun, a process a device, on each host of a slice of TPUs.

    Run it on every host; on one host, or without a TPU, nothing needs to be said.
    """
    if script is None and not dry_run:
        raise typer.BadParameter("Name a script, or say --dry-run.")
    target = [str(script or "SCRIPT"), *(arguments or ())]
    job = _job(topology, slice_count, hosts, dry_run)
    options = _Options(nproc, master_port, max_restarts, target)
    if dry_run and job is not None:
        for number in range(len(job.hosts)):
            _show(job.slice, number, job.hosts[number], job.host_environment(number), options)
        return
    environ = dict(os.environ)
    if job is not None:
        if node is None:
            # Where the environment knows of other slices (JobSet's does), the job is this one.
            alone = job.slices == 1
            node = _worker(environ) if alone else _node(environ, job.slice)
        if node >= len(job.hosts):
            raise typer.BadParameter(f"There is no host {node}: there are {len(job.hosts)}.")
        environ.update(job.host_environment(node))
    slice = job.slice if job else _own_slice(environ)
    command = options.command(slice, environ)
    if dry_run:
        print(" ".join(["torchrun", *command]))
        return
    if "--standalone" in command:
        # Several hosts would each make their own.
        environ.setdefault(job_secret.VARIABLE, job_secret.create())
    run = [sys.executable, "-m", "torch.distributed.run", *command]
    os.execve(sys.executable, run, environ)


@dataclass(frozen=True)
class _Options:
    """Options of torchrun's command line on any host."""

    nproc: str
    port: int
    max_restarts: int
    target: list[str]

    def command(self, slice: Slice | None, environ: Mapping[str, str]) -> list[str]:
        """Arguments of torchrun on a host.

        Args:
            slice: The slice that the host is in; None where there is no TPU.
            environ: The host's environment.
        """
        hosts = slice.hosts if slice else 1
        nodes = hosts * int(environ.get("MEGASCALE_NUM_SLICES") or 1)
        arguments = [f"--nproc-per-node={self.nproc}"]
        if slice and self.nproc == "auto":
            arguments = [f"--nproc-per-node={slice.chips_per_host}"]
        if nodes == 1:
            arguments.append("--standalone")
        else:
            first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") or environ["TPU_WORKER_HOSTNAMES"]
            arguments += [
                f"--nnodes={nodes}",
                f"--node-rank={_node(environ, slice)}",
                f"--master-addr={first.split(',')[0].split(':')[0]}",
                f"--master-port={self.port}",
            ]
        if self.max_restarts:
            arguments.append(f"--max-restarts={self.max_restarts}")
        return [*arguments, *self.target]


def _job(topology: str, slice_count: int, hosts: str, dry_run: bool) -> LaunchSpec | None:
    """The hosts as far as they are told; None where the environment is all there is."""
    if not topology:
        if hosts or slice_count > 1:
            raise typer.BadParameter("--slices and --hosts need a --topology.")
        return None
    slice = slices.parse(topology)
    wanted = slice.hosts * slice_count
    names = [name for name in hosts.split(",") if name]
    if not names and wanted == 1:
        names = ["localhost"]
    if not names and slice_count == 1:
        names = [n for n in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if n]
    if not names and dry_run:
        names = [f"host-{i}" for i in range(wanted)]
    if len(names) != wanted:
        raise typer.BadParameter(
            f"{slice_count} slices of {topology} have {wanted} hosts; --hosts names {len(names)}."
        )
    return LaunchSpec(slice, tuple(names))


def _own_slice(environ: Mapping[str, str]) -> Slice | None:
    """The slice of this machine, by its environment; None where it has no TPU."""
    chips = Platform.find_chips(environ).count
    if not chips:
        return None
    found = slices.from_environment(environ, chips)
    if found is None:
        raise typer.BadParameter(
            "The environment does not say which slice this host is in: say --topology and --hosts."
        )
    return found


def _node(environ: Mapping[str, str], slice: Slice | None) -> int:
    """Number of this host among those of all slices."""
    number = int(environ.get("MEGASCALE_SLICE_ID") or 0)
    return number * (slice.hosts if slice else 1) + _worker(environ)


def _worker(environ: Mapping[str, str]) -> int:
    """Number of this host in its slice."""
    return int(environ.get("TPU_WORKER_ID") or 0)


def _show(slice: Slice, node: int, host: str, environ: dict[str, str], options: _Options) -> None:
    print(f"# host {node}: {host}")
    for name, value in environ.items():
        print(f"export {name}={value}")
    print(" ".join(["torchrun", *options.command(slice, environ)]))
    for local_rank in range(slice.chips_per_host):
        rank = node * slice.chips_per_host + local_rank
        print(f"# process {local_rank} of host {node}, rank {rank}")
        for name, value in process_environment(slice, environ, local_rank).items():
            print(f"{name}={value}")
    print()
