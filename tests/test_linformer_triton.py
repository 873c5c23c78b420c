"""The Linformer kernels against the float64 definition: interpreted in float32 without a GPU."""

from functools import partial

import pytest
import torch

from fastattn import LinformerAttention, _launch, _tuning, ops, testing
from fastattn.ops import linformer_triton

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
kernels = partial(ops.linformer_attention, backend="triton")
CASES = (
    testing.AttentionCase("one-token", "one key", 1, 1, 1, 1, 1, 16, 16),
    testing.AttentionCase("ragged", "no size fits a tile", 2, 2, 2, 37, 37, 20, 12),
    testing.AttentionCase("grouped", "gradients of several heads add up", 1, 4, 2, 34, 34, 16, 16),
    testing.AttentionCase("longer-keys", "s > n, several splits", 2, 2, 1, 5, 70, 16, 24),
    testing.AttentionCase("narrow", "far less than a tile", 1, 2, 2, 35, 35, 1, 1),
    testing.AttentionCase("widest", "the largest widths", 1, 1, 1, 17, 17, 256, 256),
)
forms = pytest.mark.parametrize("own", [False, True], ids=["shared", "per head"])


def projections(case, own, slots=21, more=3):
    generator = torch.Generator().manual_seed(5)
    shape = (case.h,) * own + (slots, case.s + more)
    return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for _ in range(2)]


def compare(case, own, dtypes=DTYPES, slots=21, **options):
    tried = partial(kernels, **options)
    reference = partial(ops.linformer_attention_reference, **options)
    for dtype in dtypes:
        inputs = case.inputs(dtype, DEVICE)
        inputs += [x.to(DEVICE, dtype) for x in projections(case, own, slots)]
        testing.assert_as_accurate_as(tried, reference, inputs)


@forms
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_value_and_gradients_are_as_accurate_as_the_definition(case, own):
    compare(case, own)


@forms
@pytest.mark.parametrize("slots", [1, 16, 40, 100])
def test_any_number_of_slots_will_do(slots, own):
    """More than a tile holds are several, whose gradients of queries add up."""
    compare(CASES[1], own, slots=slots)


@forms
@pytest.mark.parametrize("kind", ["right", "left", "interior", "all"])
def test_padding_changes_nothing_whatever_it_holds(kind, own):
    case = CASES[1]
    mask = testing.padding_masks(case.b, case.s)[kind].to(DEVICE)
    compare(case, own, key_padding_mask=mask)
    call = partial(kernels, key_padding_mask=mask)
    q, k, v = case.inputs(torch.float32, DEVICE)
    e, f = (x.to(DEVICE) for x in projections(case, own))
    hidden = mask[:, None, :, None]
    dirty = [q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf), e, f]
    want = testing.value_and_grads(call, [q, k, v, e, f])
    for a, b in zip(testing.value_and_grads(call, dirty), want, strict=True):
        assert torch.equal(a, b)


@forms
@pytest.mark.parametrize("name", ["ragged", "grouped", "longer-keys"])
def test_keys_that_are_the_values_have_one_gradient(name, own, monkeypatch):
    launch, are_one = linformer_triton.launch_grad_tokens, []
    monkeypatch.setattr(
        linformer_triton,
        "launch_grad_tokens",
        lambda hidden, shape, same, *group: (
            are_one.append(same),
            launch(hidden, shape, same, *group),
        ),
    )
    case = next(c for c in CASES if c.name == name)
    mask = testing.padding_masks(case.b, case.s)["interior"].to(DEVICE)
    e, f = projections(case, own)
    views = torch.stack([f, f], 1)[:, 0]  # of other strides
    for other, hidden in ((f, None), (f, mask), (views, None)):
        tried, want = (
            lambda q, x, e, f, of=of: of(q, x, x, e, f, key_padding_mask=hidden)  # noqa: B023
            for of in (kernels, ops.linformer_attention_reference)
        )
        for dtype in DTYPES:
            q, x, _ = case.inputs(dtype, DEVICE)
            inputs = [q, x, *(y.to(DEVICE, dtype) for y in (e, other))]
            testing.assert_as_accurate_as(tried, want, inputs)
    assert len(are_one) >= 3
    assert all(are_one)


def test_slots_that_are_off_are_not_seen():
    q, keys, values = (torch.randn(2, 2, n, 8, device=DEVICE) for n in (9, 20, 20))
    off = torch.zeros(2, 20, dtype=torch.bool, device=DEVICE)
    off[0, ::3] = off[1] = True
    call = lambda q, k, v: linformer_triton.attend(q, k, v, off, 0.3)  # noqa: E731
    want = lambda q, k, v: (  # noqa: E731
        ops.linformer.attend(q, k, v, off, 0.3, "reference")
    )
    inputs = [q, keys, values]
    testing.assert_as_accurate_as(call, want, inputs)
    assert torch.all(call(*inputs)[1] == 0)


@pytest.fixture
def planned_anew():
    _launch.forget()
    yield
    _launch.forget()


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_any_number_of_splits_gives_the_same(splits, planned_anew, monkeypatch):
    asked = []
    monkeypatch.setattr(_tuning, "linformer_splits", lambda *about: asked.append(about) or splits)
    compare(CASES[3], False)
    compare(CASES[1], True)
    before = len(asked)
    assert before
    compare(CASES[1], True)
    assert len(asked) == before  # plans are kept


def test_any_layout_in_memory_gives_the_same_and_two_runs_are_bitwise_equal():
    case = CASES[1]
    q, k, v = case.inputs(torch.float32, DEVICE)
    e, f = (x.to(DEVICE) for x in projections(case, False))
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    views += [torch.stack([x, x], 1)[:, 0] for x in (e, f)]
    first = testing.value_and_grads(kernels, [q, k, v, e, f])
    mixed = [q, views[1], v, e, views[4]]  # keys and values are no pair
    for other in (views, mixed, [q, k, v, e, f]):
        for a, b in zip(testing.value_and_grads(kernels, other), first, strict=True):
            assert torch.equal(a, b)


def test_gradients_that_nobody_needs_are_not_made():
    case = CASES[1]
    q, k, v = case.inputs(torch.float32, DEVICE)
    e, f = (x.to(DEVICE) for x in projections(case, False))
    e.requires_grad_()
    (only,) = torch.autograd.grad(kernels(q, k, v, e, f).sum(), e)
    leaves = [x.requires_grad_() for x in (q, k, v, e, f)]
    torch.testing.assert_close(only, torch.autograd.grad(kernels(*leaves).sum(), leaves)[3])
    assert torch.all(only[:, case.s :] == 0)


def test_the_registered_operators_pass_opcheck():
    case = CASES[2]
    q, k, _ = case.inputs(torch.float32, DEVICE)
    e, f = (x.to(DEVICE) for x in projections(case, True))
    mask = torch.rand(case.b, case.s, device=DEVICE) < 0.3
    tests, found = ("test_schema", "test_faketensor"), torch.ops.fastattn
    for proj, hidden, heads, other in (
        (e[0], None, case.h_kv, (None, None)),
        (f, mask, case.h, (k.sin(), f.cos())),
        (f, mask, case.h, (None, f.cos())),
    ):
        pair = other[1] is not None
        call = (k, proj, *other, hidden, heads)
        torch.library.opcheck(found.linformer_compress.default, call, test_utils=tests)
        slots, *_ = found.linformer_compress(*call)
        dslots = torch.randn_like(slots), torch.randn_like(slots) if pair else None
        for wanted in ((True,) * 4, (True, False, False, True), (False, True, True, True)):
            wanted = [w and x is not None for w, x in zip(wanted, call[:4], strict=True)]
            back = (*dslots, *call[:5], *wanted)
            torch.library.opcheck(found.linformer_compress_backward.default, back, test_utils=tests)
        off = None if hidden is None else torch.rand(case.b, slots.shape[2], device=DEVICE) < 0.3
        call = (q, slots, slots, off, 0.5)
        torch.library.opcheck(found.linformer_attend.default, call, test_utils=tests)
        out, lse = found.linformer_attend(*call)
        back = (torch.randn_like(out), *call[:4], out, lse, 0.5)
        torch.library.opcheck(found.linformer_attend_backward.default, back, test_utils=tests)


def test_a_second_derivative_raises_and_func_grad_works():
    case = CASES[1]
    inputs = [*case.inputs(torch.float32, DEVICE), *projections(case, False)]
    q, *rest = (x.to(DEVICE).requires_grad_() for x in inputs)
    (dq,) = torch.autograd.grad(kernels(q, *rest).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
    loss = lambda q: kernels(q, *rest).square().sum()  # noqa: E731
    (want,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), want)


@pytest.mark.parametrize("s", [23, 24])
def test_a_projection_may_lie_anyhow(s):
    """Also transposed, where no column has to be added."""
    q, k, v = (torch.randn(2, 4, n, 16, device=DEVICE) for n in (5, s, s))
    e = torch.randn(s, 3, device=DEVICE).t()
    f = torch.randn(4, s, 3, device=DEVICE).transpose(1, 2)
    for both in ((e, e), (f, f)):
        testing.assert_as_accurate_as(kernels, ops.linformer_attention_reference, [q, k, v, *both])


@pytest.mark.parametrize("swapped", [False, True])
def test_one_projection_may_be_of_heads_where_heads_are_grouped(swapped):
    case = CASES[2]
    inputs = [x.to(DEVICE) for x in case.inputs(torch.float32, DEVICE)]
    both = [projections(case, own)[0].to(DEVICE) for own in (swapped, not swapped)]
    testing.assert_as_accurate_as(kernels, ops.linformer_attention_reference, [*inputs, *both])


@pytest.mark.parametrize(("b", "n", "s"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_inputs_are_no_error(b, n, s):
    q, k, v = (torch.randn(b, 2, x, 8, device=DEVICE, requires_grad=True) for x in (n, s, s))
    e = torch.randn(5, 6, device=DEVICE, requires_grad=True)
    out = kernels(q, k, v, e)
    assert out.shape == (b, 2, n, 8)
    assert torch.all(out == 0)
    grads = torch.autograd.grad(out.sum(), (q, k, v, e))
    assert all(x.isfinite().all() for x in grads)


def test_no_query_heads_are_no_error():
    q, k, v = (torch.randn(2, h, 8, 16, device=DEVICE, requires_grad=True) for h in (0, 2, 2))
    e = torch.randn(0, 3, 8, device=DEVICE)
    grads = torch.autograd.grad(kernels(q, k, v, e).sum(), (q, k, v))
    assert all(torch.all(x == 0) for x in grads)


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
@pytest.mark.parametrize("kind", ["learned", "mean", "max", "dynamic"])
def test_the_module_runs_on_the_kernels(kind, sharing):
    if kind in ("mean", "max") and sharing != "headwise":
        pytest.skip("has no projection to share")
    layer = LinformerAttention(
        24, 2, batch_first=True, seq_len=40, slots=9, kind=kind, sharing=sharing, device=DEVICE
    )
    x = torch.randn(2, 33, 24, device=DEVICE)
    mask = (torch.arange(33) > torch.tensor([[32], [20]])).to(DEVICE)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    results = []
    for backend in ("torch", "triton"):
        layer.backend = backend
        out = layer(x, x, x, mask)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), parameters)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
