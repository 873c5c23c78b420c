"""Training in plain torch, loss for loss what ``fastattn-lra fit`` does on one device.

    python examples/plain_training.py DATA_DIR [MIXER] [RECIPE]

Left out: additional sets, falling on plateaus, the penalty of attention pooling, redrawing random
features, denoising, stopping early, files, several devices, compiling.
"""

import sys

import torch
import torch.nn.functional as F

from fastattn.lra.augmentations import augmentation
from fastattn.lra.data import BatchStream
from fastattn.lra.encoder import encoder_for
from fastattn.lra.loading import EvaluationData
from fastattn.lra.recipes import RECIPES
from fastattn.lra.tasks import TASKS


def train(task, recipe, mixer, splits, device):
    """Yield (step, mean training loss since the last, validation loss, validation accuracy)."""
    torch.manual_seed(recipe.seed)
    model = encoder_for(task, recipe, mixer).to(device)
    optimizer = torch.optim.AdamW(model.parameter_groups(recipe.weight_decay), betas=recipe.betas)
    amp = torch.autocast(device, torch.bfloat16, enabled=recipe.bf16 and device == "cuda")
    augment = augmentation(task, recipe)
    step, losses = 0, []
    for number, phase in enumerate(recipe.phases):
        seed = 1000 * recipe.seed + number
        stream = BatchStream(splits["train"], phase.batch_size, seed=seed, augment=augment)
        for i in range(phase.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr_at(step)
            torch.manual_seed(recipe.seed * 1_000_003 + step)
            tokens, lengths, labels = stream[i]
            with amp:
                logits = model(tokens.to(device), lengths)
                loss = F.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            losses.append(loss.detach())
            step += 1
            if (i + 1) % recipe.validate_every == 0 or i + 1 == phase.steps:
                with amp:
                    scores = evaluate(model, splits["val"], recipe.phases[-1].batch_size, device)
                yield step, torch.stack(losses).mean().item(), *scores
                losses.clear()


@torch.no_grad()
def evaluate(model, split, batch_size, device):
    """Mean loss and accuracy over the samples of a split."""
    model.eval()
    loss = right = 0
    data = EvaluationData(split, batch_size)
    for i in range(len(data.batches)):
        tokens, lengths, labels = data[i]
        logits = model(tokens.to(device), lengths).float().cpu()
        loss += F.cross_entropy(logits, labels, reduction="none").double().sum().item()
        right += (logits.argmax(-1) == labels).sum().item()
    model.train()
    return loss / len(split), right / len(split)


if __name__ == "__main__":
    data_dir, mixer, recipe = (*sys.argv[1:], *("linear", "smoke")[len(sys.argv) - 2 :])
    task, splits = TASKS["listops"], TASKS["listops"].load(data_dir)
    longest = max(int(split.lengths.max()) for split in splits.values())
    recipe = RECIPES[recipe].on(len(splits["train"]), longest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for entry in train(task, recipe, mixer, splits, device):
        print("step {}: train {:.4f}, val {:.4f}, accuracy {:.4f}".format(*entry))
