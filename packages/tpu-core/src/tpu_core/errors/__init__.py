"""Typed errors with stable codes. The docstring of each class is its section of the docs page.

A message says what happened, the values involved, the user's line where one is known, what to do
next, and where the docs page is. `tpu_core.errors.page` writes ``docs/reference/errors.md`` from
the classes; `map_xla_error` turns XLA's status text into these classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tpu_core.errors.aot import DataDependentError as DataDependentError
from tpu_core.errors.aot import LibtpuMissingError as LibtpuMissingError
from tpu_core.errors.aot import MeshError as MeshError
from tpu_core.errors.aot import TopologyCompilationError as TopologyCompilationError
from tpu_core.errors.aot import UnknownTopologyError as UnknownTopologyError
from tpu_core.errors.base import Documented as Documented
from tpu_core.errors.base import TpuError as TpuError
from tpu_core.errors.base import TpuWarning as TpuWarning
from tpu_core.errors.base import format_bytes as format_bytes
from tpu_core.errors.distributed import CollectiveMismatchError as CollectiveMismatchError
from tpu_core.errors.distributed import CollectiveTimeoutError as CollectiveTimeoutError
from tpu_core.errors.distributed import PeerLostError as PeerLostError
from tpu_core.errors.distributed import ProcessGroupError as ProcessGroupError
from tpu_core.errors.distributed import SpmdMismatchWarning as SpmdMismatchWarning
from tpu_core.errors.export import ExportError as ExportError
from tpu_core.errors.graphs import GraphCaptureError as GraphCaptureError
from tpu_core.errors.graphs import GraphSplitWarning as GraphSplitWarning
from tpu_core.errors.graphs import NotPaddableError as NotPaddableError
from tpu_core.errors.kernels import JaxFunctionError as JaxFunctionError
from tpu_core.errors.kernels import KernelCompilationError as KernelCompilationError
from tpu_core.errors.kernels import KernelRuleError as KernelRuleError
from tpu_core.errors.performance import HostSyncWarning as HostSyncWarning
from tpu_core.errors.performance import InputPipelineWarning as InputPipelineWarning
from tpu_core.errors.processes import ForkedProcessError as ForkedProcessError
from tpu_core.errors.processes import ProcessSharingError as ProcessSharingError
from tpu_core.errors.recompilation import BackgroundCompileWarning as BackgroundCompileWarning
from tpu_core.errors.recompilation import RecompilationError as RecompilationError
from tpu_core.errors.recompilation import RecompileLimitWarning as RecompileLimitWarning
from tpu_core.errors.xla_status import map_xla_error as map_xla_error


class TpuNotAvailableError(TpuError):
    """The platform that was asked for is not there.

    **How it happens.** `TPU_PLATFORM=tpu` is set on a machine without a TPU chip or without
    libtpu, or `TPU_PLATFORM` names a PJRT plug-in that is not installed. Without `TPU_PLATFORM`
    this error does not occur: where no chip is visible, the device `tpu` runs on XLA's CPU
    platform. It also occurs where another process has the chips: libtpu locks them by a file, and
    the message names the process that holds it.

    ```console
    $ TPU_PLATFORM=tpu python -c "import torch; torch.ones(2, device='tpu')"
    TpuNotAvailableError: [TPU1001] TPU_PLATFORM=tpu, but no TPU chip is visible.
    ```

    **How to fix it.** Run `tpu doctor`: it lists what was looked for and found. In a container,
    pass the device files on (`--device /dev/accel0`, or `--privileged` with `/dev/vfio`). Install
    libtpu with `pip install "jax[tpu]"`. Unset `TPU_PLATFORM` to use the CPU platform.
    """

    code = "TPU1001"
    remedy = "Run `tpu doctor` to see what was looked for, or unset TPU_PLATFORM to run on the CPU."


class VersionMismatchError(TpuError):
    """The installed torch or jax is none that tpu-core works with.

    **How it happens.** tpu-core holds a build of its C++ extension for one or more minor versions
    of torch. After `pip install --upgrade torch` none of them may fit; after `pip install --upgrade
    jax` its jaxlib may be too new. `import torch` still works; the first use of the device raises
    this error. The first process group raises it where the extension of tpu-distributed does not
    fit, the import of its module `_C` for that of another package.

    ```pycon
    >>> torch.ones(2, device="tpu")
    VersionMismatchError: [TPU1002] tpu_core was built for torch 2.13, but torch 2.14.0 is
    installed.
    What to do: Install a torch that it was built for (pip install "torch==2.13.*"), or rebuild ...
    ```

    **How to fix it.** Install the torch named in the message, or rebuild tpu-core against the
    installed one: `pip install --force-reinstall --no-deps --no-build-isolation tpu-core`. `tpu
    doctor` lists the versions and what asks for others.
    """

    code = "TPU1002"
    remedy = "Install the torch version that tpu-core was built for, or reinstall tpu-core."


class DeviceSlotTakenError(TpuError):
    """PyTorch has one slot for an out-of-tree device (PrivateUse1) in a process.

    **How it happens.** Another backend is installed (`torch_tpu`, `torch_npu`, ...) and
    registered itself first. At `import torch` this project then stands down with one
    `DeviceSlotTakenWarning`, and an explicit use of it raises this error.

    ```console
    $ python -c "import torch"
    DeviceSlotTakenWarning: [TPU1003] tpu_core is not active: another package has registered the
    device 'npu' first.
    ```

    **How to fix it.** Uninstall the other backend, or use a separate virtual environment. To
    choose by process, switch autoloading off with `TORCH_DEVICE_BACKEND_AUTOLOAD=0` and import
    one backend (`import tpu_core` for this one).
    """

    code = "TPU1003"
    remedy = "Uninstall the other backend, or use a separate virtual environment for each."


class DeviceSlotTakenWarning(TpuWarning):
    """The warning at `import torch` that belongs to `DeviceSlotTakenError` above."""

    code = "TPU1003"
    remedy = DeviceSlotTakenError.remedy


class UnsupportedOpError(TpuError, NotImplementedError):
    """No route leads from this op to the device.

    **How it happens.** The op has no lowering, PyTorch has no decomposition for it, and it cannot
    run on the CPU instead (no CPU kernel, or operands that have no value on the host). The class
    is also a `NotImplementedError`, as PyTorch raises for ops that a device lacks.

    ```pycon
    >>> torch.nested.nested_tensor([torch.ones(2)]).to("tpu")
    UnsupportedOpError: [TPU1005] aten._to_copy.default is about a nested tensor ..
    ```

    **How to fix it.** `tpu ops` lists what is supported. Use another op, move the operands to the
    CPU around this call, or register a lowering for it.
    """

    code = "TPU1005"
    remedy = "See `tpu ops` for what is supported; move the operands to the CPU around this call."


class FallbackError(TpuError):
    """An op would have to run on the CPU, and `TPU_FALLBACK=error` forbids that.

    **How it happens.** The op has neither a lowering nor a decomposition. With
    `TPU_FALLBACK=warn` (the default) it runs on the CPU with a `FallbackWarning`: its operands
    are copied to the host and its results back, which waits for the device. With
    `TPU_FALLBACK=error`, and always inside `torch.compile`, it raises.

    ```console
    $ TPU_FALLBACK=error python train.py
    FallbackError: [TPU1006] aten.linalg_eig.default has no lowering and would run on the CPU.
    ```

    **How to fix it.** Move the op out of the training step, replace it, or allow the fallback with
    `TPU_FALLBACK=warn` (`allow` does not even warn).
    """

    code = "TPU1006"
    remedy = "Replace the op or move it out of the hot path, or set TPU_FALLBACK=warn to allow it."


class FallbackWarning(TpuWarning):
    """An op runs on the CPU because it has no lowering.

    **How it happens.** As described under `FallbackError`; the warning comes once an op, with the
    line that called it first. `torch.tpu.compile_report()` counts the calls and their seconds.

    ```console
    train.py:31: FallbackWarning: [TPU1007] aten.linalg_eig.default ran on the CPU.
    ```

    **How to fix it.** Nothing needs fixing when the op is rare. In a training step each call
    copies its operands to the host and waits, so replace the op or move it out of the step.
    Silence the warning with `TPU_FALLBACK=allow`; turn it into an error with
    `TPU_FALLBACK=error`.
    """

    code = "TPU1007"
    remedy = "Replace the op where it is hot, or silence this with TPU_FALLBACK=allow."


class CompilationError(TpuError):
    """XLA refused or failed to compile a program.

    **How it happens.** The StableHLO of a segment uses something the platform does not implement,
    or XLA has a bug. The message names the op, its shapes and the line where they are known, and
    XLA's own text. On the CPU platform a process with some twenty thousand programs has no memory
    maps for more, and says so.

    ```console
    CompilationError: [TPU1008] XLA could not compile a program: UNIMPLEMENTED: ...
      op: aten.sort.default
      at model.py:12
    ```

    **How to fix it.** Run once with `TPU_EAGER_MODE=debug`: ops are then compiled one by one, so
    the guilty one raises at its own line. `TPU_DUMP=folder` writes the StableHLO of each program
    there.
    """

    code = "TPU1008"
    node: int | None = None  # place of the op in its segment, where a lowering failed
    remedy = "Run once with TPU_EAGER_MODE=debug to find the op; TPU_DUMP=<folder> keeps programs."


class ExecutionError(TpuError):
    """A compiled program failed while it ran.

    **How it happens.** Programs run asynchronously, so the failure may be seen later than the
    line that caused it: at a `.item()`, a `print` or a `torch.tpu.synchronize()`. What the
    program would have written is lost: reading it raises the same error again.

    ```console
    ExecutionError: [TPU1009] A program failed on the device: INTERNAL: ...
      at train.py:31
    ```

    **How to fix it.** Run with `TPU_EAGER_MODE=debug`, which waits after each op and so raises at
    the op that failed. Restore the model from a checkpoint if the process goes on.
    """

    code = "TPU1009"
    remedy = "Run with TPU_EAGER_MODE=debug, which waits after each op and raises at its line."


class OutOfMemoryError(TpuError, torch.OutOfMemoryError):
    """The device has too little memory for an allocation or a program.

    **How it happens.** Model, optimizer state, activations and temporaries exceed the memory of
    the chip, or a limit: `TPU_MEMORY_LIMIT` on the CPU platform,
    `torch.tpu.set_per_process_memory_fraction`. It is also a `torch.OutOfMemoryError`, so that code
    which catches that works. `error.needed`, `error.limit` and `error.live` are bytes, or `None`
    where unknown. Where the limit was compared before the program ran, the message lists what is
    live by kind, the largest tensors with their names, and what would free them.

    ```console
    OutOfMemoryError: [TPU1010] Device tpu:0 is out of memory.
      needed: 4.00 GiB
      limit: 16.00 GiB
      live: 13.10 GiB
      live by kind: parameters 2.60 GiB, optimizer state 5.20 GiB, activations 5.30 GiB
      largest: 512.00 MiB float32[50304, 2560] GPT.head.weight; ...
    ```

    **How to fix it.** Use a smaller batch, `torch.utils.checkpoint`, bfloat16 autocast, or shard
    the model over more devices. Look for tensors that are kept alive by accident, such as a list
    of losses: append `loss.detach()`. `torch.tpu.memory_summary()` shows what is live, and
    the tutorial *Find where the memory went* goes through a case.

    **After it.** What a program needs is compared with the limit before it runs, so that the ops
    it stands for have not happened: tensors, buffers, parameters, the generator and the
    optimizer are as they were before the first of them, and the batch may be halved and tried
    again. In fused mode these are all ops since the last read, which may be a whole training
    step. Tensors that were made in between hold the error, gradients among them: begin with
    `optimizer.zero_grad()`. What a program changes on the host itself, such as a learning-rate
    schedule, stays changed.

    Args:
        what: One sentence that says what happened.
        needed: Bytes that the allocation or program needs.
        limit: Bytes of memory there are.
        live: Bytes held by live tensors.
        values, line, remedy: As of `TpuError`.
    """

    code = "TPU1010"
    remedy = (
        "Use a smaller batch, torch.utils.checkpoint or bfloat16, and free tensors that are no "
        "longer needed."
    )

    def __init__(
        self,
        what: str = "The device is out of memory.",
        *,
        needed: int | None = None,
        limit: int | None = None,
        live: int | None = None,
        values: Mapping[str, object] | None = None,
        line: str | None = None,
        remedy: str | None = None,
    ) -> None:
        sizes = {"needed": needed, "limit": limit, "live": live}
        shown = {name: format_bytes(n) for name, n in sizes.items() if n is not None}
        super().__init__(what, values={**shown, **(values or {})}, line=line, remedy=remedy)
        self.needed, self.limit, self.live = needed, limit, live


class NonFiniteError(TpuError):
    """An op produced a NaN or an infinity while `TPU_DEBUG_NANS=1` was set.

    **How it happens.** With `TPU_DEBUG_NANS=1` Debug mode checks each floating-point result at
    once. Strict and Fused check the results of each program once it has run; where one is not
    finite, the program's ops are replayed one by one from its inputs, and the value is followed
    back to the op that made it. The message names the op, the range of each input and the line; an
    op of backward carries the line of the forward op. Inputs that are already not finite are said
    to be so: the cause then lies earlier. An infinity that is among the inputs, such as the `-inf`
    of an attention mask, is not counted, nor is a NaN that does not reach a program's results, such
    as one that `torch.where` drops.

    ```console
    NonFiniteError: [TPU1011] aten.log.default produced 3 NaN of 1024 values.
      result: float32[8, 128]
      input self: float32[8, 128] min -0.2 max 4.1 finite
      at model.py:57 in forward
    ```

    **How to fix it.** Look at the range of the inputs: a `log` or `sqrt` of a negative number, a
    division by zero, an `exp` that overflows. Clamp, add an epsilon, or use the stable form
    (`log_softmax` for `log(softmax)`). Gradient clipping and a smaller learning rate help against
    values that grow over steps.
    """

    code = "TPU1011"
    remedy = (
        "Look at the range of the inputs: clamp, add an epsilon, or use a stable form of the op."
    )


class VerificationError(TpuError):
    """A program gave another result than its ops do one by one.

    **How it happens.** With `TPU_VERIFY=first` the first run of each program, with `sample:N` one
    run in N, is repeated op by op on the host, by PyTorch's CPU kernels, and compared. What
    rounding can do to these values is found out by running the ops with their results slightly
    off; what lies farther away is wrong. Such a program is dropped from memory and from the cache
    folder.

    ```console
    VerificationError: [TPU1019] A program of 12 ops gave another result for
    aten.sum.dim_IntList than its ops do one by one.
      result: float32[4, 4]
      element: [0, 1]
      of the program: 24
      op by op: 6
      at train.py:31 in step
    ```

    **How to fix it.** It is a fault of the compiler or of this project: please report it, with the
    program if it can be shared. `TPU_TIERS=host` on the CPU platform, or `TPU_EAGER_MODE=strict`,
    runs without the program meanwhile.
    """

    code = "TPU1019"
    remedy = (
        "Report it, with the program if possible. TPU_EAGER_MODE=strict compiles one op at a time; "
        "TPU_TIERS=host runs CPU kernels on the CPU platform."
    )


class DonatedBufferError(TpuError):
    """A value is read whose memory was given to another program.

    **How it happens.** An in-place op reuses the memory of the old value. A `jax.Array` from
    `tpu_core.to_jax` is never reused by this project, but one that you pass on to a function
    jitted with `donate_argnums` is. It also happens to what a failed program would have
    overwritten: the inputs that it donated stay deleted.

    ```python
    array = tpu_core.to_jax(x)
    jax.jit(step, donate_argnums=0)(array)
    x + 1  # raises DonatedBufferError: JAX deleted the memory that x shares
    ```

    **How to fix it.** Donate a copy (`jnp.copy(array)`), or make the tensor anew with
    `tpu_core.from_jax(result)`. After a failed program, restore the tensors from a checkpoint.
    """

    code = "TPU1012"
    remedy = "Donate a copy instead of the shared array, or make the tensor anew from the result."


class CacheWarning(TpuWarning):
    """The executable cache cannot be used, or an entry in it was dropped.

    **How it happens.** The folder cannot be written, belongs to another user, can be written by
    others, or an entry is truncated, corrupt or not ours. A dropped entry is compiled again. A
    program that is larger than `TPU_CACHE_SIZE` is not stored.
    Entries are executable code, therefore a folder that others can write is refused: programs are
    then kept in memory only. The shared cache that `TPU_CACHE_URL` names may not answer, refuse the
    credentials, or need a package of fsspec's that is not installed: it is then left alone for a
    minute, and longer after each further failure. Nothing else fails for it.

    ```console
    CacheWarning: [TPU1013] The cache folder .cache/tpu-core can be written by other users.
    ```

    **How to fix it.** `chmod 700` the folder, point `TPU_CACHE_DIR` at one of your own, or switch
    the disk cache off with `TPU_CACHE=off`. `tpu cache verify` checks every entry, `tpu cache
    prune --all` empties the folder.
    """

    code = "TPU1013"
    remedy = "Set TPU_CACHE_DIR to a folder of your own, or TPU_CACHE=off."


class ConfigurationError(TpuError, ValueError):
    """A `TPU_*` environment variable or an override has a value that is not valid.

    **How it happens.** The variables are read and checked together at first use of the device. The
    message lists what is valid.

    ```console
    $ TPU_EAGER_MODE=fussed python train.py
    ConfigurationError: [TPU1015] TPU_EAGER_MODE='fussed' is not valid.
      valid: debug, strict, fused
    ```

    `tpu_core.config.override` raises it, too, for a setting that the device reads when it starts
    (`TPU_NUM_DEVICES`), once it has: the block would not see the change.

    **How to fix it.** Correct the value, or unset the variable to get the default. All variables
    and their defaults are listed on the configuration page; `tpu doctor` shows which are set.
    """

    code = "TPU1015"
    remedy = "Correct the value, or unset the variable to get the default."


class UnreadErrorWarning(TpuWarning):
    """The process ends, and a program found an error that no read was left to raise.

    **How it happens.** A compiled program that finds an index out of range goes on, and the next
    read of the device raises the error. After the last read of a process there is none. What the
    programs have found by then is warned of at the exit, with the op and the line; the process'
    exit status stays as it was. Ops that were recorded and never ran have found nothing.

    ```python
    for step in range(100):
        loss = train_step()
        if step % 10 == 0:
            print(loss.item())  # raises what the steps before found
    # steps 91 to 99 were not looked at: the warning comes here
    ```

    **How to fix it.** Mend the line that the warning names. To have it raised, read a result or
    call `torch.tpu.synchronize()` after the last step. `TPU_CHECKS=off` has no checks.
    """

    code = "TPU1021"
    remedy = "Call torch.tpu.synchronize() after the last step: it raises such an error."
