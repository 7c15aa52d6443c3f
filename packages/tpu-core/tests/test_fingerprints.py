"""Digests of values, from which the keys of programs are made."""

from __future__ import annotations

import pytest

from interpreter import clean
from tpu_core.cache import ExecutableStore, fingerprint


def test_fingerprints_are_the_same_in_every_process():
    code = (
        "from tpu_core.cache import fingerprint\n"
        "print(fingerprint(a=1, b=['x', b'y', None, 2.5, True], c={'k': (1, 2)}, d={3, 4}))"
    )
    out = clean(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out.strip() == fingerprint(
        d=frozenset({4, 3}), c={"k": [1, 2]}, b=("x", b"y", None, 2.5, True), a=1
    )


def test_fingerprints_differ_where_values_or_types_do():
    values = [
        None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, "", "1", b"", b"1", [], [1], [[1]], ["1"],
        ["a", "b"], ["ab"], [["a"], "b"], {}, {"a": 1}, {"a": "1"}, {1: "a"}, set(), {1}, [None],
    ]  # fmt: skip
    assert len({fingerprint(x=value) for value in values}) == len(values)
    assert fingerprint(x=1) != fingerprint(y=1)


def test_a_fingerprint_refuses_what_has_no_stable_encoding():
    for value in (object(), print, [object()], {"a": ExecutableStore}):
        with pytest.raises(TypeError, match="has no stable encoding"):
            fingerprint(x=value)
