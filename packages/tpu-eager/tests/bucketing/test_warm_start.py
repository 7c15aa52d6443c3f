"""A second process of a program whose sizes vary: it loads, and traces and compiles nothing."""

from __future__ import annotations

import json

from interpreter import clean

SWEEP = """
import json, sys
import torch

layer = torch.nn.Linear(6, 6)
with torch.no_grad():
    for i, p in enumerate(layer.parameters()):
        p.copy_(torch.arange(p.numel()).reshape(p.shape) * 0.01 + i)
held = torch.nn.Linear(6, 6).to("tpu")
held.load_state_dict(layer.state_dict())
for sizes in json.loads(sys.argv[1]):
    torch.tpu.reset_metrics()
    for n in sizes:
        x = torch.arange(n * 6.0).reshape(n, 6) / 50
        run = lambda m, x: m(x).softmax(0).cumsum(0)
        with torch.no_grad():
            torch.testing.assert_close(run(held, x.to("tpu")).cpu(), run(layer, x))
    found = torch.tpu.metrics()
    print([int(found[k]) for k in "compiles cache_misses outlines padded_executions".split()])
"""


def sweeps(folder: str, *sizes: list[int]) -> list[list[int]]:
    """For each sweep: programs compiled, programs not found, ops traced, padded runs."""
    code = f"import sys; sys.argv = ['', {json.dumps(sizes)!r}]\n{SWEEP}"
    settings = {"TPU_EAGER_MODE": "fused", "TPU_COMPILE": "blocking", "TPU_CACHE_DIR": folder}
    return [json.loads(line) for line in clean(code, **settings).splitlines()]


def test_a_second_process_compiles_and_traces_nothing(tmp_path):
    sizes = [5, 20, 40, 21, 33, 6]
    ((compiles, misses, outlines, padded),) = sweeps(str(tmp_path), sizes)
    assert compiles == misses == 3  # as it is, in 32 and in 64
    assert outlines > 0
    assert padded == len(sizes) - 1
    # A size that is new is traced, and the programs that are there serve it.
    known, new = sweeps(str(tmp_path), sizes, [41])
    assert known == [0, 0, 0, padded]
    compiles, misses, outlines, padded = new
    assert (compiles, misses, padded) == (0, 0, 1)
    assert 0 < outlines < 10


def test_a_second_process_may_begin_with_any_size(tmp_path):
    ((compiles, *_),) = sweeps(str(tmp_path), [5, 20, 40, 21])
    assert compiles == 3
    for first in ([33], [7, 39]):  # neither of which has a program of its own
        assert [found[::3] for found in sweeps(str(tmp_path), first)] == [[0, len(first)]]
    # Sizes may not vary here: one that no program is for is compiled as it is, the next is padded.
    assert [found[::3] for found in sweeps(str(tmp_path), [100], [101, 102])] == [[1, 0], [1, 2]]
    assert [found[::3] for found in sweeps(str(tmp_path), [103, 33])] == [[0, 2]]


def test_padded_programs_that_sort_are_kept(tmp_path, monkeypatch):
    """XLA:CPU does not serialize a sort that has run, and padded programs run for their check."""
    monkeypatch.setitem(globals(), "SWEEP", SWEEP.replace(".cumsum(0)", ".sort(0).values"))
    sizes = [5, 20, 40, 21]
    ((compiles, _, _, padded),) = sweeps(str(tmp_path), sizes)
    assert compiles == 3 and padded == 3
    assert sweeps(str(tmp_path), sizes)[0][:2] == [0, 0]
