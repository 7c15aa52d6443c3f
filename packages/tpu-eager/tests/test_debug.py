"""Debug mode points at the user's line: NaNs, indices, shapes, memory, ops without a route."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import traceback
import uuid
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tpu_core.config import override
from tpu_core.errors import FallbackError, NonFiniteError, OutOfMemoryError, UnsupportedOpError
from tpu_core.verification.statistics import statistics


@pytest.fixture(autouse=True)
def debug_mode():
    with torch.tpu.set_eager_mode("debug"):
        yield


def text_at(line: str | None) -> str:
    """The source text of ``"file.py:31 in step"``."""
    assert line is not None
    place, _, _ = line.partition(" in ")
    file, _, number = place.rpartition(":")
    with open(file) as source:
        return source.readlines()[int(number) - 1].strip()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.log(x - 100)  # the NaN
        return self.second(x)


def test_a_nan_in_the_middle_of_a_model():
    model = Model().to("tpu")
    with override(debug_nans=True), pytest.raises(NonFiniteError) as caught:
        model(torch.ones(2, 4, device="tpu"))
    error = caught.value
    assert text_at(error.line).endswith("# the NaN") and error.line.endswith(" in forward")
    text = str(error)
    assert "aten.log.default produced 8 NaN of 8 values." in text
    assert "  result: float32[2, 4]" in text
    assert "  input self: float32[2, 4] min -" in text and text.count(" finite\n") == 1
    assert torch.tpu.metrics()["debug_checks"] > 0


def test_inputs_that_were_not_finite_before_are_said_to_be_so():
    x = torch.tensor([1.0, float("nan"), 3.0], device="tpu")
    with override(debug_nans=True), pytest.raises(NonFiniteError) as caught:
        x * 2
    text = "input self: float32[3] min 1 max 3 not finite before this op (1 NaN, 0 infinite)"
    assert text in str(caught.value)


def test_an_infinity_is_found_unless_it_was_given():
    zero, mask = torch.zeros(2, device="tpu"), torch.tensor([True, False], device="tpu")
    with override(debug_nans=True):
        scores = zero.masked_fill(mask, float("-inf")) * 0.5 + 1
        assert torch.softmax(scores, 0).tolist() == [0.0, 1.0]
        with pytest.raises(NonFiniteError, match="produced 2 infinite of 2 values"):
            1 / zero
        with pytest.raises(NonFiniteError, match="input other: 0"):
            (zero + 1) / 0


def test_views_and_in_place_ops_show_what_they_were_given():
    base = torch.arange(6.0, device="tpu").reshape(2, 3)
    with override(debug_nans=True), pytest.raises(NonFiniteError) as caught:
        base[:, 1].sub_(10).log_()
    assert "input self: float32[2] min -9 max -6 finite" in str(caught.value)
    # The results stay, to be looked at.
    assert base[:, 0].tolist() == [0.0, 3.0] and base[:, 1].isnan().all().item()


def test_without_the_setting_nothing_is_checked():
    assert torch.log(torch.full((2,), -1.0, device="tpu")).isnan().all().item()


def test_statistics():
    assert statistics(torch.tensor([-0.2, 4.1])) == "float32[2] min -0.2 max 4.1 finite"
    assert statistics(torch.tensor([[3, -1]])) == "int64[1, 2] min -1 max 3 finite"
    assert statistics(torch.empty(0, 3)) == "float32[0, 3]"
    assert statistics(torch.tensor(True)) == "bool[]"
    infinite = torch.tensor([float("inf"), float("nan")], dtype=torch.bfloat16)
    assert statistics(infinite) == "bfloat16[2] not finite before this op (1 NaN, 1 infinite)"


def run(script: Path, code: str, **environment: str) -> list[str]:
    """Lines that a script prints; settings of the environment hold in every thread of it."""
    script.write_text(textwrap.dedent(code))
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TPU_EAGER_MODE": "debug", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout.splitlines()


def test_a_nan_in_backward_carries_the_forward_line(tmp_path):
    lines = run(
        tmp_path / "script.py",
        """
        import threading
        import torch
        from torch.utils.checkpoint import checkpoint
        from tpu_core.errors import NonFiniteError

        def show(function):
            try:
                function()
            except NonFiniteError as error:
                assert "produced 3 infinite of 3 values" in str(error)
                print(error.line)

        x = torch.zeros(3, device="tpu", requires_grad=True)
        w = torch.ones(3, device="tpu", requires_grad=True)
        y = x * w
        y = torch.sqrt(y)  # main
        with torch.no_grad():
            other = w + 1
        loss = y.sum()
        show(loss.backward)

        def block(x):
            y = x * w
            return y.sqrt()  # block
        for reentrant in (True, False):
            show(checkpoint(block, x, use_reentrant=reentrant).sum().backward)

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                return grad / 0  # own
        show(Own.apply(x).sum().backward)

        def in_a_thread():
            z = torch.zeros(3, device="tpu", requires_grad=True)
            for _ in range(5):
                z = z + 0
            z = z.sqrt()  # thread
            show(z.sum().backward)
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        """,
        TPU_DEBUG_NANS="1",
    )
    marks = [text_at(line).rpartition("# ")[2] for line in lines]
    assert marks == ["main", "block", "block", "own", "thread"]


def test_exceptions_of_autograds_threads_arrive_intact():
    class Custom(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(code, text)
            self.code = code

    class Own(torch.autograd.Function):
        error: Exception

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise Own.error

    x = torch.ones(3, device="tpu", requires_grad=True)
    for error in (Custom(7, "seven"), KeyError("inside", 3), IndexError("at 5")):
        Own.error = error
        with pytest.raises(type(error)) as caught:
            Own.apply(x).sum().backward()
        assert caught.value is error

    class Wrong(Own):
        @staticmethod
        def backward(ctx, grad):
            return grad.reshape(1, 3) @ torch.ones(7, 7, device="tpu")  # the mistake

    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(1x3 and 7x7\)") as raised:
        Wrong.apply(x).sum().backward()
    own = [f for f in traceback.extract_tb(raised.tb) if f.filename == __file__]
    assert own[-1].line.endswith("# the mistake")


def test_out_of_memory_in_backward_arrives_intact(tmp_path):
    held, grad = 300 * 300 * 4, 380 * 380 * 4
    (line,) = run(
        tmp_path / "script.py",
        """
        import torch
        w = torch.ones(300, 300, device="tpu", requires_grad=True)
        y = w.exp()  # the gradient of this
        loss = y.sum()
        held = torch.ones(380, 380, device="tpu")
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            print(type(error).__name__, error.limit, error.line, sep="|")
        """,
        TPU_MEMORY_LIMIT=str(2 * held + grad + 1000),
    )
    kind, limit, place = line.split("|")
    assert (kind, limit) == ("OutOfMemoryError", str(2 * held + grad + 1000))
    assert text_at(place).endswith("# the gradient of this")


def test_out_of_memory_names_the_line():
    def step() -> torch.Tensor:
        small = torch.ones(10, device="tpu")
        large = torch.ones(1 << 20, device="tpu")  # too much
        return large * small[0]

    held = torch.tpu.memory_allocated()
    # The limit is read when a program is built.
    with override(memory_limit=held + (1 << 20)), pytest.raises(OutOfMemoryError) as caught:
        step()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert text_at(caught.value.line).endswith("# too much")
    assert caught.value.needed == 4 << 20
    assert caught.value.limit == held + (1 << 20)


def test_a_shape_mismatch_names_the_line():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    model.to("tpu")
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(3x8 and 4x2\)") as caught:
        model(torch.ones(3, 4, device="tpu"))  # the call
    own = [f for f in traceback.extract_tb(caught.tb) if f.filename == __file__]
    assert own[-1].line.endswith("# the call")


def test_an_unsupported_op_names_the_line():
    library = torch.library.Library("robustness", "FRAGMENT")
    name = f"nowhere_{uuid.uuid4().hex}"
    library.define(f"{name}(Tensor x) -> Tensor")
    x = torch.ones(3, device="tpu")
    for policy, kind in (("warn", UnsupportedOpError), ("error", FallbackError)):
        with override(fallback=policy), pytest.raises(kind) as caught:
            getattr(torch.ops.robustness, name)(x)  # the op
        assert text_at(caught.value.line).endswith("# the op")
        assert name in str(caught.value)
    library._destroy()


def _indices(*values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, device=device)


OUT_OF_RANGE = {
    "index": lambda d: torch.ones(3, 3, device=d)[_indices(0, 5, device=d)],
    "negative index": lambda d: torch.ones(3, 3, device=d)[:, _indices(-4, device=d)],
    "index_put": lambda d: torch.ones(3, device=d).index_put_(
        (_indices(3, device=d),), torch.ones(1, device=d)
    ),
    "set item": lambda d: torch.ones(3, device=d).__setitem__(_indices(7, device=d), 1.0),
    "embedding": lambda d: F.embedding(_indices(1, 9, device=d), torch.ones(5, 2, device=d)),
    "negative embedding": lambda d: F.embedding(_indices(-1, device=d), torch.ones(5, 2, device=d)),
    "gather": lambda d: torch.ones(3, 3, device=d).gather(1, _indices([4], device=d)),
    "gather in a view": lambda d: torch.ones(6, 3, device=d)[2:5].gather(
        0, _indices([3], device=d)
    ),
    "scatter": lambda d: torch.ones(3, 3, device=d).scatter(0, _indices([4], device=d), 1.0),
    "scatter_add": lambda d: torch.ones(3, device=d).scatter_add_(
        0, _indices(4, device=d), torch.ones(1, device=d)
    ),
    "index_select": lambda d: torch.ones(3, device=d).index_select(0, _indices(3, device=d)),
    "index_add": lambda d: torch.ones(3, device=d).index_add_(
        0, _indices(3, device=d), torch.ones(1, device=d)
    ),
    "index_copy": lambda d: torch.ones(3, device=d).index_copy_(
        0, _indices(3, device=d), torch.ones(1, device=d)
    ),
    "index_fill": lambda d: torch.ones(3, device=d).index_fill_(0, _indices(3, device=d), 1.0),
    "take": lambda d: torch.take(torch.ones(3, device=d), _indices(4, device=d)),
    "put": lambda d: torch.ones(3, device=d).put_(_indices(5, device=d), torch.ones(1, device=d)),
    "cross_entropy": lambda d: F.cross_entropy(
        torch.ones(2, 3, device=d), _indices(0, 3, device=d)
    ),
    "nll_loss of images": lambda d: F.nll_loss(
        torch.ones(1, 3, 2, 2, device=d), _indices([[0, 1], [2, 3]], device=d)
    ),
    "embedding_bag": lambda d: F.embedding_bag(
        _indices([1, 9], device=d), torch.ones(5, 2, device=d)
    ),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range_raises_pytorchs_error(name):
    mistake = OUT_OF_RANGE[name]
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        mistake("cpu")
    with pytest.raises((IndexError, RuntimeError)) as ours:
        mistake("tpu")
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))
    (note,) = ours.value.__notes__
    assert note.startswith(f"at {__file__}:")


def test_indices_that_are_all_right():
    x = torch.arange(9.0, device="tpu").reshape(3, 3)
    assert x[torch.tensor([-1, 0], device="tpu")].tolist() == [[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]
    loss = F.cross_entropy(x, torch.tensor([0, -100, 2], device="tpu"))
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(x.cpu(), torch.tensor([0, -100, 2])))
    empty = torch.empty(0, dtype=torch.int64, device="tpu")
    assert F.embedding(empty, x).shape == (0, 3)
    assert x[x > 4].tolist() == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_other_modes_raise_at_the_next_read(mode: str):
    with torch.tpu.set_eager_mode(mode):
        x = torch.arange(3.0, device="tpu")
        y = x[torch.tensor([7], device="tpu")]
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            y.tolist()
        y.tolist()  # some element, and no crash


def test_debug_mode_keeps_inputs_and_gives_the_same_results():
    x = torch.ones(4, device="tpu")
    y = x.add_(1).mul_(3)
    assert y is x and x.tolist() == [6.0] * 4


def test_programs_that_fused_mode_made_for_padded_arrays():
    def run(n: int) -> list[float]:
        x = torch.arange(float(n)).to("tpu")
        return (x.view(n, 1) * 2).tolist()

    with torch.tpu.set_eager_mode("fused"):
        for n in (21, 22, 23, 25):
            run(n)
    with override(debug_nans=True):
        assert run(25) == [[2.0 * i] for i in range(25)]
