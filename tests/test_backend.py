"""The choice of a backend, and the checks at the door."""

import pytest
import torch

from fastattn._backend import select
from fastattn._check import check_same, check_shapes


def test_the_first_that_accepts_runs():
    assert select("op", None, triton="no GPU", torch=None, reference=None) == "torch"


def test_a_named_backend_runs_or_raises(monkeypatch):
    assert select("op", "reference", torch=None, reference=None) == "reference"
    with pytest.raises(ValueError, match="op cannot run on backend 'triton': no GPU"):
        select("op", "triton", triton="no GPU", torch=None)
    with pytest.raises(ValueError, match="op has no backend 'cuda'; it has triton, torch"):
        select("op", "cuda", triton="no GPU", torch=None)
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    with pytest.raises(ValueError, match="no GPU"):
        select("op", None, triton="no GPU", torch=None)
    assert select("op", "torch", triton="no GPU", torch=None) == "torch"


def test_shapes_bind_letters():
    q, k = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 6, 7)
    assert check_shapes(q=(q, "b h n d"), k=(k, "b h s d"))["s"] == 6
    with pytest.raises(ValueError, match="n is 6 here but 5 in q"):
        check_shapes(q=(q, "b h n d"), k=(k, "b h n d"))
    with pytest.raises(ValueError, match=r"q must be \(b, n\), got shape \(2, 3, 5, 7\)"):
        check_shapes(q=(q, "b n"))


def test_devices_must_agree():
    with pytest.raises(ValueError, match="k must be on cpu like q, it is on meta"):
        check_same(q=torch.zeros(1), k=torch.zeros(1, device="meta"))
