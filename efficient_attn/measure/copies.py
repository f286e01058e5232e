"""Copied passages and planted numbers: tests of a decoder's recall beyond any window.

The end of a sequence repeats passages of its beginning in another order, or a dialogue at the end of a long
text asks for numbers planted in it. The loss of a text hardly shows whether a model still finds them.
"""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_attn.measure.error import Logits

# Number of passages, tokens per passage, and first tokens of a passage that are not scored.
PASSAGES, LENGTH, FIRST = 16, 48, 8

# Tokens between a passage and its copy, at least.
DISTANCE = 1024

_COPIED = PASSAGES * LENGTH

FEWEST_TOKENS = 2 * _COPIED + DISTANCE

# Each prompt plants a number for every name and asks for all of them.
PLANTED = (
    "apple", "river", "castle", "violin", "desert", "planet", "garden", "mirror",
    "bridge", "candle", "forest", "hammer", "island", "ladder", "temple", "window",
)  # fmt: skip
PROMPTS = 13

_TASK = "Read this text and remember the secret numbers in it.\n"
_FACT = "\nThe secret number of the {} is {}. Remember it.\n"
_QUESTION = "\nThe secret number of the {} is "


def copies_begin(tokens: int) -> int:
    """Position of the first copied token, the length of the text before the copies."""
    return tokens - _COPIED if tokens >= FEWEST_TOKENS else tokens


def with_copies(ids: Tensor, *, seed: int) -> Tensor:
    """Replace the end of a sequence [1 tokens] by copies in random order, if it has room for them."""
    begin = copies_begin(ids.shape[1])
    if begin == ids.shape[1]:
        return ids
    draws = random.Random(seed)
    stretch = (begin - DISTANCE) // PASSAGES
    starts = [n * stretch + draws.randint(0, stretch - LENGTH) for n in range(PASSAGES)]
    draws.shuffle(starts)
    return torch.cat([ids[:, :begin], *(ids[:, start : start + LENGTH] for start in starts)], dim=1)


def copy_recall(logits: Logits, exact: Logits, ids: Tensor) -> dict[str, float]:
    """Share of copied tokens predicted right, with replaced and with exact attention.

    With the standard error of their difference, from the passages.
    """
    begin, end = copies_begin(len(ids)), len(ids)
    blocks = [slice(start, start + LENGTH - 1) for start in range(begin, end, LENGTH)]
    shares = []
    for model in (logits, exact):
        # The token after each position. The first tokens of a copy do not yet identify its passage.
        right = [model(block).argmax(dim=-1) == ids[block.start + 1 : block.stop + 1] for block in blocks]
        passages = torch.cat([F.pad(part, (1, 0)) for part in right]).view(PASSAGES, LENGTH)
        shares.append(passages[:, FIRST:].double().mean(dim=1))
    difference = shares[0] - shares[1]
    return {
        "copy_recall": float(shares[0].mean()),
        "copy_recall_exact": float(shares[1].mean()),
        "copy_recall_error": float(difference.std() / PASSAGES**0.5),
    }


class Prompt(NamedTuple):
    """A text with numbers, then all questions with their right answers.

    Attributes:
        ids: Tokens, [1 tokens].
        answers: Positions of the tokens of each answer.
    """

    ids: Tensor
    answers: tuple[range, ...]


def prompts(tokenizer: Any, text: str, tokens: int, *, seed: int) -> Iterator[Prompt]:
    """Texts with planted numbers, in the chat template of the tokenizer if it has one."""
    for number in range(PROMPTS):
        yield _prompt(tokenizer, text, tokens, random.Random(f"{seed} {number}"))


def _prompt(tokenizer: Any, text: str, tokens: int, draws: random.Random) -> Prompt:
    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    before, after = "", "\n"
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": "\0"}]
        chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, _, after = chat.partition("\0")
    numbers = {name: str(draws.randrange(10_000, 100_000)) for name in PLANTED}
    facts = [encode(_FACT.format(*fact)) for fact in draws.sample(list(numbers.items()), len(PLANTED))]
    start, end = encode(f"{before}{_TASK}"), encode(f"\nWhat are the secret numbers?{after}")
    answers, dialogue = list[range](), list[int]()
    for name in draws.sample(PLANTED, len(PLANTED)):
        dialogue += encode(_QUESTION.format(name))
        digits = encode(numbers[name])
        answers.append(range(len(dialogue), len(dialogue) + len(digits)))
        dialogue += [*digits, *encode(".")]
    words = encode(text)
    room = tokens - len(start) - sum(map(len, facts)) - len(end) - len(dialogue)
    first = draws.randrange(len(words))
    # The facts stand between pieces of equal length.
    length = max(room, 0) // (len(facts) + 1)
    ids = start
    for number, fact in enumerate([[], *facts]):
        piece = range(first + number * length, first + (number + 1) * length)
        ids += [*fact, *(words[place % len(words)] for place in piece)]
    ids += end
    places = tuple(range(len(ids) + answer.start, len(ids) + answer.stop) for answer in answers)
    return Prompt(torch.tensor([ids + dialogue]), places)


def right_answers(logits: Logits, prompt: Prompt) -> list[bool]:
    """Whether every token of an answer is the most likely token after all tokens before it."""
    ids = prompt.ids[0]
    return [
        bool((logits(slice(x.start - 1, x.stop - 1)).argmax(dim=-1).cpu() == ids[x.start : x.stop]).all())
        for x in prompt.answers
    ]
