"""Several processes: data parallel and sharded training give what one process gives."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastattn import MECHANISMS, PerformerAttention, convert
from fastattn.nn import redraw_projections

WORLD = 2
WIDTH, HEADS, N = 24, 4, 32
OPTIONS = {
    "linear": {},
    "performer": {"num_features": 16, "redraw": 2},
    "bigbird": {"block_size": 16},
    "linformer": {"seq_len": N, "slots": 8},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def encoder(name, device):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    convert(model, name, **OPTIONS[name])
    return model.to(device)


def batch(device):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2 * WORLD, N, WIDTH, generator=generator)
    pad = torch.arange(N) >= torch.tensor([[N], [20], [25], [9]])
    return x.to(device), pad.to(device)


def train(model, x, pad, steps=3):
    """Losses of a few steps; every rank has its share of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(1, steps + 1):
        out = model(x, src_key_padding_mask=pad).masked_fill(pad.unsqueeze(-1), 0)
        loss = (out * x).square().sum((1, 2)).mean() / N
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        redraw_projections(model, step)
        losses.append(loss.detach())
    return torch.stack(losses)


def on_every_rank(rank, store, device, kind):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        for name in MECHANISMS:
            compare(name, device, kind, rank)
    finally:
        dist.destroy_process_group()


def compare(name, device, kind, rank):
    x, pad = batch(device)
    alone = encoder(name, device)
    model = copy.deepcopy(alone)
    want = train(alone, x, pad)
    if kind == "data parallel":
        model = DistributedDataParallel(model, device_ids=[rank] if device == "cuda" else None)
    else:
        mesh = init_device_mesh(device, (WORLD,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    share = slice(2 * rank, 2 * rank + 2)
    losses = train(model, x[share], pad[share])
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / WORLD, want, rtol=1e-4, atol=1e-6)

    inner = model.module if kind == "data parallel" else model
    after = inner.state_dict()
    assert after.keys() == alone.state_dict().keys()
    for label, tensor in alone.state_dict().items():
        found = after[label]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-5)
    drawn = [m.projection for m in inner.modules() if isinstance(m, PerformerAttention)]
    for projection in drawn:  # the same on every rank, and no longer the first
        others = [torch.empty_like(projection) for _ in range(WORLD)]
        dist.all_gather(others, projection)
        assert all(torch.equal(projection, other) for other in others)
        assert not any(
            torch.equal(projection, m.projection) for m in encoder(name, device).modules()
            if isinstance(m, PerformerAttention)
        )  # fmt: skip
    assert len(drawn) == (2 if name == "performer" else 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["data parallel", "sharded"])
def test_two_ranks_train_as_one_process_does(kind, device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip("needs two CUDA devices")
    mp.spawn(on_every_rank, (tmp_path / "store", device, kind), nprocs=WORLD)
