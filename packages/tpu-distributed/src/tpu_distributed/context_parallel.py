"""Attention over a sequence that is divided over processes: `torch`'s ``context_parallel``.

PyTorch has it for the attention ops of CUDA. As there, ``set_rotate_method("allgather")``, the
default, has each process gather the keys and values of all, and compute the rows of its own queries
as one op. With ``"alltoall"`` they go round a ring (`ring_attention`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from tpu_distributed import ring_attention
from tpu_distributed.torch_compat import functional_collective

# Of `[batch, heads, sequence, features]`.
_SEQUENCE = 2
_FORWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default


def register(module: ModuleType) -> None:
    """Have PyTorch call the functions below for this device's attention.

    Args:
        module: ``torch.distributed.tensor.experimental._context_parallel._attention``.
    """
    options, ring = module._cp_options, module._RotateMethod.ALL_TO_ALL

    def forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        chosen = _forward_in_ring if options.rotate_method is ring else _forward
        return chosen(args, kwargs, options.enable_load_balance)

    def backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        chosen = _backward_in_ring if options.rotate_method is ring else _backward
        return chosen(args, kwargs, options.enable_load_balance)

    module.custom_ops.update({_FORWARD: forward, _BACKWARD: backward})


def _forward(args: tuple[Any, ...], kwargs: dict[str, Any], balanced: bool) -> tuple[Any, ...]:
    query, key, value, causal, dropout = _arguments(args)
    mesh, local = query.device_mesh, query.to_local()
    mask = _mask(mesh, local, key.to_local(), balanced) if causal else None
    keys, values = (_gathered(t) for t in (key, value))
    out, logsumexp, *_, seed, offset, _ = _FORWARD(local, keys, values, mask, dropout, **kwargs)
    return _results(query, key, out, logsumexp, seed, offset)


def _forward_in_ring(
    args: tuple[Any, ...], kwargs: dict[str, Any], balanced: bool
) -> tuple[Any, ...]:
    query, key, value, causal, dropout = _arguments(args)
    mesh, (q, k, v) = query.device_mesh, (t.to_local() for t in (query, key, value))
    plan = _plan(mesh, q, k, causal, balanced)
    found = ring_attention.forward(mesh.get_group(), plan, q, k, v, dropout, **kwargs)
    return _results(query, key, *found)


def _backward(args: tuple[Any, ...], kwargs: dict[str, Any], balanced: bool) -> tuple[Any, ...]:
    from torch.distributed import _functional_collectives as collectives

    grad_out, query, key, value, bias, wanted, out, logsumexp = args[:8]
    sizes, (dropout, causal, seed, offset) = args[8:12], args[12:16]
    _check(bias)
    mesh, local = query.device_mesh, query.to_local()
    mask = _mask(mesh, local, key.to_local(), balanced) if causal else None
    grads = _BACKWARD(
        *(grad_out.to_local(), local, _gathered(key), _gathered(value), mask),
        *([*wanted[:3], False], out.to_local(), logsumexp.to_local(), *sizes),
        *(dropout, False, seed.to_local(), offset.to_local()),
        **kwargs,
    )
    grad_query, *of_all = grads[:3]
    own = [
        None
        if grad is None
        else collectives.wait_tensor(
            functional_collective("reduce_scatter")(grad, "sum", _SEQUENCE, (mesh, 0))
        )
        for grad in of_all
    ]
    return *(None if grad is None else _divided(grad, mesh) for grad in (grad_query, *own)), None


def _backward_in_ring(
    args: tuple[Any, ...], kwargs: dict[str, Any], balanced: bool
) -> tuple[Any, ...]:
    grad_out, query, key, value, bias, wanted, out, logsumexp = args[:8]
    dropout, causal, seeds, offsets = args[12:16]
    _check(bias)
    mesh, (q, k, v) = query.device_mesh, (t.to_local() for t in (query, key, value))
    results = [t.to_local() for t in (out, logsumexp, seeds, offsets)]
    grads = ring_attention.backward(
        mesh.get_group(),
        _plan(mesh, q, k, causal, balanced),
        (q, k, v),
        results,
        grad_out.to_local(),
        wanted[:3],
        args[8:12],
        dropout,
        **kwargs,
    )
    return *(_divided(grad, mesh) for grad in grads), None


def _arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    query, key, value, bias, dropout, causal = (*args, *(None, 0.0, False)[len(args) - 3 :])[:6]
    _check(bias)
    return query, key, value, causal, dropout


def _results(
    query: Any,
    key: Any,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[Any, ...]:
    mesh = query.device_mesh
    rows = [_divided(t, mesh) for t in (out, logsumexp)]
    seeds = [_of_each(t, mesh) for t in (seed, offset)]
    return *rows, None, None, query.shape[_SEQUENCE], key.shape[_SEQUENCE], *seeds, None


def _plan(
    mesh: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, balanced: bool
) -> list[ring_attention.Step | None]:
    queries, keys = query.shape[_SEQUENCE], key.shape[_SEQUENCE]
    rank, size = mesh.get_local_rank(), mesh.size()
    return ring_attention.steps(rank, size, queries, keys, causal, balanced)


def _check(bias: Any) -> None:
    if bias is not None:
        raise NotImplementedError(
            "Attention in context_parallel takes is_causal, but no attn_mask: its rows and columns "
            "would have to be divided as the sequence is. Leave attn_mask out, or call the "
            "attention outside of context_parallel."
        )


def _gathered(part: Any) -> torch.Tensor:
    """The parts of all processes, one after the other."""
    from torch.distributed import _functional_collectives as collectives

    local = part.to_local().contiguous()
    whole = functional_collective("all_gather")(local, _SEQUENCE, (part.device_mesh, 0))
    return collectives.wait_tensor(whole)


def _mask(mesh: Any, query: torch.Tensor, key: torch.Tensor, balanced: bool) -> torch.Tensor:
    """To be added to the scores, minus infinity for keys that come later: `[queries, all keys]`."""
    rows, columns = (
        _positions(mesh.size(), t.shape[_SEQUENCE], balanced, t.device) for t in (query, key)
    )
    later = rows[mesh.get_local_rank()][:, None] < columns.flatten()
    return query.new_zeros(later.shape).masked_fill(later, -torch.inf)


def _positions(size: int, length: int, balanced: bool, device: torch.device) -> torch.Tensor:
    """Places in the sequence of what each process has: `[processes, length]`.

    Balanced, process ``i`` has the ``i``-th and the ``i``-th last of twice as many pieces as there
    are processes, so that each has as much to do under a causal mask.
    """
    places = torch.arange(size * length, device=device)
    if not balanced:
        return places.view(size, length)
    pieces = places.view(2 * size, length // 2)
    return torch.cat([pieces[:size], pieces[size:].flip(0)], 1)


def _divided(local: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, [Shard(_SEQUENCE)], run_check=False)


def _of_each(local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Local values of each process, though DTensor takes them for the same."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
