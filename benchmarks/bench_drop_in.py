"""From which length on is a model faster with another attention in it, all else being stock?"""

import copy

import pytest
import torch
from torch import nn

from fastattn import MECHANISMS, convert

B, WIDTH, H, LAYERS = 4, 512, 8, 2
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
OPTIONS = {"performer": {"num_features": 256}, "linformer": {"slots": 256}}
PASSES = pytest.mark.parametrize("backward", [False, True])


def encoder(n, device):
    layer = nn.TransformerEncoderLayer(
        WIDTH, H, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(
        device, torch.bfloat16
    )


@PASSES
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("rival", ["stock", *MECHANISMS])
def bench_encoder(bench, rival, n, backward):
    """torch's encoder as it is, and converted, in turn: training, or eval without gradients, where
    stock takes its fast path."""
    (x,) = bench.inputs((B, n, WIDTH))
    stock = encoder(n, x.device).train(backward)
    model = stock
    if rival != "stock":
        options = OPTIONS.get(rival, {}) | ({"seq_len": n} if rival == "linformer" else {})
        model = copy.deepcopy(stock)
        convert(model, rival, **options)

    def runs(model):
        def run(x):
            with torch.set_grad_enabled(backward):
                return model(x)

        return run, [*model.parameters()] if backward else []

    run, parameters = runs(model)
    bench(
        run,
        [x],
        backward=backward,
        parameters=parameters,
        beside=None if model is stock else runs(stock),
        case={
            "op": f"nn.TransformerEncoder of {LAYERS} layers",
            "rival": rival,
            "base": "stock",
            "shape": [B, n, WIDTH],
            "n": n,
            "dtype": "bfloat16",
        },
    )
