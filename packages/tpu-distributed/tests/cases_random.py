"""Random collectives, the same on every rank but for what ranks do in between."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections import deque

import torch
import torch.distributed as dist

import tpu_distributed
from random_calls import Attempt
from random_cases import UNLIKE, Case, drawn
from rank_tensors import DEVICE, RANK, SIZE
from tpu_core.errors import SpmdMismatchWarning
from tpu_distributed.traced_collectives import STALLS


def _groups() -> list[dist.ProcessGroup | int]:
    """The world, a second one, each rank alone; of four also overlapping and nested ones."""
    members = [list(range(SIZE)), *([r] for r in range(SIZE))]
    if SIZE == 4:
        members += [[0, 1], [2, 3], [0, 1, 2], [1, 2, 3], [1, 2], [0, 3]]
    world = dist.group.WORLD
    assert world is not None
    return [world, *(dist.new_group(ranks) for ranks in members)]


def _cases(groups: int) -> list[Case]:
    if "CASE" in os.environ:
        return [eval(os.environ["CASE"])]
    seed, count = int(os.environ["SEED"]), int(os.environ["COUNT"])
    cases = drawn(seed, count, groups, int(os.environ["VARIANTS"]))
    if os.environ.get("REGIONS") == "alike":
        return [c for c in cases if c.group < 2 and c.kind not in UNLIKE]
    return list(cases)


def case_random_collectives() -> None:
    dist.init_process_group()
    groups = _groups()
    alike = os.environ.get("REGIONS") == "alike"
    own = random.Random(1000 + (0 if alike else RANK))
    diverges = os.environ.get("DIVERGES") == "1"
    region = _Region(os.environ.get("REGIONS", ""), own)
    flying: deque[Attempt] = deque()
    for number, case in enumerate(_cases(len(groups))):
        group = groups[case.group]
        if not isinstance(group, dist.ProcessGroup):  # this rank is not in it
            continue
        region.perhaps_change(number)
        try:
            attempt = Attempt(case, group)
            attempt.start()
        except BaseException as error:
            error.add_note(_told(number, case))
            raise
        flying.append(attempt)
        if diverges:
            _differ(own)
        # Each rank waits when it likes, in an order that it likes.
        while flying and (len(flying) > 6 or own.random() < 0.4):
            index = own.randrange(len(flying)) if diverges else 0
            _finish(flying, index, number)
    region.leave()
    while flying:
        _finish(flying, 0, -1)
    torch.tpu.synchronize()
    dist.barrier()


class _Region:
    """Goes into and out of `spmd()`.

    Args:
        kind: ``"alike"``: as the other ranks do; ``"apart"``: when it likes; else never.
        own: Choices of this rank.
    """

    def __init__(self, kind: str, own: random.Random) -> None:
        self._kind, self._own = kind, own
        self._entered: tpu_distributed.spmd | None = None
        if kind == "apart":
            STALLS.seconds = 0.2
            warnings.simplefilter("ignore", SpmdMismatchWarning)
        else:
            warnings.simplefilter("error", SpmdMismatchWarning)

    def perhaps_change(self, number: int) -> None:
        """Go in or out, perhaps, before a collective."""
        changes = {"alike": number % 7 == 0, "apart": self._own.random() < 0.2}
        if changes.get(self._kind, False):
            if self._entered is None:
                self._entered = tpu_distributed.spmd().__enter__()
            else:
                self.leave()

    def leave(self) -> None:
        """Be out of it."""
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None


def _finish(flying: deque[Attempt], index: int, number: int) -> None:
    attempt = flying[index]
    del flying[index]
    try:
        attempt.finish()
    except BaseException as error:
        error.add_note(_told(number, attempt.case))
        raise


def _told(number: int, case: Case) -> str:
    return (
        f"by collective {number} of SEED={os.environ.get('SEED')}; alone:\n"
        f'python packages/tpu-distributed/tests/test_random_collectives.py {SIZE} "{case!r}"'
    )


def _differ(own: random.Random) -> None:
    """What other ranks do not do just now."""
    what = own.randrange(8)
    if what == 0:
        time.sleep(own.random() * 0.02)
    elif what == 1:
        x = torch.ones(3 + own.randrange(3), 4, device=DEVICE)
        assert (x @ x.t()).sum().item() == x.shape[0] ** 2 * 4
    elif what == 2:
        _RECORDED.append(torch.full((2,), 3.0, device=DEVICE) * 2)
    elif what == 3 and _RECORDED:
        assert _RECORDED.pop().tolist() == [6.0, 6.0]
    elif what == 4:
        torch.tpu.synchronize()


_RECORDED: list[torch.Tensor] = []
