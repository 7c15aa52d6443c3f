"""Train a character-level GPT on the source code of Python's standard library.

An ordinary PyTorch script: the device is a command-line option, and the only lines that know of one
kind of device are those that report its counters, where it has any.

    python examples/train_char_gpt.py                     # on tpu where it is installed
    python examples/train_char_gpt.py --device cpu --steps 50
    python examples/train_char_gpt.py --mode strict       # one executable for each op
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

VOCAB = 128  # ASCII
console = Console()


# --- model ----------------------------------------------------------------------------------------


def rotation(seq: int, dim: int) -> torch.Tensor:
    """Cosines and sines of rotary position embedding, ``[2, seq, dim / 2]``."""
    angles = torch.arange(seq)[:, None] * 1000.0 ** -torch.linspace(0, 1, dim // 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features of ``x``, ``[..., seq, dim]``, by angles that grow with position."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a GELU MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        q, k, v = (
            t.view(batch, seq, self.heads, dim // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).split(dim, dim=2)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer whose output projection is the token embedding (tied).

    Positions are rotary: a model learns from neighbours sooner than with learned positions, which
    matters in a run of minutes.
    """

    rotation: torch.Tensor

    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("rotation", rotation(seq, dim // heads))
        nn.init.normal_(self.tokens.weight, std=0.02)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                # What is added to the residual stream is scaled by its depth, as in GPT-2.
                residual = name.endswith(("proj", "down"))
                std = module.in_features**-0.5 / (math.sqrt(2 * layers) if residual else 1)
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.rotation[:, : ids.shape[1]])
        return self.head(self.norm(x))

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


# --- data -----------------------------------------------------------------------------------------


def standard_library(held_out_every: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Source text of the standard library's top-level modules: training and held-out characters.

    Every ``held_out_every``-th file, in the order of names, is held out; files that are not pure
    ASCII are left out.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        text = path.read_bytes()
        if text.isascii():
            parts[i % held_out_every == held_out_every - 1].append(text)
    train, held_out = (
        torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
    )
    return train, held_out


def windows(
    text: torch.Tensor, starts: torch.Tensor, seq: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-character targets, both ``[len(starts), seq]`` int64 on the CPU."""
    ids = text[starts[:, None] + torch.arange(seq + 1)].long()
    return ids[:, :-1], ids[:, 1:]


def random_batches(
    text: torch.Tensor, batch: int, seq: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, torch.randint(len(text) - seq, (batch,), generator=generator), seq)


# --- training -------------------------------------------------------------------------------------


@dataclass
class History:
    """What the run has measured so far; losses in nats a character, time in seconds."""

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    tokens_per_second: float = 0.0
    first_loss_seconds: float = 0.0


def optimizer_for(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def schedule(step: int, warmup: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def held_out_loss(model: GPT, text: torch.Tensor, args: argparse.Namespace, batches: int) -> float:
    """Mean loss over ``batches`` batches spread evenly over the held-out text."""
    model.eval()
    starts = torch.linspace(0, len(text) - args.seq - 1, batches * args.batch_size).long()
    total = 0.0
    for part in starts.split(args.batch_size):
        ids, targets = (t.to(args.device) for t in windows(text, part, args.seq))
        total += model.loss(ids, targets).item()
    model.train()
    return total / batches


def train(
    model: GPT, texts: tuple[torch.Tensor, torch.Tensor], args: argparse.Namespace
) -> History:
    """Train ``model`` in place; the loss is read back every ``--log-every`` steps only."""
    optimizer = optimizer_for(model, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, args.warmup, args.steps)
    )
    batches = random_batches(texts[0], args.batch_size, args.seq, args.seed)
    history = History()
    began = time.perf_counter()
    steady_from, steady_since = 0, began
    with progress_bar(args) as progress:
        task = progress.add_task("", total=args.steps, loss="", rate="", counters="")
        for step in range(args.steps):
            ids, targets = (t.to(args.device, non_blocking=True) for t in next(batches))
            loss = model.loss(ids, targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            progress.advance(task)
            if step % args.log_every and step != args.steps - 1:
                continue
            history.train.append((step, loss.item()))
            now = time.perf_counter()
            if len(history.train) == 1:
                history.first_loss_seconds = now - began
            if len(history.train) <= 2:  # programs are compiled in the first steps
                steady_from, steady_since = step, now
            else:
                done = (step - steady_from) * args.batch_size * args.seq
                history.tokens_per_second = done / (now - steady_since)
            show(progress, task, history, args)
            if args.eval_every and step and step % args.eval_every == 0:
                paused = time.perf_counter()
                history.held_out.append((step, held_out_loss(model, texts[1], args, 4)))
                progress.console.print(
                    f"step {step:5d}  held-out loss {history.held_out[-1][1]:.3f}"
                )
                steady_since += time.perf_counter() - paused
    history.held_out.append((args.steps, held_out_loss(model, texts[1], args, 20)))
    return history


# --- generation -----------------------------------------------------------------------------------


@torch.no_grad()
def generate(model: GPT, prompt: torch.Tensor, length: int, args: argparse.Namespace) -> str:
    """Continue ``prompt``, ``[seq]``, by ``length`` characters.

    The window always holds ``seq`` characters, so that every step has the same shapes.
    """
    model.eval()
    window = prompt[None].long().to(args.device)
    characters = []
    for _ in range(length):
        probabilities = F.softmax(model(window)[:, -1] / args.temperature, dim=-1)
        following = torch.multinomial(probabilities, 1)
        window = torch.cat((window[:, 1:], following), dim=1)
        characters.append(chr(int(following)))
    return "".join(characters)


# --- reporting ------------------------------------------------------------------------------------


def device_metrics(device: str) -> dict[str, Any]:
    """The device's counters, or nothing on a device that keeps none."""
    module = torch.get_device_module(device)
    return module.metrics() if hasattr(module, "metrics") else {}


def device_description(device: str) -> tuple[str, str]:
    """What the device is, and the mode its ops run in where it has such a thing."""
    module = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else device
    return name, str(getattr(module, "eager_mode", "-"))


def cache_hits(metrics: dict[str, Any]) -> int:
    return metrics.get("cache_hits_memory", 0) + metrics.get("cache_hits_disk", 0)


def progress_bar(args: argparse.Namespace) -> Progress:
    return Progress(
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]} {task.fields[rate]} {task.fields[counters]}"),
        TimeElapsedColumn(),
        console=console,
    )


def show(progress: Progress, task: Any, history: History, args: argparse.Namespace) -> None:
    """Update the bar; where there is no terminal to draw one on, print a line."""
    step, loss = history.train[-1]
    metrics = device_metrics(args.device)
    texts: dict[str, Any] = {
        "loss": f"loss {loss:.3f}",
        "rate": f"{history.tokens_per_second:,.0f} tok/s" if history.tokens_per_second else "",
        "counters": (
            f"{metrics.get('compiles', 0)} compiles, {cache_hits(metrics):,} cache hits"
            if metrics
            else ""
        ),
    }
    progress.update(task, **texts)
    if not console.is_terminal:
        console.print(f"step {step:5d}  " + "  ".join(t for t in texts.values() if t))


def summary(history: History, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    metrics = device_metrics(args.device)
    platform, mode = device_description(args.device)
    return {
        "platform": platform,
        "mode": mode,
        "tokens_per_second": round(history.tokens_per_second),
        "compiles": metrics.get("compiles", 0),
        "compile_seconds": metrics.get("compile_seconds", 0.0),
        "cache_hits": cache_hits(metrics),
        "cache_hits_disk": metrics.get("cache_hits_disk", 0),
        "fallbacks": metrics.get("fallbacks", 0),
        "host_syncs": metrics.get("host_syncs", 0),
        "first_loss": history.train[0][1],
        "held_out_loss": history.held_out[-1][1],
        "seconds": seconds,
        "history": asdict(history),
    }


def print_summary(result: dict[str, Any]) -> None:
    table = Table(show_header=False, title="Run")
    for label, value in (
        ("platform", result["platform"]),
        ("mode", result["mode"]),
        ("tokens/s", f"{result['tokens_per_second']:,}"),
        ("compiles", f"{result['compiles']} in {result['compile_seconds']:.1f} s"),
        ("cache hits", f"{result['cache_hits']:,}, {result['cache_hits_disk']} from disk"),
        ("fallbacks", result["fallbacks"]),
        ("host syncs", result["host_syncs"]),
        ("loss at the start", f"{result['first_loss']:.3f} nats/character"),
        ("held-out loss", f"{result['held_out_loss']:.3f} nats/character"),
        ("time", f"{result['seconds']:.0f} s"),
    ):
        table.add_row(label, str(value))
    console.print(table)


def plot(history: History, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*history.train), label="training")
    axes.plot(*zip(*history.held_out), "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss, nats a character", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# --- main -----------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "tpu" if hasattr(torch, "tpu") else accelerator.type if accelerator else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default=device, help="any device PyTorch has")
    parser.add_argument(
        "--mode", choices=("debug", "strict", "fused"), help="execution mode, on tpu"
    )
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps of learning-rate warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="bound of the gradient's norm")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256, help="characters of context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, help="steps between reads of the loss")
    parser.add_argument("--eval-every", type=int, default=150, help="0: at the end only")
    parser.add_argument("--sample", type=int, default=300, help="characters to generate")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=Path("out/char_gpt"), help="folder of results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    device_module = torch.get_device_module(args.device)
    if args.mode and hasattr(device_module, "eager_mode"):
        device_module.eager_mode = args.mode
    torch.manual_seed(args.seed)
    began = time.perf_counter()
    texts = standard_library()
    model = GPT(args.layers, args.dim, args.heads, args.seq).to(args.device)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"GPT of {parameters / 1e6:.2f} M parameters; {len(texts[0]) / 1e6:.2f} M characters to "
        f"learn from, {len(texts[1]) / 1e6:.2f} M held out."
    )
    history = train(model, texts, args)
    result = summary(history, args, time.perf_counter() - began)

    if args.sample:
        prompt = texts[1][: args.seq]
        text = generate(model, prompt, args.sample, args)
        result = summary(history, args, time.perf_counter() - began)
        console.rule("generated")
        console.print(text, markup=False, highlight=False)
        console.rule()
    args.out.mkdir(parents=True, exist_ok=True)
    plot(history, args.out / "loss.png")
    (args.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    print_summary(result)
    console.print(f"Loss curve: {args.out / 'loss.png'}")
    return result


if __name__ == "__main__":
    main()
