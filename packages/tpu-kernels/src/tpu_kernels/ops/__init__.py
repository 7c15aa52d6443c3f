"""The library: ops that PyTorch's own functions reach, in several implementations.

A folder an op, named as in `tpu_kernels.using`:

``arguments.py``
    The overloads of the op, and their arguments as its rules check them.
``reference.py``
    The implementation ``"plain"``, which takes all arguments: products and reductions by XLA. Where
    it is a lowering of tpu-core, its record is in ``api.py``.
``flash.py``, ...
    One implementation each: its functions, called as the lowerings are, and its rules.
``api.py``
    ``KERNEL``: the op's record, with its implementations in the order in which they are tried.

A new op is a folder with these files, a row of `tpu_kernels.ops.table.KERNELS`, and an entry point
of the group ``tpu_core.kernels`` for each overload.
"""
