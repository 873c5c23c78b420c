"""The scan kernels of FAVOR+ against its recurrence in float64: interpreted without a GPU."""

from functools import partial

import pytest
import torch

from fastattn import testing
from fastattn.ops import draw_projection, favor_attention, favor_attention_scan

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIANTS = ("positive", "hyperbolic", "oprf", "relu")
CASE = testing.AttentionCase("", "", 2, 4, 2, 150, 150, 12, 20)
kernels = partial(favor_attention_scan, backend="triton")
recurrence = partial(favor_attention_scan, backend="reference")


def projection(variant):
    w = draw_projection(20, CASE.d, num_heads=2).to(DEVICE)
    return w + 1 / CASE.d if variant == "relu" else w  # so that no row has a tiny mass by chance


def pieces(run, leaves, w, cuts, mask=None, state=None, **options):
    """Outputs of all pieces, and the last state."""
    outs = []
    for low, high in zip((0, *cuts), (*cuts, leaves[0].shape[2]), strict=True):
        hidden = None if mask is None else mask[:, low:high]
        part = (x[:, :, low:high] for x in leaves)
        out, state = run(*part, w, state, key_padding_mask=hidden, **options)
        outs.append(out)
    return torch.cat(outs, 2), state


def sums(state):
    """What a state stands for, whatever its shifts."""
    scale = 1 if state.shift is None else state.shift.double().exp()
    kv = state.kv.double()
    return kv * scale.unsqueeze(-1) if state.shift is not None else kv, state.z.double() * scale


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_split_and_single_tokens_give_what_the_recurrence_gives(variant):
    leaves = CASE.inputs(torch.float32, DEVICE)
    mask = testing.padding_masks(2, 150)["interior"].to(DEVICE)
    w = projection(variant)
    want, after = recurrence(
        *(x.double() for x in leaves), w, variant=variant, key_padding_mask=mask
    )
    options = {"mask": mask, "variant": variant}
    every = ((64, 128), (60, 60), tuple(range(3, 10)), (), (70,), (149,))
    for cuts in every if DEVICE == "cuda" else every[:3]:  # the interpreter takes its time
        with torch.no_grad():  # a piece of one token is a step
            out, state = pieces(kernels, leaves, w, cuts, **options)
        assert (out - want).norm() <= 2e-6 * want.norm()
        for got, exact in zip(sums(state), sums(after), strict=True):
            assert (got - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_go_through_the_state(variant):
    w = projection(variant)

    def loss(run):
        def found(q, k, v):
            first, state = run(*(x[:, :, :70] for x in (q, k, v)), w, variant=variant)
            second, state = run(*(x[:, :, 70:] for x in (q, k, v)), w, state, variant=variant)
            ends = [x.float() for x in sums(state)]
            return torch.cat((first, second), 2).cos().sum() + sum(
                (x / 64).sin().sum() for x in ends
            )

        return found

    leaves = CASE.inputs(torch.float32, DEVICE)
    exact = testing.value_and_grads(loss(recurrence), [x.double() for x in leaves])
    for got, want in zip(testing.value_and_grads(loss(kernels), leaves), exact, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_a_state_may_come_from_the_torch_path_and_go_there():
    leaves = CASE.inputs(torch.float32, DEVICE)
    w = projection("positive")
    want = favor_attention(*(x.double() for x in leaves), w, causal=True, backend="reference")
    torch_path = partial(favor_attention_scan, backend="torch")
    for first, second in ((kernels, torch_path), (torch_path, kernels)):
        for cut in (149, 70):
            with torch.no_grad():
                one, state = first(*(x[:, :, :cut] for x in leaves), w)
                other, _ = second(*(x[:, :, cut:] for x in leaves), w, state)
            out = torch.cat((one, other), 2)
            assert (out - want).norm() <= 2e-6 * want.norm()


def test_no_tokens_leave_a_state_as_it_is():
    q, k, v = (x[:, :, :0] for x in CASE.inputs(torch.float32, DEVICE))
    w = projection("positive")
    _, state = kernels(*CASE.inputs(torch.float32, DEVICE), w)
    out, after = kernels(q, k, v, w, state)
    assert out.shape == (2, 4, 0, 20)
    for got, want in zip(sums(after), sums(state), strict=True):
        torch.testing.assert_close(got, want)


def test_a_state_does_not_drift_while_nothing_is_added():
    q, k, v = (torch.randn(1, 2, 1, 128, device=DEVICE) for _ in range(3))
    w = draw_projection(32, 128).to(DEVICE)  # some shifts are not zero
    with torch.no_grad():
        _, state = kernels(q, k, v, w)
        _, again = kernels(
            q, k, v, w, state, key_padding_mask=torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
        )
    assert (state.shift > 0).any()
    for a, b in zip(state, again, strict=True):
        assert torch.equal(a, b)


def test_rows_that_see_only_a_state_of_long_keys_stay_means():
    """What the torch path scales by the largest is far below what the kernels scale it to."""
    q, k, v = (torch.randn(1, 1, 6, 16, device=DEVICE) for _ in range(3))
    k = 40 * k / k.norm(dim=-1, keepdim=True)
    w = draw_projection(16, 16).to(DEVICE)
    _, state = favor_attention_scan(q, k, torch.full_like(v, 3), w, scale=1, backend="torch")
    hidden = torch.ones(1, 2, dtype=torch.bool, device=DEVICE)
    for n in (1, 2):
        with torch.no_grad():
            out, _ = kernels(
                *(x[:, :, :n] for x in (q, k, v)), w, state, scale=1, key_padding_mask=hidden[:, :n]
            )
        torch.testing.assert_close(out, torch.full_like(out, 3))


def test_a_token_without_gradients_is_one_launch(monkeypatch):
    from fastattn.ops import favor_causal_triton, favor_states_triton, favor_step_triton

    seen = []

    def spy(launch):
        return lambda kernel, *rest: (seen.append(kernel), launch(kernel, *rest))[1]

    for module in (favor_causal_triton, favor_states_triton, favor_step_triton):
        monkeypatch.setattr(module, "launch", spy(module.launch))
    token = [x[:, :, :1] for x in CASE.inputs(torch.float32, DEVICE)]
    with torch.no_grad():
        kernels(*token, projection("positive"))
    assert seen == ["favor_step.step"]


def test_a_state_without_query_heads_is_that_of_the_torch_path():
    q, k, v = CASE.inputs(torch.float32, DEVICE)
    for variant in VARIANTS:
        w = projection(variant)
        _, got = kernels(q[:, :0], k, v, w, variant=variant)
        _, want = favor_attention_scan(q, k, v, w, variant=variant, backend="torch")
        for a, b in zip(sums(got), sums(want), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prefill_and_steps_agree_in_half_precision(dtype):
    case = testing.AttentionCase("", "", 2, 8, 2, 300, 300, 64, 64)
    leaves = case.inputs(dtype, DEVICE)
    w = draw_projection(256, 64).to(DEVICE)
    with torch.no_grad():
        whole = favor_attention(*leaves, w, causal=True, backend="triton")
        out, _ = pieces(kernels, leaves, w, (200, *range(290, 300)))
    assert (out - whole).float().norm() <= 1e-2 * whole.float().norm()
