"""The secret by which processes know each other as those of one job."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tpu_core.errors import ProcessGroupError

VARIABLE = "TPU_JOB_SECRET"
_KEY = "secret"
# In the store where the first process has a secret from its environment.
_ELSEWHERE = "environment"
_LEAST_CHARACTERS = 16


def create() -> str:
    """A new one: 256 random bits in hex."""
    return secrets.token_hex(32)


def of_group(
    store: Any, rank: int, timeout: float, environ: Mapping[str, str] = os.environ
) -> bytes:
    """The secret of the job, from the environment; from the store of a group where none is set.

    Args:
        store: Keys of the group alone. A secret in it is known to all that reach the store.
        rank: Of this process in the group; the first one makes a secret.
        timeout: Seconds to wait for the first one.
        environ: Has ``TPU_JOB_SECRET``, the same in all processes, or in none.

    Raises:
        ProcessGroupError: That of the environment is too short to be one, or only the first
            process has one.
    """
    text = environ.get(VARIABLE, "")
    if text and len(text) < _LEAST_CHARACTERS:
        raise ProcessGroupError(
            f"{VARIABLE} has {len(text)} characters: too few for a secret.",
            remedy=f"Set at least {_LEAST_CHARACTERS} random ones, the same for all processes: "
            "openssl rand -hex 32",
        )
    if rank == 0:
        store.set(_KEY, _ELSEWHERE if text else create())
    if not text:
        store.wait([_KEY], timedelta(seconds=timeout))
        text = store.get(_KEY).decode()
    if text == _ELSEWHERE:
        raise ProcessGroupError(
            f"{VARIABLE} is set for the first process of the group, and not for this one.",
            values={"rank": rank},
            remedy="Set it to the same text for all processes of the job, or for none.",
        )
    return hashlib.sha256(text.encode()).digest()
