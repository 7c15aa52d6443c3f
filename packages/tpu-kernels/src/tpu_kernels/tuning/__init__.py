"""Sizes of kernels' blocks by chip: what libtpu schedules for each, measured without the chip.

`tpu tune` compiles a kernel with each size (`worker`), counts the bundles of instructions that the
compiler scheduled for a block (`bundles`), and writes them into a table (`table`). Choosing is
arithmetic on that table when a program is lowered: nothing is compiled or measured then.
"""
