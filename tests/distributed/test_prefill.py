"""A prefill on several ranks leaves the state of the whole sequence on each of them."""

import pytest
import torch
from threads import bytes_sent

import efficient_attn as ea
from efficient_attn.conformance.threads import on_threads
from efficient_attn.distributed.calls import exchange_of
from efficient_attn.distributed.layout import KINDS, local_tokens

RANKS, TOKENS, MORE = 3, 66, 5
CASES = [
    ("exact", {}),
    ("exact-dense", {}),
    # The window ends within the last segment, reaches over a rank, over all, or is the own key alone.
    *(("window", {"window": window}) for window in (8, 40, 81, 1)),
    ("linear-relu", {}),
    ("performer-positive", {"num_features": 12}),
    ("performer-trig", {"num_features": 64}),
]


def drawn(tokens):
    """q, k and v; q and k are short, so that no signed denominator is small."""
    shapes = ((4, 8, 0.3), (2, 8, 0.3), (2, 6, 1.0))
    return [norm * torch.randn(2, heads, tokens, dim, dtype=torch.float64) for heads, dim, norm in shapes]


def close(x, expected):
    # Sums of at most 71 terms, each with a few roundings of 1.1e-16.
    return (x - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_decoding_goes_on_from_a_prefill_on_several_ranks(name, options, masked, kind):
    torch.manual_seed(0)
    backend = ea.build(name, head_dim=8, causal=True, **options).double()
    qkv, later = drawn(TOKENS), drawn(MORE)
    mask = torch.rand(2, TOKENS) > 0.3 if masked else None
    if masked:
        # Ranks without a real key: the last of one sequence, the first of the other.
        mask[0, -(TOKENS // RANKS) :], mask[1, : TOKENS // RANKS] = False, False
    out, state = backend.extend(*qkv, key_mask=mask)
    expected, _ = backend.extend(*later, state)

    def call(layout):
        inputs = [local_tokens(x, 2, layout) for x in qkv]
        real = None if mask is None else local_tokens(mask, 1, layout)
        part, after = exchange_of(backend).prefill(backend, *inputs, real, layout)
        return part, after, local_tokens(out, 2, layout)

    for part, after, rows in on_threads(RANKS, kind, call):
        assert close(part, rows)
        assert [x.shape for x in after] == [x.shape for x in state]
        steps = []
        for i in range(MORE):
            step, after = backend.extend(*(x[:, :, i : i + 1] for x in later), after)
            steps.append(step)
        assert close(torch.cat(steps, dim=2), expected)


def test_gradients_pass_through_the_state_of_all_ranks():
    torch.manual_seed(0)
    for name, options in CASES:
        backend = ea.build(name, head_dim=8, causal=True, **options).double()
        _, k, v = qkv = drawn(TOKENS)
        later = drawn(1)
        whole = [k.clone().requires_grad_(), v.clone().requires_grad_()]
        out, _ = backend.extend(*later, backend.extend(qkv[0], *whole)[1])
        expected = torch.autograd.grad(out.square().sum(), whole, materialize_grads=True)

        def call(layout, backend=backend, qkv=qkv, later=later):
            q, k, v = (local_tokens(x, 2, layout).requires_grad_() for x in qkv)
            _, state = exchange_of(backend).prefill(backend, q, k, v, None, layout)
            # Every rank decodes the token; the gradient is that of the sum of their losses.
            out, _ = backend.extend(*later, state)
            loss = out.square().sum() / RANKS
            return torch.autograd.grad(loss, (k, v), materialize_grads=True)

        parts = zip(*on_threads(RANKS, "contiguous", call), strict=True)
        for x, whole_grad in zip(parts, expected, strict=True):
            assert close(torch.cat(x, dim=2), whole_grad)


def test_bytes_of_the_state_of_a_window_do_not_depend_on_the_length():
    backend = ea.build("window", head_dim=8, causal=True, window=9).double()

    def sent(tokens):
        qkv = drawn(tokens)
        counts = []
        with bytes_sent(counts.append):
            on_threads(
                RANKS,
                "contiguous",
                lambda layout: exchange_of(backend).prefill(
                    backend, *(local_tokens(x, 2, layout) for x in qkv), None, layout
                ),
            )
        return sorted(counts)

    assert sent(48) == sent(96) != []
