"""What a backend cannot do or was not calibrated for is refused by name, with what it can do."""

import pytest
import torch
from reference import random_qkv

import efficient_attn as ea

Q, K, V = random_qkv()
SIZES = {"linformer": {"rank": 4, "num_heads": 4, "max_tokens": 6}}


def built(name, **options):
    return ea.build(name, head_dim=8, **(SIZES.get(name, {}) | options))


def linformer(**options):
    return built("linformer", **options).double()(Q, K, V)


def calibrate(q=Q, k=K, *, name="performer-full", **options):
    return built(name).calibrate(q, k, **options)


def exact(kernel, *, causal=False, key_mask=None, keys=7, grad=False, **options):
    inputs = [x.float().requires_grad_(grad) for x in (Q, K[:, :, :keys], V[:, :, :keys])]
    return built("exact", causal=causal, kernel=kernel, **options)(*inputs, key_mask=key_mask)


HIDDEN = torch.zeros(2, 7, dtype=torch.bool)
CAUSAL = "Causal backends: .*block-topk.* window"
MULTIPLE = "window=65 .* a multiple of 4 can: 64 or 68"
QUERIES = "needs as many queries as keys; q has 1 .*StateCache"
NOT_HERE = r"kernel='cudnn'\) runs on cuda, not on cpu\. Kernels for this call: default, flash, math, flex\."
BACKWARD = r"kernel='flex'\) has no backward pass on a CPU\. Kernels for this call: default, flash, math\."
CALIBRATE = r"call backend\.calibrate\(q, k\), or ea\.calibrate"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (lambda: built("window", window=4), ea.OptionError, r"window=4 has no middle.* 3 or 5"),
        (lambda: built("window-clusters", causal=True), ea.UnsupportedError, CAUSAL),
        (lambda: built("window-clusters", window=65), ea.OptionError, MULTIPLE),
        (lambda: linformer(max_tokens=None), ea.UnsupportedError, "build it with max_tokens"),
        (lambda: built("block-topk", causal=True)(Q[:, :, -1:], K, V), ea.UnsupportedError, QUERIES),
        (lambda: linformer(rank=7), ea.OptionError, "rank=7 is more than max_tokens=6.*rank=6 or less"),
        (lambda: linformer(sharing="none", num_heads=None), ea.OptionError, "sharing='none'.*num_heads"),
        (lambda: linformer(), ea.ShapeError, "at most 6 tokens and k has 7.*max_tokens=7"),
        (lambda: built("performer-full", causal=True).extend(Q, K, V), ea.CalibrationError, CALIBRATE),
        (lambda: calibrate(key_mask=HIDDEN), ea.ShapeError, "a key that is not masked.* 0 keys are not"),
        (lambda: calibrate(k=K / 0), ea.DataError, "k holds numbers that are not finite"),
        (lambda: calibrate(q=Q[:, :, :0]), ea.ShapeError, "needs a query"),
        (lambda: calibrate(q=Q[..., :3], k=K[..., :3]), ea.ShapeError, "q has 3 entries a vector"),
        (lambda: calibrate(name="exact"), ea.UnsupportedError, "'exact' has nothing to calibrate"),
        (lambda: exact("cudnn"), ea.UnsupportedError, NOT_HERE),
        (lambda: exact("flex", grad=True), ea.UnsupportedError, BACKWARD),
        (lambda: exact("flex", keys=6), ea.UnsupportedError, "as many queries as keys, not 7 and 6"),
        (lambda: exact("flex", causal=True, key_mask=~HIDDEN), ea.UnsupportedError, r"mask \[2, 1, 7, 7\]"),
        (lambda: built("exact", kernel="flex")(Q, K, V), ea.UnsupportedError, "not compute in float64"),
        (lambda: exact("flash", dropout=0.1), ea.OptionError, "no dropout; kernel='default' has"),
        (lambda: exact("cuda"), ea.UnknownNameError, "kernel is called 'cuda'.*cudnn, default"),
    ],
)
def test_what_cannot_be_done_is_refused(request_, error, message):
    with pytest.raises(error, match=message):
        request_()
