"""Relations between the sizes of recordings."""

from __future__ import annotations

import pytest

from tpu_core.padding.fit import Fit
from tpu_core.padding.sizes import Size


def columns(*rows: tuple[int, ...]) -> list[list[int]]:
    """Recordings, given as the values of each integer."""
    return [list(row) for row in zip(*rows)]


def test_elements_of_shifted_sequences_are_a_product() -> None:
    # ids [batch, length], ids[:, :-1], their elements.
    recordings = columns((2, 4), (24, 20), (23, 19), (46, 76))
    fit = Fit(recordings, (), 4)
    assert len(fit.symbols) == 2
    assert fit.solve([7, 22, 21, 147]) == [21, 7]
    assert fit.solve([7, 22, 21, 148]) is None


def test_elements_of_both_sequences() -> None:
    """One of two products is of the sequence without its last elements, the other a symbol."""
    recordings = columns((2, 4), (24, 20), (48, 80), (23, 19), (46, 76))
    fit = Fit(recordings, (), 5)
    assert fit.solve([7, 22, 154, 21, 147]) is not None
    assert fit.solve([7, 22, 155, 21, 147]) is None


def test_rows_of_a_batch_of_sequences_follow_from_both() -> None:
    """Also where the rows come first, as those of an operand that the op views as a batch."""
    recordings = columns((55, 91), (20, 36), (5, 7), (11, 13))
    fit = Fit(recordings, (), 4)
    assert len(fit.symbols) == 3
    assert fit.solve([60, 8, 10, 6]) is not None
    assert fit.solve([61, 8, 10, 6]) is None
    # Any two values are those of a multiple of a product more often than of a product.
    assert len(Fit(columns((60, 180), (2, 5), (10, 12)), (), 3).symbols) == 3
    assert len(Fit(columns((60, 180, 120), (2, 5, 5), (10, 12, 8)), (), 3).symbols) == 2


def test_a_size_that_is_there_more_often_than_the_one_with_its_border() -> None:
    """What an op makes of an image is a product of the image's sizes, and in no recording."""
    recordings = columns((18, 26), (16, 24), (5, 5), (16, 24))
    fit = Fit(recordings, (), 4)
    assert fit.symbols == [1]
    assert fit.derive([16 * 16 * 5, 24 * 24 * 5]) == Size(5, (0, 0), 0)
    assert fit.solve([22, 20, 5, 20]) == [20]
    assert fit.solve([22, 21, 5, 20]) is None


def test_declared_sizes_stay_symbols() -> None:
    recordings = columns((2, 4), (24, 20), (23, 19), (46, 76))
    fit = Fit(recordings, [1, 0], 4)
    assert fit.symbols[:2] == [1, 0]


def test_a_product_is_likelier_than_a_line() -> None:
    # 46, 76 is 15 * batch + 16, too.
    fit = Fit(columns((2, 4), (23, 19), (46, 76)), (), 3)
    assert fit.sizes[2] == Size(1, (0, 1), 0)


@pytest.mark.parametrize("inputs, symbols", [((), 5), (range(6), 6)])
def test_inputs_among_many_symbols(inputs: tuple[int, ...], symbols: int) -> None:
    """The last lies 3 beyond the first in both: by chance, where no op computed it."""
    rows = ((10, 31), (17, 20), (40, 26), (29, 60), (51, 77), (13, 34))
    assert len(Fit(columns(*rows), (), 6, inputs).symbols) == symbols


def test_recordings_that_repeat_a_size_are_no_evidence() -> None:
    # Of three recordings two have the same sizes here: two points, and a line through them.
    fit = Fit(columns((32, 33, 33), (21, 22, 22)), (), 2)
    assert len(fit.symbols) == 2
    assert len(Fit(columns((32, 33, 36), (21, 22, 25)), (), 2).symbols) == 1


def test_an_image_that_is_doubled_follows_from_its_half() -> None:
    # Height, twice the half, the half: of odd heights twice the half is one less.
    recordings = columns((27, 17), (26, 16), (13, 8))
    assert Fit(recordings, (), 3, [0, 2]).solve([30, 30, 15]) is not None
    # Unless an input is half of it, it is one less.
    assert Fit(recordings, (), 3, [0]).solve([30, 30, 15]) is None
    # Three heights on a line are no chance.
    recordings = columns((27, 17, 30), (26, 16, 29), (13, 8, 14))
    assert Fit(recordings, (), 3, [0, 2]).solve([40, 39, 2]) is not None


def test_what_an_op_leaves_of_a_dim_follows_from_that_dim() -> None:
    # Height and width, and what a pool leaves of the width, which is 3 less than the height.
    recordings = columns((17, 19), (29, 32), (14, 16))
    assert len(Fit(recordings, (), 3, [0, 1]).symbols) == 2
    assert len(Fit(recordings, (), 3, [0, 1], {2: [1]}).symbols) == 3
    # A window over the height, and another one over what that leaves.
    recordings = columns((17, 19), (15, 17), (13, 15))
    fit = Fit(recordings, (), 3, [0], {1: [0], 2: [1]})
    assert fit.sizes[2] == Size(1, (0,), -4)


def test_an_image_and_its_half_are_no_multiples() -> None:
    """Batch, height, height after a step of two, and after another, of even images."""
    rows = ((2, 5), (24, 16), (12, 8), (6, 4))
    stepped = [(1, 2), (2, 3)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        place = {row: i for i, row in enumerate(order)}
        pairs = [(place[a], place[b]) for a, b in stepped]
        fit = Fit(columns(*(rows[i] for i in order)), (), 4, stepped=pairs)
        odd = (3, 25, 13, 7)
        assert fit.solve([odd[i] for i in order]) is not None
    assert Fit(columns(*rows), (), 4).solve([3, 25, 13, 7]) is None


def test_an_argument_is_a_rest_or_a_symbol() -> None:
    # A sequence, what it is padded to, and the padding; a position that follows from neither.
    fit = Fit(columns((5, 7, 6), (31, 40, 22), (26, 33, 16), (3, 9, 2)), (), 2)
    assert fit.sizes[2] == Size(-1, (0,), 0, Size(1, (1,), 0))
    assert fit.solve([8, 30, 22, 0]) == [8, 30, 2]
    assert fit.solve([8, 30, 21, 0]) is None
    # What a program keeps room for, with the element that a window takes beside the padding.
    beside = fit.derive([27, 34, 17])
    assert beside == Size(-1, (0,), 1, Size(1, (1,), 0))
    assert beside.value([8, 30, 4]) == 23 and beside.bound([16, 32, 8]) == 33
    # Of a static size, which the padding is up to.
    (_, padding) = Fit(columns((5, 7, 6), (59, 57, 58)), (), 1).sizes
    assert padding.value([8]) == 56 and padding.times(3).value([8]) == 168
