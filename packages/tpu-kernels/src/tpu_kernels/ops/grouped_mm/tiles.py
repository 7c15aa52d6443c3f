"""Tiles of a grouped product: what is read again for the sake of what fits into VMEM."""

from __future__ import annotations

from collections.abc import Iterator

# Of the 16 MiB that a kernel has by default; the rest is for what Mosaic keeps beside the tiles.
_VMEM = 12 * 2**20
_SIDES = (2048, 1024, 512, 256, 128)
# Rows of a tile: no fewer than a matrix unit has, unless there are fewer in all, and no more than
# hide the reads of the other tile. A tile is gone through for each group that has rows in it.
_ROWS = (512, 256, 128)
_SUBLANES = 16


def rows_of_tile(rows: int, groups: int) -> int:
    """Rows of a tile, for groups that are about as large as each other."""
    if rows < _ROWS[-1]:
        return -(-rows // _SUBLANES) * _SUBLANES
    return next((tile for tile in _ROWS if tile * groups <= rows), _ROWS[-1])


def tiles(rows: int, k: int, n: int, groups: int, size: int) -> tuple[int, int, int]:
    """Tiles along rows, ``k`` and ``n`` of ``[k, rows] @ [rows, n]``, with the least traffic.

    Args:
        rows, k, n: Sizes; the rows are in groups.
        groups: Number of groups.
        size: Bytes of an element.
    """
    tile = rows_of_tile(rows, groups)

    def fits(tk: int, tn: int) -> bool:
        # Two of each, as one is moved while the other is used, and the sums in float32. An exact
        # product of float32 has its operands in three parts.
        operand = 2 * size + (8 if size == 4 else 0)
        return operand * tile * (tk + tn) + (2 * size + 4) * tk * tn <= _VMEM

    def traffic(tk: int, tn: int) -> int:
        return rows * (k * -(-n // tn) + n * -(-k // tk))

    candidates = ((tk, tn) for tk in _sides(k) for tn in _sides(n))
    return tile, *min((c for c in candidates if fits(*c)), key=lambda c: traffic(*c))


def _sides(length: int) -> Iterator[int]:
    """Lengths of a tile along a dimension: all of it, or parts that lanes divide."""
    yield length
    yield from (side for side in _SIDES if side < length)
