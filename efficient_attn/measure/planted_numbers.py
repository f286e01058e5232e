"""Numbers planted in a long text and dialogue for at its end: retrieval of many keys by a language model."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efficient_attn.measure.error import Logits

# Each prompt plants a number for every name and asks for all of them.
NAMES = (
    "apple", "river", "castle", "violin", "desert", "planet", "garden", "mirror",
    "bridge", "candle", "forest", "hammer", "island", "ladder", "temple", "window",
)  # fmt: skip
PROMPTS = 13

_TASK = "Read this text and remember the secret numbers in it.\n"
_FACT = "\nThe secret number of the {} is {}. Remember it.\n"
_QUESTION = "\nThe secret number of the {} is "


class Prompt(NamedTuple):
    """A text with numbers, then all questions with their right answers.

    Attributes:
        ids: Tokens, [1 tokens].
        answers: Positions of the tokens of each answer.
    """

    ids: Tensor
    answers: tuple[range, ...]


def prompts(tokenizer: Any, text: str, tokens: int, *, seed: int) -> Iterator[Prompt]:
    """Prompts of at most so many tokens, in the chat template of the tokenizer if it has one."""
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
    numbers = {name: str(draws.randrange(10_000, 100_000)) for name in NAMES}
    facts = [encode(_FACT.format(*fact)) for fact in draws.sample(list(numbers.items()), len(NAMES))]
    start, end = encode(f"{before}{_TASK}"), encode(f"\nWhat are the secret numbers?{after}")
    answers, dialogue = list[range](), list[int]()
    for name in draws.sample(NAMES, len(NAMES)):
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
    """Whether every token of an answer is the most likely one after all tokens before it.

    Args:
        logits: Logits of a slice of positions, [positions vocabulary].
    """
    ids = prompt.ids[0]
    return [
        bool((logits(slice(x.start - 1, x.stop - 1)).argmax(dim=-1).cpu() == ids[x.start : x.stop]).all())
        for x in prompt.answers
    ]
