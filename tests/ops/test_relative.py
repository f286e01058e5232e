"""Relative positions: the formula, its gradients, streaming, memory, and the layers that have them."""

import pytest
import torch
from reference import largest_difference

import efficient_attn as ea
from efficient_attn.measure.memory import peak
from efficient_attn.ops.softmax.relative import relative_attention

HEAD_DIM, HEADS = 8, 4


def defined(q, k, v, table, *, scale, back, ahead, key_mask, longest):
    """The formula in float64 with all scores at once; a query without a visible key has the output zero."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
    distance = torch.arange(k.shape[2]) - rows[:, None]
    biases = table.double()[:, distance.clamp(-longest, longest) + longest]
    seen = ((distance >= -back) & (distance <= ahead)).expand(len(q), 1, -1, -1)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    weights = torch.where(seen, (scale * q.double() @ k.mT + biases).exp(), 0.0)
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-300) @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("longest", [1, 5, 200])
@pytest.mark.parametrize(("back", "ahead"), [(2, 0), (3, 3), (0, 0), (400, 400), (400, 0), (150, 150)])
@pytest.mark.parametrize(("tokens", "kv_heads"), [(1, 4), (5, 1), (130, 2), (300, 2)])
def test_outputs_and_gradients_are_those_of_the_formula(tokens, kv_heads, back, ahead, longest, masked):
    generator = torch.Generator().manual_seed(tokens + longest)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # As many earlier keys as queries where a causal call may have them.
    k_tokens = tokens if ahead else 2 * tokens
    q, k = drawn(2, HEADS, tokens, HEAD_DIM), drawn(2, kv_heads, k_tokens, HEAD_DIM)
    v, table = drawn(2, kv_heads, k_tokens, HEAD_DIM), drawn(HEADS, 2 * longest + 1)
    inputs = [x.requires_grad_() for x in (q, k, v, table)]
    key_mask = torch.rand(2, k_tokens, generator=generator) < 0.5 if masked else None
    call = {"scale": 0.3, "back": back, "ahead": ahead, "key_mask": key_mask}
    hidden = [k, v]
    if masked:
        hidden = [x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (k, v)]
    out = relative_attention(q, *hidden, table if ahead else table[:, : longest + 1], **call)
    expected = defined(q, k, v, table, longest=longest, **call)
    assert largest_difference(out, expected, inputs) <= 1e-10


BUILT = [
    ("exact", {}),
    ("exact", {"causal": True}),
    ("window", {"window": 5}),
    ("window", {"window": 4, "causal": True}),
]


def built(name, options, tokens=12, dtype=torch.float64, heads=HEADS, head_dim=HEAD_DIM):
    backend = ea.build(name, head_dim=head_dim, num_heads=heads, max_distance=3, **options).to(dtype)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(backend.core.distance_bias, generator=generator)
    tensors = torch.randn(3, 1, heads, tokens, head_dim, generator=generator, dtype=dtype).unbind()
    return backend, tensors


@pytest.mark.parametrize(("name", "options"), BUILT)
def test_the_backend_has_the_sides_of_its_name(name, options):
    backend, (q, k, v) = built(name, options, tokens=9)
    causal, window = options.get("causal", False), options.get("window")
    back, ahead = (20, 0 if causal else 20) if window is None else (3, 0) if causal else (2, 2)
    table = backend.core.distance_bias.detach()
    full = torch.cat([table, table[:, :3]], dim=1) if causal else table
    call = {"scale": HEAD_DIM**-0.5, "back": back, "ahead": ahead, "key_mask": None, "longest": 3}
    torch.testing.assert_close(backend(q, k, v).detach(), defined(q, k, v, full, **call))


@pytest.mark.parametrize(("name", "options"), BUILT)
def test_gradients_of_inputs_and_biases_are_those_of_finite_differences(name, options):
    backend, tensors = built(name, options, tokens=5, heads=2, head_dim=2)
    inputs = [x.requires_grad_() for x in (*tensors, backend.core.distance_bias.detach())]

    def run(q, k, v, table):
        return torch.func.functional_call(backend, {"core.distance_bias": table}, (q, k, v))

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize(("name", "options"), [pair for pair in BUILT if "causal" in pair[1]])
def test_extend_continues_the_distances(name, options):
    backend, (q, k, v) = built(name, options)
    whole, state, parts = backend(q, k, v), None, []
    for part in (slice(0, 7), slice(7, 8), slice(8, 12)):
        out, state = backend.extend(q[..., part, :], k[..., part, :], v[..., part, :], state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=-2), whole)


def test_attention_dropout_acts_in_training_alone():
    backend, tensors = built("exact", {"dropout": 0.5}, tokens=40)
    alone = backend.eval()(*tensors)
    assert torch.equal(backend(*tensors), alone)
    assert not torch.allclose(backend.train()(*tensors), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_the_biases(dtype):
    backend, tensors = built("exact", {}, dtype=torch.float32)
    expected = backend(*tensors)
    out = backend.to(dtype)(*(x.to(dtype) for x in tensors))
    assert out.dtype is dtype
    # Rounded inputs move a score of norms 8 · 3 / √8 and a bias of 3 by 5 eps, a weight by 10 eps of itself,
    # and an output of values below 3 by three times as much.
    torch.testing.assert_close(out.float(), expected, rtol=0.0, atol=30 * torch.finfo(dtype).eps)


@pytest.mark.serial
@pytest.mark.parametrize("name", ["exact", "window"])
def test_memory_in_training_grows_with_the_tokens_not_their_square(name):
    backend, _ = built(name, {}, dtype=torch.float32)

    def train(tensors):
        backend(*tensors).sum().backward()

    def measured(tokens):
        generator = torch.Generator().manual_seed(0)
        tensors = torch.randn(3, 1, HEADS, tokens, HEAD_DIM, generator=generator).unbind()
        inputs = [x.requires_grad_() for x in tensors]
        train(inputs)
        return peak(lambda: train(inputs), device="cpu").peak_bytes

    # Scores of all rows would take 4 · 4 · 2048² = 67 MB, and four times the memory of 1024 tokens.
    assert measured(2048) < 2.5 * measured(1024)


def test_a_stack_with_relative_positions_tells_orders_apart_and_shifts_alike():
    torch.manual_seed(0)
    stack = ea.Encoder(16, 2, "exact", num_layers=1, feed_forward_dim=16, positions="relative").double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    turned = x.flip(1)
    torch.testing.assert_close(stack(turned).flip(1), stack(x))
    bias = stack.blocks[0].attention.backend.core.distance_bias
    assert bias.shape == (2, 2 * 128 + 1)
    torch.nn.init.normal_(bias)
    assert not torch.allclose(stack(turned).flip(1), stack(x))
    # Masked tokens in front shift every position, and no distance.
    front, mask = torch.cat([torch.randn_like(x), x], dim=1), torch.arange(12)[None] >= 6
    torch.testing.assert_close(stack(front, key_mask=mask)[:, 6:], stack(x))


def test_a_decoder_with_relative_positions_generates_as_it_computes():
    torch.manual_seed(0)
    model = ea.LanguageModel(16, 2, "window", window=4, num_layers=2, vocabulary=11, positions="relative")
    for block in model.stack.blocks:
        torch.nn.init.normal_(block.attention.backend.core.distance_bias)
    tokens = torch.randint(0, 11, (1, 9))
    state, parts = None, []
    for part in tokens.split(4, dim=1):
        logits, state = model.extend(part, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (
            lambda: ea.Encoder(16, 2, "performer-positive", positions="relative"),
            ea.UnsupportedError,
            r"'performer-positive' adds no bias.*'exact' and 'window' do",
        ),
        (
            lambda: ea.build("exact", head_dim=8, max_distance=4),
            ea.OptionError,
            "max_distance=4 is a learned bias for each head: give num_heads",
        ),
        (
            lambda: ea.build("window", head_dim=8, num_heads=2, max_distance=-1),
            ea.OptionError,
            "max_distance is at least 0, not -1",
        ),
        (
            lambda: built("exact", {})[0](torch.zeros(1, 4, 5, 8), *torch.zeros(2, 1, 4, 12, 8)),
            ea.UnsupportedError,
            "q has 5 tokens and k has 12: relative positions",
        ),
        (
            lambda: ea.AttentionLayer(16, 2, positions="relative")(
                torch.zeros(1, 3, 16), torch.zeros(1, 4, 16)
            ),
            ea.UnsupportedError,
            "Relative positions compare tokens of one sequence",
        ),
    ],
)
def test_wrong_requests_say_what_works(request_, error, message):
    with pytest.raises(error, match=message):
        request_()


@pytest.mark.compile
@pytest.mark.parametrize(("name", "options"), BUILT)
def test_a_compiled_backend_is_one_graph(name, options):
    backend, tensors = built(name, options, tokens=200, dtype=torch.float32)
    compiled = torch.compile(backend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), backend(*tensors))
