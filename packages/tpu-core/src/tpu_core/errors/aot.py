"""Errors of compiling ahead of time for a TPU topology (`tpu_compile.aot`)."""

from __future__ import annotations

from tpu_core.errors.base import TpuError


class UnknownTopologyError(TpuError, ValueError):
    """A name is not that of a TPU topology.

    **How it happens.** `tpu_compile.aot(topology=...)` or `tpu aot --topology` was given a
    generation that libtpu does not know, or a shape it cannot have: v2, v3, v5e and v6e are
    two-dimensional, v4, v5p and tpu7x three-dimensional, and slices of several hosts are made of
    whole hosts.

    ```console
    $ tpu aot train.py --topology v5e-8
    UnknownTopologyError: [TPU1040] 'v5e-8' is not a TPU topology: ...
    ```

    **How to fix it.** Write the generation, a colon and the number of chips along each dimension:
    `v5e:2x4`, `v5p:4x4x4`, `tpu7x:2x2x1`.
    """

    code = "TPU1040"
    remedy = "Name a topology as in 'v5e:4x4' or 'v5p:4x4x4'."


class MeshError(TpuError, ValueError):
    """A mesh does not fit its topology, or a sharding does not fit the mesh.

    **How it happens.** The sizes of the mesh's axes do not multiply to the topology's number of
    devices (v2, v3, v4 and tpu7x chips count as two devices each), a sharding names an axis that
    the mesh does not have or names one twice, or a dimension is not a multiple of what it is
    divided by.

    ```pycon
    >>> tpu_compile.aot(model, (x,), topology="v5e:2x2", mesh={"data": 8})
    MeshError: [TPU1041] The mesh has 8 devices, and v5e:2x2 has 4.
    ```

    **How to fix it.** Choose axes whose sizes multiply to the number of devices that the message
    names, and shard dimensions that they divide.
    """

    code = "TPU1041"
    remedy = "Choose axes whose sizes multiply to the topology's number of devices."


class TopologyCompilationError(TpuError):
    """libtpu could not compile a program for a topology.

    **How it happens.** libtpu refused the program, or ended the process that it ran in: some inputs
    abort it, and then its last lines are in the message. It runs in a process of its own, so the
    program that asked goes on.

    ```console
    TopologyCompilationError: [TPU1042] libtpu ended while compiling for v5p:16x16x16 (SIGABRT).
    ```

    **How to fix it.** Where the process was killed (SIGKILL), the machine ran out of memory: use
    fewer devices, or scan equal layers (`scan=True`). Else read libtpu's lines: they mostly name
    the instruction. Try a neighbouring topology or another mesh; `TPU_DUMP=folder` keeps the
    program for a report.
    """

    code = "TPU1042"
    remedy = (
        "Try another mesh or a neighbouring topology; TPU_DUMP=<folder> keeps the program for a "
        "report."
    )


class LibtpuMissingError(TpuError, ImportError):
    """libtpu is not installed.

    **How it happens.** Compiling for TPUs needs Google's compiler, a package of its own. No TPU is
    needed.

    ```console
    LibtpuMissingError: [TPU1043] libtpu is not installed.
    ```

    **How to fix it.** `pip install "tpu-compile[aot]"` installs the version that jax names.
    """

    code = "TPU1043"
    remedy = 'pip install "tpu-compile[aot]"'


class DataDependentError(TpuError):
    """A program depends on values, so that it cannot be compiled ahead of time.

    **How it happens.** What is compiled ahead of time is traced without values. A line that reads
    one (`.item()`, `if tensor:`, `x[mask]`, `nonzero`) has no answer then.

    ```console
    DataDependentError: [TPU1044] The program depends on the values of a tensor.
      at model.py:31
    ```

    **How to fix it.** Keep the decision on the device: `torch.where(mask, a, b)` instead of `if`
    or `x[mask]`. Move what only logs out of the model and the loss.
    """

    code = "TPU1044"
    remedy = "Keep the decision on the device, as torch.where does, or move the line out."
