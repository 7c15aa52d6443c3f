"""Errors of captured graphs."""

from __future__ import annotations

from tpu_core.errors.base import TpuError, TpuWarning


class GraphCaptureError(TpuError):
    """A graph of `torch.accelerator.Graph` could not be captured or replayed.

    **How it happens.** Between `capture_begin()` and `capture_end()` ops are recorded and do not
    run, so that nothing they compute can be read: `.item()`, `print`, `.cpu()`, an `if` on a
    tensor, an op whose result's size depends on values (`nonzero`, a mask as index), an op without
    a lowering. Nor can a graph hold copies from the host (`torch.tensor(..., device="tpu")`), a
    wait for the device, collectives, a new state of a generator, random ops of compiled graphs, or
    a step of an optimizer that counts on the host. A replay raises where the capture failed, or
    where a storage that the graph uses has another size by then.

    ```pycon
    >>> with torch.accelerator.Graph():
    ...     loss = model(x).sum()
    ...     loss.item()
    GraphCaptureError: [TPU1023] A read of the device (item) was called while a graph was captured.
    ```

    **How to fix it.** Make tensors before the capture and fill them with `copy_` between replays;
    read results after `replay()`. `torch.optim.Adam(..., capturable=True)` counts on the device.
    """

    code = "TPU1023"
    remedy = (
        "Make tensors before the capture, fill them with copy_() between replays, and read "
        "results after replay()."
    )


class GraphSplitWarning(TpuWarning):
    """An op of a compiled graph runs outside of the graph's programs.

    **How it happens.** A graph of `torch.compile` becomes one program if each of its ops has a
    lowering and its tensors are on the device. Else it is split: what lies before and behind such
    an op is compiled, and the op runs as it does without `torch.compile`, which for an op without a
    lowering means on the CPU, with copies and a wait in each call. The warning comes once an op,
    with the line that calls it. `torch.tpu.compile_report()` lists all of them, with the reason.

    ```console
    model.py:31: GraphSplitWarning: [TPU1028] aten.linalg_eig.default runs outside of the programs
    of a compiled graph: it has no lowering.
    ```

    **How to fix it.** Replace the op, or move it out of the compiled function. For an op of your
    own register a lowering (`tpu_core.extend.register`). Make tensors on the device
    (`torch.arange(3, device=x.device)`) and leave `.cpu()` to the caller.
    `TPU_PERFORMANCE_WARNINGS=0` silences this.
    """

    code = "TPU1028"
    remedy = (
        "Replace the op, or move it out of the compiled function; an op of your own can have a "
        "lowering (tpu_core.extend.register). TPU_PERFORMANCE_WARNINGS=0 silences this."
    )


class NotPaddableError(Exception):
    """A segment cannot run on padded arrays; the text says why.

    Attributes:
        op: The op and user line at fault, ``train.py:31/aten.mm``; empty where it is none's.

    Example:
        >>> raise NotPaddableError("the graph reads its own sizes")
    """

    op = ""
