"""BigBirdAttention: what the contract of every mechanism does not cover."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastattn import BigBirdAttention, convert
from fastattn.nn.bigbird import _layout

WIDTH, HEADS = 24, 4


def make(**options):
    options = {"block_size": 16, "batch_first": True, "dtype": torch.float64} | options
    return BigBirdAttention(WIDTH, HEADS, **options)


def tokens(b, n):
    return torch.randn(b, n, WIDTH, dtype=torch.float64)


# Hugging Face's BigBird


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("plan", ["hf-train", "hf-eval"])
@pytest.mark.parametrize(
    ("n", "size", "num_random", "layer"),
    [(256, 16, 3, 1), (1024, 64, 3, 3), (1600, 64, 2, 5), (192, 16, 3, 0), (4096, 64, 3, 7)],
    ids=["two segments", "paper at 1024", "one segment", "short", "paper at 4096"],
)
def test_it_computes_what_hugging_face_does(n, size, num_random, layer, plan, padded):
    """In training and in eval, which there differ: to float64 rounding, projections included."""
    numpy = pytest.importorskip("numpy")
    hf = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    config = hf.BigBirdConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        block_size=size,
        num_random_blocks=num_random,
        attention_probs_dropout_prob=0.0,
    )
    theirs = hf.BigBirdAttention(config, seed=layer).double().train(plan == "hf-train")
    ours = make(block_size=size, num_random_blocks=num_random, plan=plan, layer=layer)
    ours.load_hf_bigbird({f"encoder.{k}": v for k, v in theirs.state_dict().items()})
    x, ignored = tokens(2, n), torch.zeros(2, n, dtype=torch.bool)
    if padded:
        ignored[0, n - n // 5 :] = True
    blocked, *masks = hf.BigBirdModel.create_masks_for_block_sparse_attn((~ignored).double(), size)
    want = theirs.output.dense(theirs.self(x, *masks, blocked, blocked)[0])
    state = numpy.random.get_state()[1].tolist()
    got = ours(x, x, x, key_padding_mask=ignored)[0]
    assert numpy.random.get_state()[1].tolist() == state
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)


def test_a_published_plan_pads_to_whole_blocks_as_its_code_does():
    ours = make(plan="hf-train")
    x = tokens(2, 250)
    padded = F.pad(x, (0, 0, 0, 6))
    ignored = (torch.arange(256) >= 250).expand(2, -1)
    want = ours(padded, padded, padded, ignored)[0][:, :250]
    torch.testing.assert_close(ours(x, x, x)[0], want)
    weights = ours(x, x, x, need_weights=True)[1]
    assert weights.shape == (2, 250, 250)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 250, dtype=torch.float64))


def test_a_published_plan_is_drawn_where_it_is_needed():
    with torch.device("meta"):
        assert make(plan="hf-train").out_proj.weight.is_meta
    ours = make(plan="google", num_random_blocks=5)  # which has no plan for few blocks
    x = tokens(1, 400)
    assert ours(x, x, x)[0].isfinite().all()
    with torch.device("meta"):
        layout = make(plan="hf-train")._layout(400)
    assert layout.to_dense().device.type == "cpu"
    assert make(plan="hf-train")(x[:, :0], x[:, :0], x[:, :0])[0].shape == (1, 0, WIDTH)


@pytest.mark.parametrize("plan", ["google", "hf-train", "hf-eval"])
def test_a_published_plan_breaks_a_graph_and_is_refused_by_name_where_none_may_break(plan):
    torch._dynamo.reset()
    ours = make(plan=plan, num_random_blocks=1).eval()
    x = tokens(1, 160)
    want = ours(x, x, x)[0]
    whole = torch.compile(ours, fullgraph=True, backend="aot_eager")
    message = f"plan='{plan}' is drawn by NumPy.*fullgraph=False.*strict=False.*plan='uniform'"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        whole(x, x, x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager")(x, x, x)[0], want)
    program = torch.export.export(ours, (x, x, x), strict=False)
    torch.testing.assert_close(program.module()(x, x, x)[0], want)


def test_weights_that_do_not_fit_are_named():
    ours = make()
    names = [f"self.{x}.weight" for x in ("query", "key", "value")] + ["output.dense.weight"]
    state = {name: torch.randn(WIDTH, WIDTH) for name in names}
    state["output.dense.bias"] = torch.randn(WIDTH)
    ours.load_hf_bigbird(state)  # a model with use_bias=False
    assert torch.all(ours.in_proj_bias == 0)
    with pytest.raises(ValueError, match=r"must have one self\.key\.weight, it is not there"):
        ours.load_hf_bigbird({k: v for k, v in state.items() if "key" not in k})
    both = state | {f"layer.1.{k}": v for k, v in state.items()}
    with pytest.raises(ValueError, match=r"one self\.query\.weight, it is self\.query\.weight, la"):
        ours.load_hf_bigbird(both)
    with pytest.raises(ValueError, match=r"self\.value\.weight must have shape \(24, 24\)"):
        ours.load_hf_bigbird(state | {"self.value.weight": torch.randn(3, 24)})
    with pytest.raises(ValueError, match="a module with biases and without kdim"):
        make(bias=False).load_hf_bigbird(state)


# The pattern


def test_a_short_sequence_is_softmax_attention():
    ours = make(dropout=0.0)
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    stock.load_state_dict(ours.state_dict())
    x = tokens(2, 16 * 7)
    ignored = torch.rand(2, 16 * 7) < 0.3
    ignored[:, -1] = False  # what is behind the last token is no row of the sample
    torch.testing.assert_close(ours(x, x, x, ignored)[0], stock(x, x, x, ignored)[0])


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 333])
def test_a_sample_does_not_depend_on_its_batch(n):
    ours = make()
    x = tokens(3, 400)
    ends = torch.tensor([400, n, 7])
    ignored = torch.arange(400) >= ends[:, None]
    got = ours(x, x, x, ignored)[0][1, :n]
    alone = ours(*(x[1:2, :n],) * 3)[0][0]
    torch.testing.assert_close(got, alone)


def test_padding_in_front_is_only_masked():
    ours = make()
    x = tokens(1, 300)
    ignored = torch.zeros(1, 300, dtype=torch.bool)
    ignored[:, :50] = True
    weights = ours(x, x, x, ignored, need_weights=True, average_attn_weights=False)[1][0]
    seen = ours._layout(300).to_dense().repeat_interleave(16, 1).repeat_interleave(16, 2)
    seen = seen[:, :300, :300] & ~ignored[0]
    assert torch.equal(weights > 0, seen)


def test_training_equals_eval_up_to_dropout():
    ours = make()
    x = tokens(2, 300)
    assert torch.equal(ours.train()(x, x, x)[0], ours.eval()(x, x, x)[0])
    assert not torch.equal(make(dropout=0.1).train()(x, x, x)[0], ours(x, x, x)[0])


def test_the_weights_are_true_and_sum_to_one_in_training_too():
    ours = make(dropout=0.5).train()
    x = tokens(2, 300)
    weights = ours(x, x, x, need_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 300, dtype=torch.float64))


def test_a_longer_sequence_between_two_short_ones_changes_nothing():
    """Hugging Face's switches to dense attention for good (transformers 20031)."""
    ours, fresh = make(), make()
    fresh.load_state_dict(ours.state_dict())
    short, long = tokens(1, 32), tokens(1, 400)
    alone = fresh(long, long, long)[0]  # of one that has seen no short one
    before = ours(short, short, short)[0]
    assert torch.equal(ours(long, long, long)[0], alone)
    assert torch.equal(ours(short, short, short)[0], before)
    assert torch.equal(ours(long, long, long)[0], alone)
    assert not ours._layout(400).to_dense().all()


def test_modules_with_other_options_have_layouts_of_their_own():
    """DeepSpeed keeps them by length alone."""
    x = tokens(1, 400)
    base = make()
    for options in ({"num_random_blocks": 1}, {"seed": 1}, {"layer": 1}, {"num_window_blocks": 5}):
        other = make(**options)
        other.load_state_dict(base.state_dict())
        assert not torch.equal(other(x, x, x)[0], base(x, x, x)[0]), options


def test_converted_layers_draw_different_blocks():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    names = convert(model, "bigbird", block_size=16, layer=4)
    layouts = [model.get_submodule(name)._layout(400) for name in names]
    assert [x.recipe.layer for x in layouts] == [4, 5, 6]
    assert len({x.to_dense().numpy().tobytes() for x in layouts}) == 3


def test_layouts_are_made_once():
    _layout.cache_clear()
    ours, x = make(), tokens(1, 100)
    for _ in range(3):
        ours(x, x, x)
    assert _layout.cache_info().misses == 1


# Global tokens


def test_global_tokens_are_seen_by_all_and_see_all():
    ours = make(num_global_tokens=3, num_random_blocks=0, num_global_blocks=0)
    x = tokens(2, 300)
    out, weights = ours(x, x, x, need_weights=True, average_attn_weights=False)
    assert out.shape == (2, 300, WIDTH)
    assert weights.shape == (2, HEADS, 300, 303)
    assert torch.all(weights[..., 300:] > 0)
    row = torch.arange(300) // 16
    assert torch.equal(weights[0, 0, :, :300] > 0, (row[:, None] - row).abs() <= 1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 300, dtype=torch.float64))


def test_few_global_tokens_equal_softmax_attention_with_them_in_front():
    ours = make(num_global_tokens=5)
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    stock.load_state_dict({k: v for k, v in ours.state_dict().items() if k != "global_tokens"})
    x = tokens(2, 40)
    ignored = torch.arange(40) >= torch.tensor([[40], [22]])
    whole = torch.cat([ours.global_tokens.expand(2, -1, -1), x], 1)
    want = stock(whole, whole, whole, F.pad(ignored, (5, 0)))[0][:, 5:]
    got = ours(x, x, x, ignored)[0]
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1, :22], want[1, :22])
    got.sum().backward()
    assert ours.global_tokens.grad.abs().sum() > 0


def test_global_tokens_are_in_the_state_dict_and_missing_ones_are_made():
    ours = make(num_global_tokens=5)
    other = make(num_global_tokens=5)
    other.load_state_dict(ours.state_dict())
    x = tokens(1, 40)
    assert torch.equal(ours(x, x, x)[0], other(x, x, x)[0])
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    before = other.global_tokens
    other.load_state_dict(stock.state_dict())  # strictly
    assert other.global_tokens is before  # an optimizer may know it


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "no place for the keys of add_bias_kv"),
        ({"add_zero_attn": True}, "num_global_tokens adds learned tokens"),
        ({"num_global_tokens": -1}, "num_global_tokens must not be negative"),
        ({"num_global_tokens": 1, "kdim": 5}, "keys and values as wide as queries"),
        ({"num_global_tokens": 1, "plan": "google"}, "needs plan='uniform'"),
        ({"block_size": 20}, "block_size must be 16, 32, 64 or 128"),
        ({"num_window_blocks": 2}, "odd and at least 1"),
        ({"plan": "random"}, "plan must be one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_what_the_pattern_cannot_do_is_refused_with_the_way_out():
    ours = make()
    x = tokens(1, 20)
    with pytest.raises(NotImplementedError, match="takes causal layouts"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(NotImplementedError, match="takes causal layouts"):
        ours(x, x, x, attn_mask=torch.ones(20, 20, dtype=torch.bool).triu(1))
    with pytest.raises(ValueError, match="n = 20 and s = 9: its pattern is one of self-attention"):
        ours(x, x[:, :9], x[:, :9])
