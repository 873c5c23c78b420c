"""Train a softmax model on patches of pictures, convert it, fine-tune it; and train each attention
from scratch beside it.

    python examples/from_checkpoint.py --data DIR --out RUN

DIR holds MNIST, Fashion-MNIST, CIFAR-10 or CIFAR-100 as published, or as torchvision keeps them.
RUN gets results.json, table.md and softmax.pt. A run that was stopped goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.lra.pictures import Pictures, read_pictures

# name: mechanism and its options; for n tokens
ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("", {}),
    **{f"performer, {m} features": ("performer", {"num_features": m}) for m in (16, 64, 128)},
    **{
        f"performer, relu, {m} features": ("performer", {"num_features": m, "variant": "relu"})
        for m in (16, 64, 128)
    },
    "deterministic relu": ("linear", {"feature_map": "relu"}),
    "deterministic exp": ("linear", {"feature_map": "exp"}),
    "linear": ("linear", {}),
    "linformer, n / 4 slots": ("linformer", {}),
    "bigbird, blocks of 16": ("bigbird", {"block_size": 16, "num_random_blocks": 2}),
}


class PatchClassifier(nn.Module):
    """A vision transformer of torch's own layers: patches, learned positions, mean, classes.

    Args:
        patch: Side of a patch, which divides the pictures'.
        side, colours: Of the pictures.
        classes: Number of logits.
    """

    def __init__(
        self, patch: int, side: int, colours: int, classes: int, width: int, heads: int, depth: int
    ) -> None:
        super().__init__()
        if side % patch:
            raise ValueError(f"patch must divide the side of {side} pixels, got {patch}")
        self.patch = patch
        self.tokens = (side // patch) ** 2
        self.embedding = nn.Linear(patch * patch * colours, width)
        self.positions = nn.Parameter(0.02 * torch.randn(self.tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 3 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """``(b, side, side, colours)`` uint8 to ``(b, classes)``."""
        b, side, _, colours = pixels.shape
        rows = side // self.patch
        x = pixels.view(b, rows, self.patch, rows, self.patch, colours)
        x = x.transpose(2, 3).reshape(b, self.tokens, -1).float() / 127.5 - 1
        return self.head(self.encoder(self.embedding(x) + self.positions).mean(1))


def converted(model: PatchClassifier, name: str) -> PatchClassifier:
    """The model itself, with another attention."""
    mechanism, options = ATTENTIONS[name]
    if mechanism == "linformer":
        options = {"seq_len": model.tokens, "slots": max(1, model.tokens // 4)}
    if mechanism:
        device = model.positions.device
        fastattn.convert(model, mechanism, **options)
        model.to(device)
    return model


def train(
    model: nn.Module, data: Pictures, *, epochs: int, batch: int, lr: float, seed: int
) -> dict[str, float]:
    """AdamW, a tenth of warm-up, then a cosine; milliseconds of a step and seconds of all."""
    device = next(model.parameters()).device
    pixels, labels = (torch.from_numpy(x.copy()).to(device) for x in data)
    steps = epochs * (len(labels) // batch)
    if not steps:
        raise ValueError(f"batch must be at most the {len(labels)} pictures, got {batch}")
    warmup = max(1, steps // 10)

    def share(step: int) -> float:
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model.train()
    times = []
    begin = time.perf_counter()
    for _ in range(epochs):
        shuffled = torch.randperm(len(labels), generator=order).to(device)
        for index in shuffled.split(batch)[: len(labels) // batch]:
            start = _now(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(pixels[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if len(times) < 200:  # so that the rest need not be waited for
                times.append(_now(device) - start)
    return {
        "ms_per_step": round(1e3 * statistics.median(times), 3),
        "seconds": round(_now(device) - begin, 1),
        "loss": round(float(loss.detach()), 4),
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def accuracy(model: nn.Module, data: Pictures) -> float:
    """Of every picture, once."""
    device = next(model.parameters()).device
    model.eval()
    right = 0
    for pixels, labels in zip(
        torch.from_numpy(data.pixels.copy()).split(1000),
        torch.from_numpy(data.labels).split(1000),
        strict=True,
    ):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = model(pixels.to(device)).argmax(-1)
        right += int((found.cpu() == labels).sum())
    return round(right / len(data.labels), 4)


def table(results: dict[str, Any]) -> str:
    """Markdown, one row an attention."""
    rows = [
        "| attention | from scratch, % | converted, % | and tuned, % | ms per step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in results["rows"].items():
        shown = (row.get("scratch", {}), row.get("converted", {}), row.get("tuned", {}))
        percents = [f"{100 * x['accuracy']:.2f}" if "accuracy" in x else "-" for x in shown]
        rows.append(f"| {name} | {' | '.join(percents)} | {shown[0]['ms_per_step']:.2f} |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = read_pictures(options.data)
    if options.train_pictures:
        data["train"] = Pictures(*(x[: options.train_pictures] for x in data["train"]))
    side, colours = data["train"].pixels.shape[2:]
    classes = int(data["train"].labels.max()) + 1
    settings = {
        key: getattr(options, key)
        for key in ("patch", "width", "heads", "depth", "epochs", "batch", "lr", "seed")
    }
    about = {
        "data": {
            "directory": Path(options.data).name,
            **{name: len(split.labels) for name, split in data.items()},
            "side": side,
            "colours": colours,
            "classes": classes,
        },
        "settings": settings,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "versions": {"fastattn": fastattn.__version__, "torch": torch.__version__},
    }
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = _started(out / "results.json", about)
    checkpoint = out / "softmax.pt"

    def fresh() -> PatchClassifier:
        torch.manual_seed(options.seed)
        sizes = (options.width, options.heads, options.depth)
        return PatchClassifier(options.patch, side, colours, classes, *sizes).to(device)

    training = {key: settings[key] for key in ("epochs", "batch", "lr", "seed")}
    for name in ("softmax", *(x for x in ATTENTIONS if x != "softmax")):
        row = results["rows"].setdefault(name, {})
        if "scratch" not in row:
            model = converted(fresh(), name)
            row["scratch"] = train(model, data["train"], **training)
            row["scratch"]["accuracy"] = accuracy(model, data["test"])
            if name == "softmax":
                torch.save(model.state_dict(), checkpoint)
            _write(out, results)
        if "tuned" not in row:  # softmax as well, which has been trained twice then
            model = fresh()
            state = torch.load(checkpoint, map_location=device, weights_only=True)
            model.load_state_dict(state)
            row["converted"] = {"accuracy": accuracy(converted(model, name), data["test"])}
            row["tuned"] = train(model, data["train"], **training)
            row["tuned"]["accuracy"] = accuracy(model, data["test"])
            _write(out, results)
        print(name, json.dumps(row), flush=True)
    print(table(results), end="")
    return 0


def _started(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What is there already, of the same settings and data."""
    if not path.is_file():
        return {**about, "rows": {}}
    results: dict[str, Any] = json.loads(path.read_text())
    for key in ("data", "settings"):
        if results[key] != about[key]:
            raise SystemExit(f"{path} was made with {key} {results[key]}, not {about[key]}")
    return results


def _write(out: Path, results: dict[str, Any]) -> None:
    """Whole files, so that a killed run leaves the old ones."""
    for name, text in (
        ("results.json", json.dumps(results, indent=1) + "\n"),
        ("table.md", table(results)),
    ):
        part = out / f"{name}.part"
        part.write_text(text)
        part.replace(out / name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="directory of the pictures")
    parser.add_argument("--out", required=True, help="directory of the run")
    parser.add_argument("--patch", type=int, default=2, help="side of a patch, in pixels")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8, help="of each training")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--train-pictures", type=int, help="only so many, for a trial")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
