"""Signatures of segments: read as they were written, and no other text."""

from __future__ import annotations

import math

from tpu_core.padding import segment_signature


def test_signatures_are_read_as_they_were_written():
    numbers = (1, 1.0, -0.0, 0.1, math.inf, 2**40)
    kinds = ("int", *["float32"] * 4, "int")
    written = [
        *[("a", kinds, numbers), ("b", (), ()), ("a", kinds, numbers)],
        *[("a", ("float32",), (1.0,)), ("a", ("int",), (1,))],
    ]
    assert repr(segment_signature._decode(segment_signature._encode(written))) == repr(written)
    (read,) = (
        segment_signature._decode(segment_signature._encode([("a", ("float32",), (math.nan,))]))
        or []
    )
    assert math.isnan(read[2][0])


def test_other_text_is_traced_again():
    for payload in (
        b"",
        b"[]",
        b'{"signatures": [], "nodes": [0]}',
        b'{"signatures": 3, "nodes": []}',
    ):
        assert segment_signature._decode(payload) is None
