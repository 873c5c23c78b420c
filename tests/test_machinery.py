"""What PyTorch does with modules: compiling, exporting, transforming, adapting them."""

import copy
import io
import warnings

import pytest
import torch
from test_mechanisms import HEADS, OPTIONS, WIDTH, takes
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fastattn import MECHANISMS, LongConv, ToeplitzMix, convert, ops

backends = pytest.mark.parametrize("backend", ["torch", "triton"])
mechanisms = pytest.mark.parametrize("name", MECHANISMS)


def module(name, device, backend=None, **options):
    torch.manual_seed(0)
    made = MECHANISMS[name](
        WIDTH, HEADS, batch_first=True, device=device, backend=backend, **OPTIONS[name] | options
    )
    return made


def tokens(*shape, device):
    return torch.randn(*shape, WIDTH, device=device)


def assert_same(found, want):
    """To the rounding of float32 sums."""
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5 * want.abs().max().item() + 1e-7)


# torch.compile and torch.export


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, None) for name in MECHANISMS), ("linear", "triton")]
)
def test_one_graph_serves_every_length_forward_and_backward(name, backend, kernel_device, compiler):
    torch._dynamo.reset()
    more = {"seq_len": 64} if name == "linformer" else {}
    ours = module(name, kernel_device, backend, **more)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=compiler)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for b, n in ((2, 20), (3, 33), (2, 47)):
            x = tokens(b, n, device=kernel_device).requires_grad_()
            out = compiled(x, x, x)[0]
            (found,) = torch.autograd.grad(out.square().sum(), x)
            want = ours(x, x, x)[0]
            assert_same(out, want)
            assert_same(found, torch.autograd.grad(want.square().sum(), x)[0])


def masks(form, b, n, device):
    """Arguments of a call: with padding behind, and a causal one if it says so."""
    padding = (torch.arange(n, device=device) >= n - 3).repeat(b, 1)
    padding[0] = False
    options = {"is_causal": True} if "causal" in form else {}
    if "bool" in form:
        options["key_padding_mask"] = padding
    if "float" in form:
        options["key_padding_mask"] = torch.zeros(b, n, device=device).masked_fill(
            padding, -torch.inf
        )
    return options


@pytest.mark.parametrize("form", ["float", "causal float"])
@mechanisms
def test_one_graph_serves_every_length_with_a_mask(name, form, device, compiler):
    """Of causal FAVOR+ on the torch path: up to a chunk of 64; then a graph for every doubling."""
    if "causal" in form and not takes(name, "causal"):
        pytest.skip(f"{name} refuses causal")
    torch._dynamo.reset()
    more = {"seq_len": 256} if name == "linformer" else {}
    ours = module(name, device, **more)
    compiled = torch.compile(ours, fullgraph=True, backend=compiler)
    longer = () if device == "cuda" else (64,) if name == "performer" else (64, 150)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (20, 33, 47, *longer):
            x, options = tokens(2, n, device=device), masks(form, 2, n, device)
            for tensor in (x, *(y for y in options.values() if isinstance(y, torch.Tensor))):
                torch._dynamo.mark_dynamic(tensor, 1)
            x.requires_grad_()
            (out, want) = (f(x, x, x, **options)[0] for f in (compiled, ours))
            assert_same(out.detach(), want.detach())
            found, exact = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, want))
            assert_same(found, exact)


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_compiled_steps_of_any_length_carry_the_state_of_eager(name):
    torch._dynamo.reset()
    ours = module(name, "cpu", causal=True)
    compiled = torch.compile(ours.step, fullgraph=True, backend="aot_eager")
    x = tokens(2, 45, device="cpu")
    with torch.no_grad():
        want, whole = ours.step(x, x, x)
        first = x[:, :6]
        out, state = ours.step(first, first, first)
        outs = [out]
        for piece in x[:, 6:].split((17, 21, 1), 1):
            piece = piece.contiguous()
            if piece.shape[1] > 1:
                torch._dynamo.mark_dynamic(piece, 1)
            out, state = compiled(piece, piece, piece, state)
            outs.append(out)
    assert_same(torch.cat(outs, 1), want)
    for found, exact in zip(state, whole, strict=True):
        assert (found is None) == (exact is None)
        if exact is not None:
            assert_same(found, exact)


@mechanisms
def test_export_keeps_the_numbers_and_takes_other_batches(name, device):
    ours = module(name, device).eval()
    x = tokens(2, 16, device=device)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(ours, (x, x, x), dynamic_shapes=({0: batch},) * 3)
    for b in (2, 5):
        x = tokens(b, 16, device=device)
        assert_same(program.module()(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("form", ["bool", "float"])
@mechanisms
def test_a_saved_export_takes_other_batches_and_lengths(name, form):
    more = {"seq_len": 256} if name == "linformer" else {}
    ours = module(name, "cpu", **more).eval()
    either = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    x, options = tokens(3, 40, device="cpu"), masks(form, 3, 40, "cpu")
    shapes = dict.fromkeys(("query", "key", "value", *options), either)
    program = torch.export.export(ours, (x, x, x), options, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for b, n in ((3, 40), (2, 17), (5, 64), (4, 200)):
        x, options = tokens(b, n, device="cpu"), masks(form, b, n, "cpu")
        assert_same(loaded(x, x, x, **options)[0], ours(x, x, x, **options)[0])


def test_an_export_of_favor_takes_lengths_from_a_range():
    ours = module("performer", "cpu").eval()
    x, n = tokens(2, 40, device="cpu"), torch.export.Dim("n", min=17, max=4096)
    program = torch.export.export(ours, (x, x, x), dynamic_shapes=({1: n},) * 3)
    for length in (17, 300):
        x = tokens(2, length, device="cpu")
        assert_same(program.module()(x, x, x)[0], ours(x, x, x)[0])


@mechanisms
def test_a_compiled_converted_encoder_in_eval_gets_its_padding(name, device, compiler):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    convert(model, name, **OPTIONS[name])
    model.to(device).eval()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    x = tokens(2, 16, device=device)
    padding = (torch.arange(16) >= torch.tensor([[16], [11]])).to(device)
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        found = compiled(x, src_key_padding_mask=padding)
        alone, unpadded = model(x[1:, :11]), model(x)
    assert_same(found, want)
    torch.testing.assert_close(found[1:, :11], alone, rtol=1e-4, atol=1e-5)
    assert (found - unpadded).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["reduce-overhead", "graph", "graph, float mask"])
@mechanisms
def test_cuda_graphs_replay_what_was_captured(name, form):
    from torch._inductor import config

    torch._dynamo.reset()
    ours = module(name, "cuda").to(torch.bfloat16)
    x = tokens(2, 16, device="cuda").bfloat16()
    options = masks(form, 2, 16, "cuda")
    if form != "reduce-overhead":
        out = torch.empty_like(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            ours(x, x, x, **options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            out.copy_(ours(x, x, x, **options)[0])
        run = graph.replay
    else:
        compiled = torch.compile(ours, fullgraph=True, mode="reduce-overhead")
        out = None
    for padded in (3, 7, 5):
        x.copy_(tokens(2, 16, device="cuda"))
        if options:  # what the graph reads is the tensor that it was captured with
            options["key_padding_mask"][1] = 0
            options["key_padding_mask"][1, -padded:] = -torch.inf
        if form != "reduce-overhead":
            run()
            found = out
        else:
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad(), config.patch("triton.cudagraph_or_error", True):
                found = compiled(x, x, x)[0].clone()
        with torch.no_grad():
            want = ours(x, x, x, **options)[0]
            torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


KERNELS = {
    "linear": lambda x: ops.linear_attention(x, x, x, backend="triton"),
    "linear causal": lambda x: ops.linear_attention(x, x, x, causal=True, backend="triton"),
    "favor": lambda x: ops.favor_attention(x, x, x, DIRECTIONS.to(x.device), backend="triton"),
    "favor causal": lambda x: ops.favor_attention(
        x, x, x, DIRECTIONS.to(x.device), causal=True, backend="triton"
    ),
    "block sparse": lambda x: ops.block_sparse_attention(x, x, x, LAYOUT, backend="triton"),
    "linformer": lambda x: ops.linformer_attention(
        x, x, x, torch.ones(4, 16, device=x.device).tril(), backend="triton"
    ),
    "fft": lambda x: ops.fft_conv(x[0], x[0, :, :, 0], pre_gate=x[0], post_gate=x[0]),
}
DIRECTIONS = ops.draw_projection(16, 16)
LAYOUT = ops.BlockLayout.bigbird(16, block_size=16, num_heads=2, num_random_blocks=0)
kernels = pytest.mark.parametrize("name", KERNELS)


@kernels
def test_one_tensor_given_several_times_compiles_whole(name, kernel_device, compiler):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 16, 16, device=kernel_device, requires_grad=True)
    compiled = torch.compile(KERNELS[name], fullgraph=True, backend=compiler)
    found, want = (
        (out, *torch.autograd.grad(out.sum(), x)) for out in (compiled(x), KERNELS[name](x))
    )
    for a, b in zip(found, want, strict=True):
        assert_same(a.detach(), b.detach())


# torch.func


@kernels
def test_a_second_derivative_by_transforms_is_right_or_refused(name, kernel_device):
    """Never a zero: the kernels have none, and convolution takes the torch path."""
    torch.manual_seed(0)
    x = 0.1 * torch.randn(1, 2, 16, 16, device=kernel_device)
    loss = lambda x: KERNELS[name](x).square().sum()  # noqa: E731
    once = grad(loss)(x)
    other = grad(lambda w: (grad(loss)(x) * w).sum())(x)  # which needs the first alone
    torch.testing.assert_close(other, once)
    twice = grad(lambda x: grad(loss)(x).square().sum())
    if name != "fft":
        with pytest.raises(RuntimeError, match="differentiate twice"):
            twice(x)
        return
    h, direction = 1e-3, torch.randn_like(x)
    up, down = (grad(loss)(x + s * h * direction).square().sum() for s in (1, -1))
    found = (twice(x) * direction).sum()
    torch.testing.assert_close(found, (up - down) / (2 * h), rtol=1e-2, atol=1e-4 * once.norm())


@backends
@mechanisms
def test_grad_and_per_sample_gradients_equal_those_of_a_loop(name, backend, kernel_device):
    ours = module(name, kernel_device, backend)
    x = tokens(3, 16, device=kernel_device)
    parameters = {n: p.detach() for n, p in ours.named_parameters()}

    def loss(parameters, sample):
        sample = sample.unsqueeze(0)
        return functional_call(ours, parameters, (sample,) * 3)[0].square().sum()

    with warnings.catch_warnings():  # torch's own attention loops as well, and says so
        warnings.filterwarnings("ignore", message="There is a performance drop")
        by_vmap = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        want = torch.autograd.grad(loss(dict(ours.named_parameters()), x[i]), ours.parameters())
        once = grad(loss)(parameters, x[i])
        for (label, found), exact in zip(by_vmap.items(), want, strict=True):
            assert_same(found[i], exact)
            assert_same(once[label], exact)


@backends
@mechanisms
def test_vmap_runs_over_samples_masks_and_models(name, backend, kernel_device):
    ours = module(name, kernel_device, backend)
    x = tokens(3, 2, 16, device=kernel_device)
    ignored = torch.arange(16) >= torch.tensor([[9], [16], [12]])
    ignored = ignored.to(kernel_device).unsqueeze(1).expand(3, 2, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        found = vmap(lambda x, mask: ours(x, x, x, mask)[0])(x, ignored)
        if name != "bigbird":  # whose layout is looked up for each
            many = torch.stack([ours.in_proj_weight.detach() * i for i in (1, 2, 3)])
            weights = {n: p for n, p in ours.named_parameters() if n != "in_proj_weight"}
            ensemble = vmap(
                lambda w: functional_call(ours, weights | {"in_proj_weight": w}, (x[0],) * 3)[0]
            )(many)
            for i in range(3):
                own = weights | {"in_proj_weight": many[i]}
                assert_same(ensemble[i], functional_call(ours, own, (x[0],) * 3)[0])
    for i in range(3):
        assert_same(found[i], ours(x[i], x[i], x[i], ignored[i])[0])


@pytest.mark.parametrize("axis", [0, 1])
@mechanisms
def test_a_float_padding_mask_that_vmap_batches_is_read_all_the_same(name, axis, device):
    ours = module(name, device)
    x = tokens(3, 2, 16, device=device)
    ignored = (torch.arange(16) >= torch.tensor([[9], [16], [12]])).to(device)
    padding = torch.zeros(3, 2, 16, device=device).masked_fill(ignored.unsqueeze(1), -torch.inf)
    least = padding.clamp(min=torch.finfo(padding.dtype).min)

    def call(x, mask):
        return ours(x, x, x, mask)[0]

    def loss(x, mask):
        return call(x, mask).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        for mask in (padding.movedim(0, axis), least.movedim(0, axis)):
            found = vmap(call, in_dims=(0, axis))(x, mask)
            by_grad = vmap(grad(loss), in_dims=(0, axis))(x, mask)
        one_mask = vmap(call, in_dims=(0, None))(x, padding[0])
    for i in range(3):
        sample = x[i].clone().requires_grad_()
        want = call(sample, padding[i])
        assert_same(found[i], want.detach())
        assert_same(by_grad[i], torch.autograd.grad(want.square().sum(), sample)[0])
        assert_same(one_mask[i], call(x[i], padding[0]))
    if device == "cpu":  # on a GPU the assertion is asynchronous
        padding[2, 1, 3] = -7.0
        for transformed in (vmap(call), vmap(grad(loss))):
            with pytest.raises(ValueError, match=r"a finite bias .* The largest is -7"):
                transformed(x, padding)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@mechanisms
def test_a_mask_that_vmap_batches_needs_the_hint(name, dtype, device, monkeypatch):
    ours = module(name, device)
    x = tokens(3, 2, 16, device=device)
    hidden = torch.ones(16, 16, dtype=torch.bool, device=device).triu(1)
    mask = torch.zeros(16, 16, device=device).masked_fill(hidden, -torch.inf)
    mask = (hidden if dtype == torch.bool else mask).expand(3, -1, -1)

    def call(x, mask, hint):
        return ours(x, x, x, attn_mask=mask, is_causal=hint)[0]

    dims = (0, 0, None)
    for transform in (vmap(call, dims), vmap(grad(lambda *y: call(*y).sum()), dims)):
        message = r"inside torch\.func\.vmap the values of attn_mask cannot be read.*is_causal=True"
        with pytest.raises(NotImplementedError, match=f"^{type(ours).__name__}: {message}"):
            transform(x, mask, False)
    with pytest.raises(NotImplementedError, match="causal"):  # grad alone hides no value
        grad(lambda x: call(x, torch.eye(16, device=device), False).sum())(x[0])
    if not takes(name, "causal"):
        return
    want = torch.stack([call(y, mask[0], False) for y in x])
    monkeypatch.setenv("FASTATTN_CHECK_MASKS", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        assert_same(vmap(call, dims)(x, mask, True), want)
        ours.causal = True  # trusted, as under torch.compile
        assert_same(vmap(call, dims)(x, mask, False), want)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@mechanisms
def test_a_compiled_vmap_refuses_a_float_mask_and_takes_a_bool_one(name):
    torch._dynamo.reset()
    ours = module(name, "cpu")
    x, ignored = tokens(2, 2, 16, device="cpu"), torch.zeros(2, 2, 16, dtype=torch.bool)
    ignored[1, :, 12:] = True
    compiled = torch.compile(
        vmap(lambda x, mask: ours(x, x, x, mask)[0]), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"inside torch\.func\.vmap cannot be checked\. Give a"):
        compiled(x, torch.zeros(2, 2, 16))
    found = compiled(x, ignored)
    for i in range(2):
        assert_same(found[i], ours(x[i], x[i], x[i], ignored[i])[0])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_vmap_runs_over_convolutions(backend, device):
    from fastattn import _native

    if backend == "native" and _native.refusal(device):
        pytest.skip(_native.refusal(device))
    u, k = torch.randn(3, 2, 4, 30, device=device), torch.randn(3, 4, 30, device=device)

    def convolved(u, k):
        return ops.fft_conv(u, k, backend=backend)

    for dims in ((0, None), (None, 0), (0, 0), (1, 0)):
        axis = dims[0] or 0
        one = u if dims[0] is not None else u[0]
        one = one.movedim(0, axis) if dims[0] else one
        taps = k if dims[1] is not None else k[0]
        found = vmap(convolved, in_dims=dims)(one, taps)
        by_grad = vmap(grad(lambda u, k: convolved(u, k).square().sum(), argnums=(0, 1)), dims)
        of_u, of_k = by_grad(one, taps)
        for i in range(3):
            a = one.select(axis, i) if dims[0] is not None else one
            t = taps[i] if dims[1] is not None else taps
            a, t = a.detach().requires_grad_(), t.detach().requires_grad_()
            assert_same(found[i], convolved(a, t))
            want = torch.autograd.grad(convolved(a, t).square().sum(), (a, t))
            assert_same(of_u[i], want[0])
            assert_same(of_k[i], want[1])


def torchs_attention_has_one(device):
    """A forward derivative, which is a matter of its version, of the device and of the shape."""
    x = torch.randn(1, 2, 8, 8, device=device)
    attend = lambda x: nn.functional.scaled_dot_product_attention(x, x, x)  # noqa: E731
    try:
        torch.func.jvp(attend, (x,), (x,))
    except NotImplementedError:
        return False
    return True


@backends
@mechanisms
def test_a_forward_derivative_is_exact_or_refused(name, backend, kernel_device):
    """On the kernels there is none, nor in some of torch's own attention: never a zero."""
    ours = module(name, kernel_device, backend)
    x, t = (tokens(2, 16, device=kernel_device) for _ in range(2))

    def derivative():
        return torch.func.jvp(lambda x: ours(x, x, x)[0], (x,), (t,))[1]

    if backend == "triton":
        with pytest.raises(NotImplementedError, match="forward"):
            derivative()
        return
    try:
        found = derivative()
    except NotImplementedError as error:
        has_one = torchs_attention_has_one(kernel_device)
        if name != "linformer" or has_one or "forward" not in str(error):
            raise
        return
    h = 1e-3
    with torch.no_grad():
        want = (ours(*(x + h * t,) * 3)[0] - ours(*(x - h * t,) * 3)[0]) / (2 * h)
    assert (found - want).norm() < 0.02 * want.norm()


# Parametrizations and adapters


class LowRank(nn.Module):
    """W + B A, with B zero at first."""

    def __init__(self, weight, rank=2):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1], device=weight.device))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight):
        return weight + self.b @ self.a


@mechanisms
def test_an_adapter_as_a_parametrization_trains_alone_in_an_encoder(name, device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, device=device)
    layer.self_attn = module(name, device)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = tokens(2, 12, device=device)
    want = model(x)
    model.requires_grad_(False)
    for block in model.layers:
        for part, tensor in (
            (block.self_attn, "in_proj_weight"),
            (block.self_attn.out_proj, "weight"),
        ):
            adapter = LowRank(getattr(part, tensor))
            parametrize.register_parametrization(part, tensor, adapter)
    assert isinstance(model.layers[0].self_attn, MECHANISMS[name])
    assert_same(model(x), want)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (model(x) - x).square().sum().backward()
        optimizer.step()
    assert all(p.grad.abs().sum() > 0 for p in trained)
    for model.training in (True, False):
        with torch.no_grad():
            assert (model(x) - want).abs().max() > 1e-4
    with torch.no_grad():
        tuned = model(x)
        assert torch.equal(copy.deepcopy(model)(x), tuned)
    for block in model.layers:
        parametrize.remove_parametrizations(block.self_attn, "in_proj_weight")
        parametrize.remove_parametrizations(block.self_attn.out_proj, "weight")
    assert type(model.layers[0].self_attn) is MECHANISMS[name]
    with torch.no_grad():
        assert_same(model(x), tuned)


# Convolutions


CONVOLUTIONS = {
    "causal": lambda **x: LongConv(WIDTH, 16, **x),
    "both ways, gated": lambda **x: LongConv(
        WIDTH, 16, bidirectional=True, gated=True, squash=1e-3, **x
    ),
    "toeplitz": lambda **x: ToeplitzMix(WIDTH, 64, independent=6, **x),
}
convolutions = pytest.mark.parametrize("name", CONVOLUTIONS)


def convolution(name, device, **options):
    torch.manual_seed(0)
    made = CONVOLUTIONS[name](device=device, **options)
    if isinstance(made, ToeplitzMix):  # whose taps start near zero
        with torch.no_grad():
            made.taps.normal_()
            made.reverse.normal_()
    return made


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@convolutions
def test_a_convolution_compiles_whole(name, padded, device, compiler):
    torch._dynamo.reset()
    layer = convolution(name, device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    for b, n in ((2, 20), (3, 33)):
        x = tokens(b, n, device=device).requires_grad_()
        mask = (torch.arange(n, device=device) > n - 5).expand(b, n) if padded else None
        out, want = (f(x, key_padding_mask=mask) for f in (compiled, layer))
        wanted = [x, *layer.parameters()]
        found = torch.autograd.grad(out.square().sum(), wanted)
        grads = torch.autograd.grad(want.square().sum(), wanted)
        for a, exact in zip((out, *found), (want, *grads), strict=True):
            assert_same(a, exact)


@convolutions
def test_a_convolution_exports_and_takes_other_batches(name, device):
    layer, x = convolution(name, device).eval(), tokens(2, 16, device=device)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    for b in (2, 5):
        x = tokens(b, 16, device=device)
        assert_same(program.module()(x), layer(x))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CONVOLUTIONS), ("causal", {"dropout": 0.5})],
    ids=str,
)
def test_a_checkpointed_convolution_has_the_same_gradients(name, options, reentrant, device):
    layer = convolution(name, device, **options)
    x = tokens(2, 16, device=device).requires_grad_()
    wanted = [x, *layer.parameters()]
    torch.manual_seed(5)
    want = torch.autograd.grad(layer(x).square().sum(), wanted)
    torch.manual_seed(5)
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    for a, exact in zip(wanted, want, strict=True):
        assert_same(a.grad, exact)


@convolutions
def test_per_sample_gradients_of_a_convolution_equal_those_of_a_loop(name, device):
    layer, x = convolution(name, device), tokens(3, 16, device=device)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample.unsqueeze(0),)).square().sum()

    by_vmap = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        want = torch.autograd.grad(loss(dict(layer.named_parameters()), x[i]), layer.parameters())
        for found, exact in zip(by_vmap.values(), want, strict=True):
            assert_same(found[i], exact)


@convolutions
def test_a_convolutions_state_loads_as_weights_alone(name, device):
    layer, x, buffer = convolution(name, device), tokens(2, 16, device=device), io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = CONVOLUTIONS[name](device=device)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert torch.equal(other(x), layer(x))


# Autocast


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@mechanisms
def test_autocast_on_a_gpu_trains_and_equals_eval(name, dtype):
    ours = module(name, "cuda")
    x = tokens(2, 16, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        out = ours(x, x, x)[0]
        assert out.dtype == dtype
        ours.eval()
        with torch.no_grad():
            assert torch.equal(ours(x, x, x)[0], out)
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in ours.parameters())
    assert_near = torch.testing.assert_close
    assert_near(out.float(), ours(x, x, x)[0], rtol=0.05, atol=0.05)


@mechanisms
def test_scaled_losses_of_float16_train_as_float32_does(name, device):
    ours = module(name, device)
    other = copy.deepcopy(ours)
    x = tokens(4, 16, device=device)
    padding = (torch.arange(16, device=device) > 11).repeat(4, 1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, other)]
    losses = []
    for _ in range(4):
        with torch.autocast(device, dtype=torch.float16):
            out = ours(x, x, x, padding)[0]
        assert out.dtype == torch.float16
        half, whole = (y.float().square().mean() for y in (out, other(x, x, x, padding)[0]))
        scaler.scale(half).backward()
        scaler.step(optimizers[0])
        scaler.update()
        whole.backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append((half.item(), whole.item()))
    assert scaler.get_scale() == 2.0**10  # no step was left out
    halves, wholes = zip(*losses, strict=True)
    assert wholes[-1] < 0.98 * wholes[0]
    assert halves == pytest.approx(wholes, rel=0.02)


# A training step in CUDA graphs


STEPS = [
    *((name, torch.float32, "padded") for name in (*MECHANISMS, *CONVOLUTIONS)),
    *((name, torch.float32, "causal") for name in MECHANISMS if takes(name, "causal")),
    *((name, torch.bfloat16, "padded") for name in CONVOLUTIONS),  # of kernels of its own
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "form"), STEPS, ids=str)
def test_a_step_is_captured_whole_and_replayed_with_the_gradients_of_eager(name, dtype, form):
    from torch._inductor import config

    torch._dynamo.reset()
    layer = (convolution if name in CONVOLUTIONS else module)(name, "cuda").to(dtype)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    ignored = (torch.arange(16, device="cuda") > 11).repeat(2, 1)
    options = {"is_causal": True} if form == "causal" else {"key_padding_mask": ignored}

    def step(f, x):
        out = f(x, **options) if name in CONVOLUTIONS else f(x, x, x, **options)[0]
        wanted = [x, *layer.parameters()]
        return [out, *torch.autograd.grad(out.float().square().sum(), wanted)]

    with config.patch("triton.cudagraph_or_error", True):
        for _ in range(3):  # as it is, captured, replayed
            x = tokens(2, 16, device="cuda").to(dtype).requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            for found, want in zip(step(compiled, x), step(layer, x), strict=True):
                assert want.abs().max() > 0
                if dtype == torch.float32:
                    assert_same(found, want)
                else:  # the compiler rounds less often; a rounding is 2^-9
                    assert (found - want).float().norm() < 2**-6 * want.float().norm()
