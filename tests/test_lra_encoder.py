"""The encoder: padding changes nothing, positions matter, bad options raise."""

import pytest
import torch

from fastattn.lra.encoder import BODIES, MIXERS, Encoder, mixers_of
from fastattn.lra.mixers.softmax import SoftmaxAttention
from fastattn.lra.padding import Padding
from fastattn.lra.positions import rotate, sinusoids


def make(mixer, positions="sinusoidal", **options):
    torch.manual_seed(0)
    sizes = {"width": 32, "depth": 2, "heads": 2, "ff": 48, "max_length": 40}
    return Encoder(20, 10, mixer=mixer, positions=positions, **sizes | options)


EVERY = [(m, "none" if m in BODIES else "sinusoidal") for m in MIXERS]
EVERY += [("softmax", x) for x in ("rotary", "half-rotary", "learned")]
EVERY += [
    ("tcn:kind=circular,blocks=3", "none"),
    ("tcn:kind=symmetric,project=true,blocks=2", "none"),
]
EVERY += [("gru:layers=2,embedding=false", "none"), ("conv:kernel=5,groups=4", "none")]


@pytest.mark.parametrize(("mixer", "positions"), EVERY)
def test_padding_and_the_batch_change_nothing(mixer, positions):
    model = make(mixer, positions)
    lengths = torch.tensor([7, 30, 1, 12])
    tokens = torch.randint(5, 20, (4, 30))
    logits = model(tokens, lengths)
    for i, n in enumerate(lengths.tolist()):
        alone = model(tokens[i : i + 1, :n], lengths[i : i + 1])
        torch.testing.assert_close(logits[i : i + 1], alone, rtol=1e-4, atol=1e-5)
    other = tokens.clone()
    other[torch.arange(30) >= lengths[:, None]] = 3
    assert torch.equal(model(other, lengths), logits)


@pytest.mark.parametrize(("mixer", "positions"), EVERY)
def test_the_order_of_tokens_matters(mixer, positions):
    model = make(mixer, positions)
    tokens, lengths = torch.arange(5, 19)[None], torch.tensor([14])
    change = (model(tokens, lengths) - model(tokens.flip(1), lengths)).abs().max()
    assert change > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("mixer", "positions"), EVERY)
def test_packed_in_16_bits_equals_masked_in_32(mixer, positions):
    model = make(mixer, positions)
    lengths = torch.tensor([7, 30, 1, 12])
    tokens = torch.randint(5, 20, (4, 30))
    want = model(tokens, lengths)
    model.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        got = model(tokens.cuda(), lengths)
        got.square().sum().backward()
    assert (got.cpu().float() - want).abs().max() < 0.05 * want.abs().max()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_rotary_scores_depend_on_the_distance_only():
    q, k = torch.randn(1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 8, dtype=torch.float64)
    at = lambda x, i: rotate(x, torch.tensor([i])).double()  # noqa: E731
    score = lambda i, j: (at(q, i) * at(k, j)).sum()  # noqa: E731
    torch.testing.assert_close(score(9, 4), score(25, 20), rtol=1e-5, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_sinusoids_are_bounded_and_distinct():
    table = sinusoids(500, 33, torch.device("cpu"))
    assert table.shape == (500, 33)
    assert table.abs().max() <= 1
    assert torch.pdist(table).min() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(  # bigbird's torch path takes a minute to trace
    ("mixer", "positions"), [x for x in EVERY if x[0].split(":")[0] not in (*BODIES, "bigbird")]
)
def test_training_compiles_once_for_all_lengths(mixer, positions, quick_compile):
    model, compiled = (make(mixer, positions, pool="cls", depth=1) for _ in range(2))
    compiled.compile_training()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for n in (35, 30, 17, 22):
        lengths = torch.tensor([n, 2, n // 2])
        tokens = torch.randint(5, 20, (3, n))
        wanted, got = model(tokens, lengths), compiled(tokens, lengths)
        torch.testing.assert_close(got, wanted)
        for x, y in zip(gradients(model, wanted), gradients(compiled, got), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compiled.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        compiled.eval()(tokens[:, :20], lengths.clamp(max=20))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_pictures_with_batch_norm_compile(quick_compile):
    options = {"norm": "batch", "embedding": "numbers", "depth": 1, "max_length": 50}
    model, compiled = (make("long_conv", **options) for _ in range(2))
    compiled.compile_training()
    tokens, lengths = torch.randint(20, (3, 50)), torch.full((3,), 50)
    for _ in range(2):
        wanted, got = model(tokens, lengths), compiled(tokens, lengths)
        torch.testing.assert_close(got, wanted)
        for x, y in zip(gradients(model, wanted), gradients(compiled, got), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
    for (name, x), y in zip(model.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(y, x, msg=name)


def gradients(model, out):
    return torch.autograd.grad(out.square().sum(), [*model.parameters()])


def test_what_depends_on_the_length_of_a_batch_is_not_compiled():
    with pytest.raises(ValueError, match="RecurrentBody is a whole network"):
        make("gru", "none").compile_training()
    with pytest.raises(ValueError, match="plan 'google' depends on the length"):
        make("bigbird:plan=google").compile_training()


@pytest.mark.parametrize(
    ("mixer", "positions", "longest"),
    [
        ("linear", "sinusoidal", None),
        ("linear", "learned", 100),
        ("linformer:seq_len=90,slots=16 linear", "sinusoidal", 90),
        ("gmlp", "sinusoidal", 100),
    ],
)
def test_lengths_are_rounded_up_to_what_every_part_can_take(mixer, positions, longest):
    model = make(mixer, positions, max_length=100)
    for n, rounded in ((3, 64), (64, 64), (65, 128), (90, 128)):
        assert model._rounded(n) == min(rounded, longest or rounded)
    assert make("linear", max_length=100)._rounded(200) == 256


def test_padding_in_every_form():
    padding = Padding.of(torch.tensor([2, 3]), 4, torch.device("cpu"))
    assert padding.mask.tolist() == [[False, False, True, True], [False, False, False, True]]
    assert padding.stretches.tolist() == [0, 2, 4, 7, 8]
    assert padding.stretches.dtype == torch.int32
    assert padding.counts.tolist() == [2, 3]
    with pytest.raises(ValueError, match="lengths must be from 1 to n = 4"):
        Padding.of(torch.tensor([0, 3]), 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="on the CPU"):
        Padding.of(torch.zeros(2, device="meta"), 4, torch.device("cpu"))


def test_a_pattern_of_mixers_is_one_a_block_and_repeats():
    model = make("bigbird linear", depth=4)
    kinds = [type(block.mixer).__name__ for block in model.blocks]
    assert kinds == ["BigBirdAttention", "LinearAttention"] * 2
    assert [block.mixer.seed for block in model.blocks[::2]] == [0, 2]


def test_batch_norm_is_of_a_channel_over_all_tokens_of_a_batch():
    model = make("long_conv", norm="batch")
    layer = model.blocks[0].norm_mixer
    x = 3 * torch.randn(4, 10, 32) + 5
    want = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer.norm.running_mean, 0.1 * x.mean((0, 1)))
    layer.eval()
    assert torch.equal(layer(x[:1]), layer(x)[:1])  # not of this batch


@pytest.mark.parametrize("pool", ["mean", "cls", "attention:hops=2"])
def test_batch_norm_is_before_the_pooling(pool):
    model = make("long_conv", norm="batch", pool=pool).eval()
    tokens, lengths = torch.randint(20, (3, 16)), torch.full((3,), 16)
    seen = []
    model.norm.register_forward_hook(lambda module, given, out: seen.append(out))
    logits = model(tokens, lengths)
    n = 17 if pool == "cls" else 16
    assert seen[0].shape == (3, n, 32)
    pooled = model.pool(seen[0], Padding.of(torch.full((3,), n), n, seen[0].device))
    torch.testing.assert_close(logits, model.head(pooled))


@pytest.mark.gpu
def test_batch_norm_is_captured_in_graphs_with_its_statistics():
    options = {"norm": "batch", "embedding": "numbers", "max_length": 64}
    eager, compiled = (make("gmlp", **options).cuda() for _ in range(2))
    compiled.compile_training()
    for _ in range(4):
        tokens, lengths = torch.randint(20, (8, 64), device="cuda"), torch.full((8,), 64)
        for model in (eager, compiled):
            model.zero_grad()
            model(tokens, lengths).square().sum().backward()
    # a shift of all tokens is what the norms take away: its gradient is rounding alone
    largest = max(x.grad.abs().max() for x in eager.parameters())
    for (name, x), y in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        scale = max(x.grad.abs().max(), 1e-2 * largest)
        assert (y.grad - x.grad).abs().max() <= 1e-3 * scale, name
    for (name, x), y in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5, msg=name)


def test_batch_norm_takes_documents_of_one_length():
    model = make("long_conv", norm="batch")
    with pytest.raises(ValueError, match="lengths from 7 to 16 in 16 tokens; take norm layer"):
        model(torch.randint(20, (3, 16)), torch.tensor([16, 7, 9]))


def test_numbers_are_neighbours_as_grey_levels_are():
    model = make("long_conv", embedding="numbers")
    vectors = model.embedding(torch.arange(20))
    steps = vectors.diff(dim=0)
    torch.testing.assert_close(steps, (model.embedding.weight / 19).expand(19, 32))
    assert torch.equal(vectors[0], model.embedding.bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.embedding(torch.arange(20)), vectors)


def test_bad_options_say_what_is_wrong():
    model = make("bigbird:block_size=32,num_random_blocks=1 performer:variant=relu")
    first, second = (block.mixer for block in model.blocks)
    assert (first.block_size, first.num_random_blocks, second.variant) == (32, 1, "relu")
    assert mixers_of("linear:causal=TRUE,backend=torch") == [
        ("linear", {"causal": True, "backend": "torch"})
    ]
    with pytest.raises(ValueError, match=r"options of bigbird are block_size, .*, got 'blocks'"):
        make("bigbird:blocks=3")
    with pytest.raises(ValueError, match="options of softmax are none, got 'window'"):
        make("softmax:window=3")
    for mixer in ("flash", "", "linear flash"):
        with pytest.raises(ValueError, match=r"mixer must be one of softmax, .*linear"):
            make(mixer)
    with pytest.raises(ValueError, match="depth 2 must be a multiple of the mixers"):
        make("linear bigbird linear")
    with pytest.raises(ValueError, match="rotary positions need the mixer softmax"):
        make("softmax linear", "rotary")
    with pytest.raises(ValueError, match="norm must be one of layer, batch, got 'group'"):
        make("linear", norm="group")
    with pytest.raises(ValueError, match="embedding must be one of table, numbers, got 'bytes'"):
        make("linear", embedding="bytes")
    with pytest.raises(ValueError, match="positions must be one of"):
        make("linear", "relative")
    with pytest.raises(ValueError, match="rotary positions need the mixer softmax"):
        make("linear", "rotary")
    with pytest.raises(ValueError, match="even head width, got 15"):
        SoftmaxAttention(30, 2, rotary=True)
    with pytest.raises(ValueError, match="learned positions end at 40, got n = 41"):
        make("linear", "learned")(torch.zeros(1, 41, dtype=torch.int64), torch.tensor([41]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mixer", ["linear", "performer", "bigbird", "linformer", "long_conv", "gmlp", "conv", "tcn"]
)
def test_memory_grows_as_the_length_does(mixer):
    """Not as its square, which a pattern that is only masked would need.

    Over two doublings, in which a mixer may go over to another way of its own: from 8192 tokens on
    the spectra of LongConv's taps are in memory, and Linformer compresses first.
    """
    positions = "none" if mixer in BODIES else "sinusoidal"
    model = make(mixer, positions, max_length=16384, width=64).cuda()

    def peak(n):
        tokens = torch.randint(5, 20, (2, n), device="cuda")
        lengths = torch.tensor([n, n - 7])
        for _ in range(2):  # tables and layouts are made once
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                model(tokens, lengths).sum().backward()
            torch.cuda.synchronize()
            found = torch.cuda.max_memory_allocated() - before
            model.zero_grad()
        return found

    assert peak(16384) < 2.2**2 * peak(4096)
